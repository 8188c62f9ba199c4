"""Values that cross process borders between driver, trainers and engines: plain dataclasses of numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from rljob_api.json_types import Json
from rljob_api.spec import RewardSpec

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data source, rendered and tokenized."""

    uid: str
    """`source/row`, stable over runs."""
    source: str
    text: str
    token_ids: tuple[int, ...]
    label: str | None
    reward: RewardSpec
    metadata: Mapping[str, object] = field(default_factory=dict, hash=False)
    """The row's other columns, for reward functions."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an engine samples, and which transform the trainer applies to its logits."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample to generate."""

    prompt_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Generation:
    """One generated response."""

    token_ids: IntArray
    """[n], the end token included where it was generated."""
    log_probs: FloatArray
    """[n], of the distribution that was sampled from (after temperature, top-k, top-p, min-p)."""
    finish_reason: str
    """`stop` or `length`."""
    stop_text: str | None = None
    """The stop string that ended it, if any."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """All samples of a step, in prompt-major order; N samples of ragged length."""

    tokens: list[IntArray]
    """N arrays [prompt + response]."""
    prompt_lengths: IntArray
    """[N]."""
    rollout_log_probs: list[FloatArray]
    """N arrays [response], from the engine."""
    advantages: FloatArray
    """[N]."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class StepMetrics:
    """What a trainer reports of one step; scalars are already reduced over all ranks."""

    metrics: dict[str, float] = field(default_factory=dict)
    applied: bool = True
    """False when a non-finite loss or gradient stopped the update."""
    detail: Mapping[str, Json] = field(default_factory=dict)


class EngineReport(TypedDict):
    """What an engine did in a weight sync; `seconds` in all, and of those its parts."""

    version: int
    bytes: int
    tensors: int
    buckets: int
    verified: bool
    mode: str
    seconds: float
    begin_seconds: float
    wait_seconds: float
    """For trainers."""
    land_seconds: float
    """Copies with their checksums."""
    repack_seconds: float
    """What vLLM packs."""
    finish_seconds: float
    rpc_seconds: float
    """The way to the workers."""


class TrainerReport(TypedDict):
    """What a trainer did in a weight sync; `seconds` in all, and of those its parts where it sends something."""

    version: int
    bytes: int
    tensors: int
    pieces: int
    staging_bytes: int
    """Of the slots that it owns."""
    seconds: float
    read_seconds: NotRequired[float]
    fill_seconds: NotRequired[float]
    """Copying and checksums."""
    spread_seconds: NotRequired[float]
    """Exchange with the host's other trainers."""
    wait_seconds: NotRequired[float]
    """For engines and other trainers."""
