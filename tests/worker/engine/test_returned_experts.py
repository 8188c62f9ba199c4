"""Experts to which the engine sent each token, held to transformers' router."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_process import RemoteEngine
from interruptions import gone_on_with, harvested, kept, whole
from rollout_models import MAX_RESPONSE, group_requests, spec_json, write_model
from transformers import Qwen3MoeForCausalLM

from rljob_worker.types import Generation, GenerationRequest, SamplingParams

pytestmark = pytest.mark.slow

SAMPLING = SamplingParams(max_tokens=MAX_RESPONSE, stop=("w7",))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("experts") / "model", experts=True)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RemoteEngine]:
    """Takes prompts in several parts, remembers those that were there before, and guesses tokens."""
    guesses = {"draftTokens": 4, "minMatch": 1, "maxMatch": 3}
    spec = spec_json(model, maxNumSeqs=32, maxBatchedTokens=64, routerReplay=True, speculative=guesses)
    engine = RemoteEngine(spec, model, model.parent / "engine.log")
    engine.call("start")
    yield engine
    engine.close()


def expected(model: Path, request: GenerationRequest, generation: Generation) -> np.ndarray:
    """[tokens but the last, 2 layers, 2 experts in order]."""
    moe = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.tensor([*request.prompt_token_ids, *generation.token_ids.tolist()])
    with torch.no_grad():
        routers = moe(ids[:-1].unsqueeze(0), output_router_logits=True).router_logits
    assert len(routers) == 2, "the dense layer has no router"
    return torch.stack([logits.topk(2, dim=-1).indices.sort(dim=-1).values for logits in routers], dim=1).numpy()


def test_experts_are_those_of_transformers_router(engine: RemoteEngine, model: Path) -> None:
    requests = group_requests()
    generations = whole(engine, requests, SAMPLING)
    assert any(g.stop_text for g in generations)
    assert engine.call("take_draft_counts").accepted > 0
    for request, generation in list(zip(requests, generations))[::3]:
        assert generation.experts is not None
        assert generation.experts.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(generation.experts, axis=-1), expected(model, request, generation))


def test_an_interruption_changes_no_expert(engine: RemoteEngine) -> None:
    requests = group_requests(step=1)
    calm = whole(engine, requests, SAMPLING)
    responses, pauses = kept(engine, requests, SAMPLING, random.Random(3))
    assert pauses, "it was faster than the first pause"
    for one, other in zip(responses, calm, strict=True):
        assert one.experts is not None
        assert other.experts is not None
        np.testing.assert_array_equal(one.experts, other.experts)


def test_what_goes_on_has_the_experts_of_all_its_tokens(engine: RemoteEngine) -> None:
    requests = group_requests(step=2)
    calm = whole(engine, requests, SAMPLING)
    begun = harvested(engine, requests, SAMPLING, random.Random(1))
    assert not all(one.finish_reason for one in begun), "nothing was left to go on with"
    for one, other in zip(gone_on_with(engine, requests, begun, SAMPLING), calm, strict=True):
        assert one.experts is not None
        assert other.experts is not None
        np.testing.assert_array_equal(np.sort(one.experts, axis=-1), np.sort(other.experts, axis=-1))
