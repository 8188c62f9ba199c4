"""Each example for NPUs against the published config of its model: it fits, and needs what is noted here."""

from __future__ import annotations

from pathlib import Path

import pytest
from published_models import CONFIGS, published
from support.samples import drawn

from rljob_api.hardware import device_memory
from rljob_api.spec import TrainingBackend
from rljob_api.validation import load_manifest
from rljob_worker.models.transformers_model import TransformersModel
from rljob_worker.planning.plan import plan_memory
from rljob_worker.planning.tables import GIB

EXAMPLES = Path(__file__).parents[3] / "examples"
PEAKS = {
    "qwen2.5-0.5b-frozen-lake-8xnpu": ("Qwen2.5-0.5B-Instruct", [("actor_train", 11.95), ("rollout", 49.31)]),
    "qwen2.5-7b-rlvr-2x8": ("Qwen2.5-7B", [("actor_train", 36.57)]),
    "qwen2.5-7b-rlvr-2x8-apart": ("Qwen2.5-7B", [("actor_train", 35.18), ("update_weights", 50.83)]),
    "qwen2.5-7b-rlvr-2x8-halves": ("Qwen2.5-7B", [("actor_train", 35.18), ("update_weights", 50.83)]),
    "qwen2.5-7b-rlvr-fsdp-2x8": ("Qwen2.5-7B", [("actor_train", 30.04)]),
    "qwen3-30b-a3b-fsdp-8xnpu": ("Qwen3-30B-A3B", [("actor_train", 42.94)]),
    "qwen3-8b-rlvr-fsdp-16xa3": ("Qwen3-8B", [("actor_train", 39.98)]),
    "qwen3-30b-a3b-grpo-16xa3": ("Qwen3-30B-A3B", [("update_weights", 40.69)]),
    "qwen3-4b-grpo-4xnpu": ("Qwen3-4B", [("rollout", 24.97)]),
    "qwen3-4b-grpo-8x910b-torch-mode": ("Qwen3-4B", [("actor_train", 45.66)]),
    "qwen3-4b-grpo-8x910b1": ("Qwen3-4B", [("actor_train", 45.66)]),
    "qwen3-8b-rlvr-16xa3": ("Qwen3-8B", [("actor_train", 45.74)]),
    "qwen3-vl-8b-grpo-8xnpu": ("Qwen3-VL-8B-Instruct", [("actor_train", 35.03)]),
    "qwen3.5-9b-grpo-4xnpu": ("Qwen3.5-9B", [("rollout", 29.97)]),
    "qwen3.5-9b-grpo-8xnpu-async": ("Qwen3.5-9B", [("actor_train", 24.23), ("update_weights", 47.00)]),
}
"""Example -> its model, and for each group of devices the phase of the peak and its GiB."""


def for_npus() -> list[str]:
    paths = sorted(EXAMPLES.glob("*.yaml"))
    return [path.stem for path in paths if device_memory(load_manifest(path).spec) is not None]


def by_fsdp(name: str) -> bool:
    return load_manifest(EXAMPLES / f"{name}.yaml").spec.training.backend is TrainingBackend.FSDP


BY_FSDP = [name for name in for_npus() if by_fsdp(name)]
"""Seconds each: transformers builds their models."""
BY_MEGATRON = [name for name in for_npus() if name not in BY_FSDP]


def test_each_example_is_noted() -> None:
    assert sorted(PEAKS) == sorted(for_npus())


@pytest.mark.parametrize("name", [*BY_MEGATRON, *drawn("examples for FSDP", BY_FSDP)])
def test_an_example_fits_its_devices(name: str) -> None:
    model, peaks = PEAKS[name]
    spec = load_manifest(EXAMPLES / f"{name}.yaml").spec
    plan = plan_memory(spec, TransformersModel.from_hf(CONFIGS[model]) if by_fsdp(name) else published(model))
    assert plan.fits, [device.peak for device in plan.devices]
    found = [(device.peak.phase, round(device.peak.total / GIB, 2)) for device in plan.devices]
    assert found == [(phase, pytest.approx(gib, abs=0.005)) for phase, gib in peaks]
