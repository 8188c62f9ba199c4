"""`ray` with trainers and engines that are forked: `ray_nodes.py start ...` as `ray start ...`."""

from __future__ import annotations

import sys
from pathlib import Path


def workers_are_forked() -> None:
    """From here on the nodes that this process starts have their workers started by `ray_worker.py`."""
    from ray._private.parameter import RayParams

    absent = RayParams.update_if_absent

    def update_if_absent(self: RayParams, **given: object) -> None:
        absent(self, **given | {"setup_worker_path": str(Path(__file__).with_name("ray_worker.py"))})

    RayParams.update_if_absent = update_if_absent


if __name__ == "__main__":
    from ray.scripts.scripts import main

    workers_are_forked()
    sys.exit(main())
