"""A whole job whose engines copy from the trainers' own parameters: the bits of one with staging slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import manifest, run
from support.run_bits import digests_of
from support.step_lines import read_steps

from rljob_api.validation import load_manifest
from rljob_worker.models.trained import trained_model
from rljob_worker.planning.plan import plan_memory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RANKS = 2


def finished(folder: Path, transport: str) -> Path:
    """Two tensor-parallel trainers in bf16, which sleep between their turns, and two engines of one device each."""
    folder.mkdir()
    job = manifest(
        folder,
        steps=2,
        training={"precision": "bf16", "tensorParallel": RANKS, "optimizer": {"lr": 1.0e-2}},
        resources={"profile": "cpu", "devicesPerNode": RANKS, "threadsPerDevice": 1},
        weightSync={"transport": transport, "probeEverySteps": 1},
    )
    code, output = run("run", job, "--output", folder / "run")
    assert code == 0, output
    return folder / "run"


def test_a_job_without_slots_has_the_same_bits_and_keeps_its_parameters_awake(tmp_path: Path) -> None:
    runs = {transport: finished(tmp_path / transport, transport) for transport in ("Auto", "InPlace")}
    assert digests_of(runs["Auto"]) == digests_of(runs["InPlace"])
    asleep: dict[str, dict[str, Any]] = {}
    for transport, folder in runs.items():
        records = read_steps(folder)
        assert all(record["weights"]["verified"] for record in records)
        asleep[transport] = records[-1]["memory"]["trainer-0"]["sleep"]
    assert read_steps(runs["InPlace"])[-1]["weights"]["staging_bytes"] == 0
    spec = load_manifest(yaml.safe_load((tmp_path / "InPlace" / "job.yaml").read_text())).spec
    plan = plan_memory(spec, trained_model(spec.training.backend, runs["InPlace"] / "model"))
    [rollout] = [row.components for row in plan.devices[0].phases if row.phase == "rollout"]
    stays = asleep["Auto"]["paused"] - asleep["InPlace"]["paused"]
    assert stays == pytest.approx(rollout["shared weights"], rel=0.05)
