"""Learning rate of each optimizer update."""

from __future__ import annotations

import math

from rljob_api.spec import LrSchedule, OptimizerSpec


def learning_rate(update: int, spec: OptimizerSpec, total_updates: int) -> float:
    """Rate of optimizer update `update` (0-based) out of the job's `total_updates`.

    The last warm-up update has the peak rate (the first one is not lost at 0), the last decay update has `minLr`. Where
    that is 0, the rate gets there one update later: no update is lost at 0 here either.
    """
    warmup = spec.warmup_steps
    end = (spec.decay_steps or total_updates) + (spec.min_lr == 0)
    done = update + 1
    if done <= warmup:
        return spec.lr * done / warmup
    if spec.schedule is LrSchedule.CONSTANT:
        return spec.lr
    if done >= end:
        return spec.min_lr
    progress = (done - warmup) / (end - warmup)
    share = 1.0 - progress if spec.schedule is LrSchedule.LINEAR else 0.5 * (1.0 + math.cos(math.pi * progress))
    return spec.min_lr + (spec.lr - spec.min_lr) * share
