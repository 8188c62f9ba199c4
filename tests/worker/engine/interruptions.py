"""Generations that are interrupted at random moments, and gone on with in one of several ways."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from engine_process import RemoteEngine

from rljob_worker.devices import packed_linear
from rljob_worker.types import Generation, GenerationRequest, SamplingParams


def whole(engine: RemoteEngine, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
    """The responses, left alone."""
    return engine.call("generate", requests, sampling, engine.call("weight_version"))


def kept(
    engine: RemoteEngine, requests: list[GenerationRequest], sampling: SamplingParams, delay: random.Random
) -> tuple[list[Generation], int]:
    """The responses of a generation that is held up to three times, and how often it was."""
    engine.send("generate", requests, sampling, engine.call("weight_version"))
    pauses = 0
    for _ in range(3):
        time.sleep(delay.uniform(0.0, 0.04))
        engine.send("requests.pause", 10.0)
        try:
            if (answer := engine.wait()) is not None:
                # It was faster than the pause, whose own answer is that nothing runs.
                _refused(engine)
                return answer, pauses
        except RuntimeError:
            break
        pauses += 1
        time.sleep(delay.uniform(0.0, 0.01))
        engine.call("requests.resume")
    return engine.wait(), pauses


def harvested(
    engine: RemoteEngine, requests: list[GenerationRequest], sampling: SamplingParams, delay: random.Random
) -> list[Generation]:
    """The responses as far as they were at a random moment."""
    engine.send("generate", requests, sampling, engine.call("weight_version"))
    time.sleep(delay.uniform(0.0, 0.08))
    engine.send("requests.harvest")
    try:
        first = engine.wait()
    except RuntimeError:
        return engine.wait()
    if first is None:
        return engine.wait()
    with suppress(RuntimeError):
        engine.wait()
    return first


def gone_on_with(
    engine: RemoteEngine,
    requests: Sequence[GenerationRequest],
    begun: Sequence[Generation],
    sampling: SamplingParams,
) -> list[Generation]:
    """The responses when what is unfinished is submitted with what it has."""
    rest = [i for i, generation in enumerate(begun) if not generation.finish_reason]
    again = [replace(requests[i], sampled_token_ids=tuple(map(int, begun[i].token_ids))) for i in rest]
    done = list(begun)
    for i, generation in zip(rest, whole(engine, again, sampling) if again else []):
        done[i] = joined(begun[i], generation)
    return done


def joined(first: Generation, rest: Generation) -> Generation:
    """A response in one piece."""
    return replace(
        rest,
        token_ids=np.concatenate([first.token_ids, rest.token_ids]),
        log_probs=np.concatenate([first.log_probs, rest.log_probs]),
    )


def _refused(engine: RemoteEngine) -> None:
    try:
        engine.wait()
    except RuntimeError:
        return
    raise AssertionError("a generation was held that had ended")


@cache
def rounding() -> float:
    """0 where the bits of a product's row are the same with any number of other rows; without AVX-512 they are not."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    packed, x = packed_linear.pack(torch.randn(128, 64)), torch.randn(32, 64)
    product = packed_linear.multiply(packed, x, None)
    alone = [torch.equal(packed_linear.multiply(packed, x[:rows], None), product[:rows]) for rows in range(1, 32)]
    torch.set_num_threads(threads)
    return 0.0 if all(alone) else 2e-5
