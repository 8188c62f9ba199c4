"""A critic's part of a rank's memory: its share of a second model, and its passes."""

from __future__ import annotations

from dataclasses import replace

from rljob_api import derived
from rljob_api.spec import RLJobSpec
from rljob_worker.errors import UserError
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.places import CRITIC_PATH, folder_here
from rljob_worker.models.trained import TrainedModel, check_trained_sizes, trained_model
from rljob_worker.models.value_model import HEAD


def critic_of(spec: RLJobSpec, model: TrainedModel) -> tuple[RLJobSpec, TrainedModel] | None:
    """The job and the model as the critic's parameters and passes are planned by; None where there is no critic.

    All of it is trained, by its own optimizer. A checkpoint of its own that is not here counts as one of the policy's
    size.

    Raises:
        UserError: one that the backend does not train, or not in this layout.
    """
    critic = derived.critic(spec)
    if critic is None:
        return None
    optimizer = derived.critic_optimizer(spec, critic)
    training = spec.training.model_copy(update={"lora": None, "optimizer": optimizer})
    spec = spec.model_copy(update={"training": training})
    own = None if critic.model is None else folder_here(critic.model.path, CRITIC_PATH)
    if own is not None:
        try:
            model = trained_model(training.backend, own)
            check_trained_sizes(model, training)
        except UserError as error:
            raise UserError(f"{CRITIC_PATH}: of {own}: {error}") from None
    if isinstance(model, ModelConfig):
        return spec, model.critic((HEAD,))
    tied = len(model.units) == model.num_layers
    layers = model.units if tied else model.units[:-1]
    head = ((1, model.hidden_size),)
    return spec, replace(model, vocab_size=1, units=(*layers, head))
