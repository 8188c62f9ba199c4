"""Counts of data classes and files on the paths of a prompt and of a weight, taken from a running step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import manifest, run
from support.samples import unless_drawn
from support.warm.protocol import CENSUS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), unless_drawn("a job whose classes and files are counted")]

LIMITS = {"driver": 16, "trainer": 12, "engine": 12}
"""Data classes of the driver between a prompt and the batch; files that a weight passes on either side."""


def test_a_step_makes_few_data_classes_and_a_weight_passes_few_files(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    job = manifest(tmp_path, steps=2)
    code, output = run("run", job, "--output", tmp_path / "run", environment={CENSUS: str(seen)})
    assert code == 0, output
    found = {role: json.loads((seen / f"{role}.json").read_text()) for role in LIMITS}
    print("\n".join(f"{role}: {len(names)}: {' '.join(names)}" for role, names in found.items()))
    assert "rljob_worker.flow.group.Group" in found["driver"]
    assert "rljob_worker.weightsync.trainer" in found["trainer"]
    assert "rljob_worker.weightsync.vllm_extension" in found["engine"]
    too_many = {role: names for role, names in found.items() if len(names) > LIMITS[role]}
    assert not too_many
