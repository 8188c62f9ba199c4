"""Jobs from `rljob run` to the last checkpoint with `profile: ascend-a2`, on torch_npu's wheel and vllm-ascend's.

MindSpeed is the real one where it is importable; `cann/last` stands in for it elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cann.build import Cann
from jobs import KV_CACHE_BYTES, manifest, run
from support.samples import unless_drawn
from support.step_lines import read_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEVICES = 2
ROLLOUT = {"promptsPerStep": 8, "samplesPerPrompt": 4, "maxResponseTokens": 4, "ignoreEos": True}
EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
TRAINING = {"precision": "fp32", "optimizer": {"lr": 1.0e-3}}
OFFLOADED = {"optimizer": {"lr": 1.0e-3, "hostOffload": True}}
JOBS: dict[str, dict[str, Any]] = {
    "two replicas, two engines": {"steps": 20, "rollout": ROLLOUT, "training": TRAINING},
    "experts, one engine over both": {
        "steps": 3,
        "model": {"random": {"seed": 0, "config": EXPERTS}},
        "rollout": ROLLOUT | {"tensorParallel": DEVICES},
        "training": TRAINING | OFFLOADED | {"expertParallel": DEVICES},
    },
    "a shard of FSDP each": {"steps": 3, "rollout": ROLLOUT, "training": TRAINING | {"backend": "FSDP"}},
    "half of each of FSDP's rows": {
        "steps": 3,
        "rollout": ROLLOUT,
        "training": TRAINING | OFFLOADED | {"backend": "FSDP", "contextParallel": DEVICES},
    },
    "engines with graphs": {"steps": 3, "rollout": ROLLOUT, "training": TRAINING},
    "a trainer and an engine apart": {"steps": 3, "mode": "Disaggregated", "rollout": ROLLOUT, "training": TRAINING},
}
TOGETHER = {"nodes": 1, "devicesPerNode": DEVICES}
APART = {"trainer": {"devicesPerNode": 1}, "rollout": {"devicesPerNode": 1}}
SAME = ("rollout/raw_reward", "train/loss", "train/grad_norm", "train/entropy_loss")
ROUNDING = 2e-5


def steps_of(profile: str, name: str, folder: Path, environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    folder.mkdir()
    resources = {"profile": profile} | (APART if "mode" in JOBS[name] else TOGETHER)
    fields = dict(JOBS[name])
    if name == "engines with graphs" and profile != "cpu":
        # On CPU it would compile.
        fields["rollout"] = ROLLOUT | {"graphMode": True}
    job = manifest(folder, **fields, resources=resources)
    cold = environment is not None
    code, output = run("run", job, "--output", folder / "run", environment=environment, cold=cold)
    assert code == 0, output
    return read_steps(folder / "run")


@pytest.mark.parametrize("name", [pytest.param(name, marks=unless_drawn(f"NPUs: {name}")) for name in JOBS])
def test_a_job_on_npus_learns_as_on_cpus(name: str, cann: Cann, tmp_path: Path) -> None:
    """Trainers sleep in the memory saver's library, engines in vllm-ascend's pools; HCCL's collectives run between
    trainers, between an engine's workers, and where devices are apart from trainer to engine."""
    devices = tmp_path / "devices"
    devices.mkdir()
    npu = steps_of("ascend-a2", name, tmp_path / "npu", cann.shell(devices, DEVICES))
    cpu = steps_of("cpu", name, tmp_path / "cpu")
    assert len(npu) == JOBS[name]["steps"]
    for metric in SAME:
        ours, theirs = (np.array([step["metrics"][metric] for step in steps]) for steps in (npu, cpu))
        np.testing.assert_allclose(ours, theirs, rtol=ROUNDING, atol=1e-6, err_msg=metric)
    for step in npu:
        assert step["weights"]["verified"]
        if "mode" in JOBS[name]:
            continue
        memory = step["memory"]
        assert memory["engine-0"]["rollout_sleep"]["released_bytes"] > KV_CACHE_BYTES
        for trainer in ("trainer-0", "trainer-1"):
            asleep = memory[trainer]["sleep"]
            assert asleep["state"] == "PAUSED"
            assert asleep["moved_bytes"] > 0
