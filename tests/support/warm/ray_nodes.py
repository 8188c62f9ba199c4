"""`ray` for nodes on a busy machine, with workers that are forked: `ray_nodes.py start ...` as `ray start ...`.

All ports of a node's agents are to be given: its raylet waits 15 seconds for those that they choose, and dies. A node
that is no head has no agent of the dashboard: nobody asks it anything.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rljob_worker.upstream.ray_node import told_agent_ports, without_agent

_DASHBOARD = "/dashboard/dashboard.py"
_MODULES = ["--modules-to-load=JobHead,NodeHead,StateHead"]


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


def dashboard_is_what_jobs_need() -> None:
    """From here on the dashboards that this process starts have what the job and state APIs need, no more."""
    from ray._private import services

    start_process = services.start_ray_process

    def start(command: list[str], *arguments: object, **named: object) -> object:
        is_dashboard = any(part.endswith(_DASHBOARD) for part in command)
        return start_process([*command, *(_MODULES if is_dashboard else [])], *arguments, **named)

    services.start_ray_process = start


def agents_do_nothing() -> None:
    """From here on the nodes that this process starts have no agent of the dashboard."""
    from ray._private import services

    services.start_ray_process = without_agent(services.start_ray_process)


if __name__ == "__main__":
    from ray.scripts.scripts import main

    agents_may_be_slow()
    if "--head" in sys.argv:
        dashboard_is_what_jobs_need()
    else:
        agents_do_nothing()
    workers_are_forked()
    sys.exit(main())
