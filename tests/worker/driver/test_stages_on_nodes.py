"""Pipeline parallelism with several nodes: the stages of a replica lie on one, whatever their ranks are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from jobs import events, final_state, manifest, run
from ray_cluster import ray_cluster, resources
from support.samples import skip_unless_drawn
from support.step_lines import read_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ALL = os.environ.get("RLJOB_FAULTS") == "all"
NODES, DEVICES, STAGES = ("127.0.0.2", "127.0.0.3"), 2, 2
SPEC: dict[str, Any] = {
    "steps": 4 if ALL else 2,
    "checkpoint": {"everySteps": 2, "keep": 1},
    "records": {"httpPort": 0, "lingerSeconds": 0, "tensorboard": False},
    "training": {"precision": "fp32", "pipelineParallel": STAGES},
    "weightSync": {"probeEverySteps": 1},
}
SAME = ("rollout/raw_reward", "train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff")


def test_two_stages_on_each_of_two_nodes(tmp_path: Path) -> None:
    """Engines get whole models: a probe compares what they and the trainers compute after each hand-over."""
    skip_unless_drawn("pipeline stages on two nodes")
    folder = tmp_path / "run"
    with ray_cluster(tmp_path, dict.fromkeys(NODES, DEVICES)) as cluster:
        cluster.submit(manifest(tmp_path, **SPEC, resources=resources(len(NODES), DEVICES)), folder, "stages")
        assert cluster.end_of("stages", 300)["status"] == "SUCCEEDED", cluster.logs("stages")
    assert any(event["event"] == "ready" for event in events(folder))
    records = read_steps(folder)
    assert [record["step"] for record in records] == list(range(1, SPEC["steps"] + 1))
    for record in records:
        assert record["weights"]["verified"]
        assert record["metrics"]["weights/probe_abs_diff_max"] < 1e-5
    if ALL:
        together = tmp_path / "together"
        together.mkdir()
        one = manifest(together, **SPEC, resources=resources(1, len(NODES) * DEVICES))
        code, output = run("run", one, "--output", together / "run")
        assert code == 0, output
        for ours, theirs in zip(records, read_steps(together / "run"), strict=True):
            assert [ours["metrics"][name] for name in SAME] == [theirs["metrics"][name] for name in SAME]
        assert final_state(folder, ranks=4) == final_state(together / "run", ranks=4), "bit for bit"
