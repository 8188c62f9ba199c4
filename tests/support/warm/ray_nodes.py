"""`ray` for nodes on a busy machine, with workers that are forked: `ray_nodes.py start ...` as `ray start ...`.

All ports of a node's agents are to be given: its raylet waits 15 seconds for those that they choose, and dies. A node
that is no head has no agent of the dashboard: nobody asks it anything.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rljob_worker.upstream.ray_node import told_agent_ports, without_agent


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


def agents_do_nothing() -> None:
    """From here on the nodes that this process starts have no agent of the dashboard."""
    from ray._private import services

    services.start_ray_process = without_agent(services.start_ray_process)


if __name__ == "__main__":
    from ray.scripts.scripts import main

    agents_may_be_slow()
    if "--head" not in sys.argv:
        agents_do_nothing()
    workers_are_forked()
    sys.exit(main())
