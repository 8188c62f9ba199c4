"""`spec.critic`: the model that foretells rewards, and its optimizer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rljob_api.base import ApiModel, Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Text


class CriticModelSpec(ApiModel):
    """The critic's starting point."""

    path: Text
    """Checkpoint folder with the policy's tokenizer, or an id on the hub of `spec.model`. Its head is taken over where
    it is a `score.weight` of one row; else all values are 0 at first."""


class CriticOptimizerSpec(ApiModel):
    """Adam of the critic, with a state and a gradient norm of its own; what is not here is as in `training.optimizer`,
    but the learning rate is constant after its warm-up."""

    lr: Annotated[float, Field(gt=0, le=1)] = 1.0e-5
    """Learning rate."""
    warmup_steps: NonNegativeInt = 0
    """Updates of the critic over which the rate rises linearly from 0."""
    weight_decay: Fraction = 0.0
    """See `training.optimizer`."""
    clip_grad: NonNegativeFloat = 1.0
    """See `training.optimizer`."""


class CriticSpec(ApiModel):
    """A second model in the trainers, with a head of one number: the value of what was sampled so far."""

    model: CriticModelSpec | None = None
    """Its starting point; default: the weights of `spec.model`."""
    warmup_steps: NonNegativeInt = 0
    """First steps, in which the critic alone is trained."""
    value_clip: NonNegativeFloat = 0.2
    """Distance from the value before the step within which a change lowers the loss; 0: any."""
    updates_per_step: PositiveInt = 4
    """Updates of the critic in a step, each on an equal part of its samples."""
    optimizer: CriticOptimizerSpec = CriticOptimizerSpec()
    """Optimizer."""
