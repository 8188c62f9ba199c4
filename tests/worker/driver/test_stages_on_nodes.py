"""Pipeline parallelism with several nodes: the stages of a replica lie on one where they can, else on few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import events, final_state, manifest, run
from ray_cluster import ray_cluster, resources
from support.samples import ALL, unless_drawn
from support.step_lines import read_steps
from test_run_folder import job

from rljob_api import derived

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NODES, STAGES = ("127.0.0.2", "127.0.0.3", "127.0.0.4"), 2
SPEC: dict[str, Any] = {
    "steps": 4 if ALL else 2,
    "checkpoint": {"everySteps": 2, "keep": 1},
    "records": {"httpPort": 0, "lingerSeconds": 0, "tensorboard": False},
    "training": {"precision": "fp32", "pipelineParallel": STAGES},
    "weightSync": {"probeEverySteps": 1},
}
SAME = ("rollout/raw_reward", "train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff")


def _apart(devices: int, **nodes: int) -> dict[str, Any]:
    groups = {"trainer": {"devicesPerNode": devices, **nodes}, "rollout": {"devicesPerNode": 1}}
    if nodes:
        groups["rollout"]["nodes"] = 1
    return {"profile": "cpu", **groups, "threadsPerDevice": 1}


LAYOUTS = {
    "pipeline stages on two nodes": (resources(2, 2), resources(1, 4)),
    "a replica over two nodes": (resources(2, 1), resources(1, 2)),
    "a replica over two nodes, engines elsewhere": (_apart(1, nodes=2), _apart(2)),
}
"""On nodes, and with as many ranks on one machine."""


@pytest.mark.parametrize(
    ("of_nodes", "of_one"), [pytest.param(*both, marks=unless_drawn(name), id=name) for name, both in LAYOUTS.items()]
)
def test_two_stages_on_two_nodes(of_nodes: dict[str, Any], of_one: dict[str, Any], tmp_path: Path) -> None:
    """Engines get whole models: a probe compares what they and the trainers compute after each hand-over."""
    folder = tmp_path / "run"
    mode = {"mode": "Disaggregated"} if "rollout" in of_nodes else {}
    ranks = derived.trainers(job(resources=of_one, **mode).spec)
    with ray_cluster(tmp_path, {NODES[0]: 2, NODES[1]: 2, NODES[2]: 1}) as cluster:
        cluster.submit(manifest(tmp_path, **SPEC, **mode, resources=of_nodes), folder, "stages")
        assert cluster.end_of("stages", 300)["status"] == "SUCCEEDED", cluster.logs("stages")
    assert any(event["event"] == "ready" for event in events(folder))
    records = [record for record in read_steps(folder) if record["step"]]
    assert [record["step"] for record in records] == list(range(1, SPEC["steps"] + 1))
    for record in records:
        assert record["weights"]["verified"]
        assert record["metrics"]["weights/probe_abs_diff_max"] < 1e-5
    if ALL:
        together = tmp_path / "together"
        together.mkdir()
        code, output = run("run", manifest(together, **SPEC, **mode, resources=of_one), "--output", together / "run")
        assert code == 0, output
        alone = [record for record in read_steps(together / "run") if record["step"]]
        for ours, theirs in zip(records, alone, strict=True):
            assert [ours["metrics"][name] for name in SAME] == [theirs["metrics"][name] for name in SAME]
        assert final_state(folder, ranks=ranks) == final_state(together / "run", ranks=ranks), "bit for bit"
