"""The longest sequence that fits, where ranks divide rows."""

from __future__ import annotations

from typing import Any

import pytest
from published_models import CONFIGS, published

from rljob_api.rules.model_config import parallel_findings
from rljob_api.spec import RLJobSpec
from rljob_worker.errors import UserError
from rljob_worker.planning.activations import forward_pass, training_pass
from rljob_worker.planning.job_shape import MicroBatch, job_shape
from rljob_worker.planning.plan import plan_memory
from rljob_worker.planning.teacher import kept_bytes

GIB = 2**30


def spec(devices: int, **training: Any) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            "steps": 1,
            "model": {"path": "/models/any"},
            "data": {"path": "data.jsonl"},
            "rollout": {"promptsPerStep": 16, "samplesPerPrompt": 8, "maxResponseTokens": 2048},
            "training": {"recompute": "Full"} | training,
            "resources": {"profile": "ascend-a2", "devicesPerNode": devices},
        }
    )


@pytest.mark.parametrize(
    ("model", "devices", "sizes", "contexts"),
    [
        ("Qwen3-4B", 8, {}, (2, 4, 8)),
        ("Qwen3-4B", 8, {"tensorParallel": 2}, (2, 4)),
        ("Qwen3-4B", 8, {"recompute": "None"}, (2, 4, 8)),
        ("Qwen3-30B-A3B", 16, {"expertParallel": 16}, (2, 4)),
    ],
)
def test_it_grows_with_the_ranks_that_divide_rows(
    model: str, devices: int, sizes: dict[str, Any], contexts: tuple[int, ...]
) -> None:
    config = published(model)
    whole = plan_memory(spec(devices, **sizes), config, device_bytes=64 * GIB).longest
    assert whole
    for context in contexts:
        divided = plan_memory(spec(devices, contextParallel=context, **sizes), config, device_bytes=64 * GIB).longest
        assert divided
        assert 0.95 * context * whole <= divided <= 1.05 * context * whole


def test_a_rank_has_its_share_of_the_largest_micro_batch() -> None:
    config = published("Qwen3-4B")
    batch = MicroBatch(8001, 6000, 3, 8001, assumed_prompt=False)
    own = MicroBatch(2001, 2001, 3, 8001, assumed_prompt=False)
    for context, given in ((4, batch), (1, own)):
        job_spec = spec(8, contextParallel=context)
        job = job_shape(job_spec, config)
        passes = (training_pass(job_spec, config, job, 0, given, 1000), forward_pass(job_spec, config, job, 0, given))
        if context == 4:
            expected = passes
    assert passes == expected


@pytest.mark.parametrize("context", [1, 2, 4])
def test_each_rank_keeps_what_a_teacher_said_of_whole_rows(context: int) -> None:
    algorithm = {"name": "distill", "distill": {"teacher": {"path": "/models/any"}}}
    taught = spec(4, contextParallel=context).model_dump(by_alias=True, exclude_unset=True) | {"algorithm": algorithm}
    job_spec = RLJobSpec.model_validate(taught)
    job = job_shape(job_spec, published("Qwen3-4B"))
    # One number of a token; 128 samples are dealt to 4 ranks, or to as many groups of ranks.
    assert kept_bytes(job_spec, job) == 128 // (4 // context) * 2048 * 4


@pytest.mark.parametrize(
    ("model", "devices", "training", "message"),
    [
        (
            "Qwen3-4B",
            16,
            {"contextParallel": 16},
            r"num_key_value_heads / tensorParallel \(8 / 1\) .* contextParallel \(16\)",
        ),
        (
            "Qwen3-4B",
            16,
            {"tensorParallel": 4, "contextParallel": 4},
            r"num_key_value_heads / tensorParallel \(8 / 4\)",
        ),
        ("Qwen3.5-9B", 8, {"contextParallel": 8}, r"num_key_value_heads / tensorParallel \(4 / 1\)"),
        ("Qwen3-4B", 8, {"contextParallel": 3}, r"spec\.training\.contextParallel: 3 does not divide the 8 replicas"),
    ],
)
def test_sizes_that_do_not_fit_are_named(model: str, devices: int, training: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        job_shape(spec(devices, **training), published(model))


@pytest.mark.parametrize(
    ("training", "wrong"),
    [
        ({"contextParallel": 8}, []),
        ({"contextParallel": 16}, ["does not divide the 8 key heads of a tensor-parallel rank"]),
        (
            {"contextParallel": 32, "tensorParallel": 2},
            ["does not divide the 16 heads", "does not divide the 4 key heads"],
        ),
        ({"contextParallel": 4, "tensorParallel": 4}, ["does not divide the 2 key heads"]),
    ],
)
def test_a_manifest_whose_model_is_known_is_told_before_it_starts(training: dict[str, int], wrong: list[str]) -> None:
    found = list(parallel_findings(CONFIGS["Qwen3-4B"], spec(64, **training)))
    assert [finding.path for finding in found] == [("training", "contextParallel")] * len(wrong)
    assert all(finding.wrong.startswith(text) for finding, text in zip(found, wrong, strict=True))
