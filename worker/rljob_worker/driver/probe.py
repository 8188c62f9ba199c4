"""The weight probe: engine and trainer must give fixed prompts the same log-probabilities.

Checksums prove that the right bytes were landed; the probe sees what happens to them afterwards (a flipped bit, an
engine that packs its weights wrongly, a kernel that computes something else).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rljob_api import RLJobSpec
from rljob_api.spec import Precision
from rljob_worker.devices.kinds import device_kind
from rljob_worker.errors import JobError, WeightSyncError
from rljob_worker.types import FloatArray, IntArray

_PROBES = 4
_PROBE_TOKENS = 32
_TOLERANCE = {Precision.FP32: 1e-4, Precision.BF16: 0.1}
_FP32_ON_DEVICES = 2e-3
"""vLLM's attention in Triton multiplies fp32 as TF32: up to 4.9e-4 on average on an H200."""
_MAX_FACTOR = 20
"""One wrong weight may move few tokens: the largest difference is bounded too, at so many times the tolerance."""


def _tolerance(spec: RLJobSpec) -> float:
    on_device = device_kind(spec.resources).ray_resource is not None
    if on_device and spec.training.precision is Precision.FP32:
        return _FP32_ON_DEVICES
    return _TOLERANCE[spec.training.precision]


class WeightProbe:
    """Fixed token sequences of at most `max_length` tokens, and how far the two sides may differ on them.

    An engine that scores a sequence makes one more token: it must be longer by that.
    """

    def __init__(self, spec: RLJobSpec, vocab_size: int, max_length: int) -> None:
        random = np.random.default_rng(0)
        length = min(_PROBE_TOKENS, max_length)
        self.tokens: list[IntArray] = [random.integers(0, vocab_size, length) for _ in range(_PROBES)]
        self._tolerance = spec.weight_sync.probe_tolerance or _tolerance(spec)
        self._expected: list[FloatArray] = []

    def score_trainers(self, scores: Sequence[list[FloatArray] | None]) -> None:
        """Keep the trainers' log-probabilities; ranks that hold no output layer report none."""
        known = [score for score in scores if score]
        if not known:
            raise JobError("update_weights: no trainer gave log-probabilities of the fixed prompts")
        self._expected = known[0]

    def compare(self, engines: Sequence[list[FloatArray]], version: int) -> dict[str, float]:
        """Hold every engine's log-probabilities against the trainers'.

        Returns:
            `weights/probe_abs_diff_mean` and `_max` over engines and tokens.

        Raises:
            WeightSyncError: an engine differs by more than the tolerance on average, by 20 times as much on one
                token, or is not finite.
        """
        expected = np.concatenate(self._expected)
        worst_mean, worst_max = 0.0, 0.0
        for index, scores in enumerate(engines):
            if [len(score) for score in scores] != [len(score) for score in self._expected]:
                raise JobError(
                    f"update_weights: engine-{index} gave another number of log-probabilities than asked for"
                )
            difference = np.abs(np.concatenate(scores) - expected)
            mean, largest = float(difference.mean()), float(difference.max())
            if not (mean <= self._tolerance and largest <= _MAX_FACTOR * self._tolerance):
                limits = f"{self._tolerance:g} ({_MAX_FACTOR * self._tolerance:g})"
                raise WeightSyncError(
                    f"update_weights: engine-{index} at version {version} differs from the trainer by {mean:.4g} (at "
                    f"most {largest:.4g}) in the log-probabilities of fixed prompts; spec.weightSync.probeTolerance "
                    f"allows {limits}: its weights are not what was sent"
                )
            worst_mean, worst_max = max(worst_mean, mean), max(worst_max, largest)
        return {"weights/probe_abs_diff_mean": worst_mean, "weights/probe_abs_diff_max": worst_max}
