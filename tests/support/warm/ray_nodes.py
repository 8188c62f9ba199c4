"""`ray` for nodes on a busy machine, with workers that are forked: `ray_nodes.py start ...` as `ray start ...`.

All ports of a node's agents are to be given: its raylet waits 15 seconds for those that they choose, and dies.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rljob_worker.upstream.ray_node import told_agent_ports


def workers_are_forked() -> None:
    """From here on the nodes that this process starts have their workers started by `ray_worker.py`."""
    from ray._private.parameter import RayParams

    absent = RayParams.update_if_absent

    def update_if_absent(self: RayParams, **given: object) -> None:
        absent(self, **given | {"setup_worker_path": str(Path(__file__).with_name("ray_worker.py"))})

    RayParams.update_if_absent = update_if_absent


def agents_may_be_slow() -> None:
    """From here on the nodes that this process starts know their agent's ports before it has started."""
    from ray._private.node import Node

    Node.start_raylet = told_agent_ports(Node.start_raylet, getattr)


if __name__ == "__main__":
    from ray.scripts.scripts import main

    agents_may_be_slow()
    workers_are_forked()
    sys.exit(main())
