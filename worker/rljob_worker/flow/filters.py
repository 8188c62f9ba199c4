"""Filters of groups: which are worth training on. Pure."""

from __future__ import annotations

import numpy as np

from rljob_worker.types import FloatArray


def has_variance(rewards: FloatArray) -> bool:
    """Whether the rewards [G] of a group differ, so that its advantages are not all 0 (DAPO, arXiv 2503.14476 eq. 11).

    Compared, not subtracted: the deviation of equal float32 numbers need not come out as 0. A reward that is not finite
    passes: it must stop the step, not vanish from it.
    """
    return bool(not np.isfinite(rewards).all() or rewards.max() != rewards.min())
