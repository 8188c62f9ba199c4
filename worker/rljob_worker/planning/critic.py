"""A critic's part of a rank's memory: the rows of a second model, and its passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rljob_api import derived
from rljob_api.spec import RLJobSpec
from rljob_worker.models.transformers_model import TransformersModel


def critic_of(spec: RLJobSpec, model: TransformersModel) -> tuple[RLJobSpec, TransformersModel] | None:
    """The job and the model as the critic's rows and passes are planned by; None where there is no critic.

    All of it is trained, by its own optimizer. A checkpoint of its own that is not here counts as one of the policy's
    size.
    """
    critic = derived.critic(spec)
    if critic is None:
        return None
    optimizer = derived.critic_optimizer(spec, critic)
    training = spec.training.model_copy(update={"lora": None, "optimizer": optimizer})
    own = critic.model and Path(critic.model.path).expanduser()
    if own and own.is_dir():
        model = TransformersModel.from_hf(own)
    tied = len(model.units) == model.num_layers
    layers = model.units if tied else model.units[:-1]
    head = ((1, model.hidden_size),)
    return spec.model_copy(update={"training": training}), replace(model, vocab_size=1, units=(*layers, head))
