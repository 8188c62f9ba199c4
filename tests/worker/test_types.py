"""Values that go between driver and engines."""

from __future__ import annotations

import pickle
from dataclasses import astuple

import numpy as np
import pytest

from rljob_worker.types import Generation, GenerationRequest


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest((1, 2), 7),
        GenerationRequest((1, 2), 7, (3, 4), 5, 6, 8),
    ],
)
def test_a_request_arrives_as_it_was_sent(request_: GenerationRequest) -> None:
    assert pickle.loads(pickle.dumps(request_)) == request_


@pytest.mark.parametrize("count", [0, 5])
def test_a_generation_arrives_to_the_bit(count: int) -> None:
    """Arrays are not sent one by one, for any number of tokens: a rollout has hundreds."""
    log_probs = -np.random.default_rng(0).random(count).astype(np.float32)
    experts = np.arange(4 * 2, dtype=np.uint8).reshape(4, 1, 2)
    sent = Generation(np.arange(count)[::-1], log_probs, "stop", "\n", experts)
    buffers: list[pickle.PickleBuffer] = []
    arrived = pickle.loads(pickle.dumps(sent, protocol=5, buffer_callback=buffers.append), buffers=buffers)
    assert len(buffers) == 1, "that of the experts"
    for got, expected in zip(astuple(arrived), astuple(sent), strict=True):
        assert np.array_equal(got, expected)
    assert (arrived.token_ids.dtype, arrived.log_probs.dtype) == (np.int64, np.float32)
    assert arrived.log_probs.tobytes() == log_probs.tobytes()
