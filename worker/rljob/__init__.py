"""RLJob from Python: check a manifest, run it, and read what a run left as tables.

    import rljob

    run = rljob.run("examples/quickstart.yaml", "runs/first", set=["spec.steps=20"])
    run.metrics()["rollout/raw_reward"]
    run.trajectories().to_pandas()

These names are the public ones; what begins with `rljob_` may change between versions.
"""

from __future__ import annotations

from rljob.jobs import JobError, run, validate
from rljob.runs import Run, load
from rljob.tables import Table
from rljob_api.problems import Problem
from rljob_worker.errors import UserError

__all__ = ["JobError", "Problem", "Run", "Table", "UserError", "load", "run", "validate"]
