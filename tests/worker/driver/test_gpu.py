"""Tests that need an NVIDIA GPU: skipped where there is none, and run by hand where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from jobs import REPOSITORY, run
from support.step_lines import read_steps

from rljob_worker.devices.checksum import device_checksum, wraps_around

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here, or torch is built without CUDA"),
]

STEPS = 200
KV_CACHE_BYTES = 2**30
"""Without it vLLM takes most of the device, and each wake-up maps that anew."""


@pytest.mark.parametrize("nbytes", [0, 3, 4, 5121, 2**20, 2**25 + 13])
def test_the_checksum_there_is_the_one_here(nbytes: int) -> None:
    data = torch.randint(0, 256, (nbytes + 1,), dtype=torch.uint8)
    there = data.cuda()
    assert wraps_around(there.device)
    assert device_checksum(there[:nbytes]) == device_checksum(data[:nbytes])
    assert device_checksum(there[1:]) == device_checksum(data[1:]), "not on a word's boundary"
    if nbytes:
        there[nbytes // 2] ^= 1
        assert device_checksum(there[:nbytes]) != device_checksum(data[:nbytes])


def test_the_quickstart_learns_on_a_device_that_trainer_and_engine_share(tmp_path: Path) -> None:
    document = yaml.safe_load((REPOSITORY / "examples" / "quickstart.yaml").read_text())
    document["spec"]["steps"] = STEPS
    document["spec"]["resources"] = {"profile": "cuda", "nodes": 1, "devicesPerNode": 1}
    document["spec"]["rollout"]["kvCacheBytes"] = KV_CACHE_BYTES
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(document))
    code, output = run("run", job, "--output", tmp_path / "run", cold=True)
    assert code == 0, output
    records = read_steps(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[0]["metrics"]["rollout/raw_reward"] < 0.1
    assert min(record["metrics"]["rollout/raw_reward"] for record in records[-10:]) > 0.9
    for record in records:
        assert record["weights"]["verified"] is True
        engine, trainer = record["memory"]["engine-0"], record["memory"]["trainer-0"]
        # Level 2: nothing of the engine stays on the device.
        assert engine["rollout_sleep"]["released_bytes"] >= KV_CACHE_BYTES
        assert engine["rollout_sleep"]["released_weight_bytes"] > 0
        assert trainer["sleep"]["paused"] == trainer["sleep"]["moved_bytes"] > 0
