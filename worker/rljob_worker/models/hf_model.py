"""transformers' own model of a checkpoint, built so that its parameters have no memory.

Whatever the architecture, parameters are on the meta device from the moment they are registered and buffers are real:
what a constructor computes (rotary frequencies, scales) is right without a list of names, and ties are as the
constructor made them. Building the whole model on meta, and its buffers again by name, is how other
trainers got garbage.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from rljob_worker.errors import UserError
from rljob_worker.models.facts import PICTURE_MODELS, HfConfig, hf_config, hf_source, sees, whole_config

PACKED = "rljob_packed"
"""transformers' name of the attention over rows of samples that trainers register (`trainer.fsdp.attention`)."""
_ATTENTIONS = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers without a state that runs from one sample of a row into the next."""
_SCALES = ("final_logit_softcapping", "logits_soft_cap", "logits_scaling", "logit_scale", "lm_head_multiplier")
"""Settings by which transformers' models change their logits after the head."""
_OLDER_SETTINGS = ("rope_theta", "rope_scaling", "torch_dtype", "num_experts", "num_local_experts")
"""Names that transformers takes beside those that it writes."""


class _Output(Protocol):
    logits: Tensor
    """[1, rows of the head's input, vocabulary]."""


class _Decoder(Protocol):
    layers: nn.ModuleList


class _Config(Protocol):
    def get_text_config(self) -> object: ...


if TYPE_CHECKING:

    class HfModel(nn.Module):
        """Members of transformers' models of causal language modelling that are used."""

        config: _Config

        def __call__(
            self,
            *,
            input_ids: Tensor,
            position_ids: Tensor,
            use_cache: bool,
            row_bounds: Sequence[int] = ...,
            context_group: dist.ProcessGroup | None = ...,
            pixel_values: Tensor = ...,
            image_grid_thw: Tensor = ...,
        ) -> _Output:
            """Logits of [b, S] int64 tokens at int64 positions; only attention over rows takes bounds, and
            the ranks that divide the row.

            A model that sees takes positions [4, b, S], of which the first line is a text's, and pictures [p, D] with
            their patches [k, 3] along time, height and width.
            """
            ...

        def get_decoder(self) -> _Decoder:
            """The stack of layers."""
            ...

        def get_input_embeddings(self) -> nn.Embedding:
            """The token embedding."""
            ...

        def get_output_embeddings(self) -> nn.Linear:
            """The head."""
            ...

        def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
            """Give it another head."""
            ...

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Mapping[str, bool]) -> None:
            """Recompute layers in the backward pass."""
            ...


class _ModelClass(Protocol):
    _is_stateful: bool
    _supports_sdpa: bool
    _supports_flash_attn: bool
    _supports_attention_backend: bool


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made inside get parameters without memory; buffers, and tensors at large, are real."""
    # torch's types lack that a hook may give another parameter.
    register: Callable[..., RemovableHandle] = register_module_parameter_registration_hook

    def without_memory(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None
        # Made anew, and not moved: nothing of a parameter is ever read.
        return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)

    handle = register(without_memory)
    try:
        yield
    finally:
        handle.remove()


def build_hf_model(source: str | Path | Mapping[str, object], *, attention: str = "sdpa") -> HfModel:
    """The model of a checkpoint folder, or of a config given as a dict: fp32 parameters on meta, in evaluation mode.

    Args:
        source: the folder or the config.
        attention: transformers' name of the attention that is computed, where the model allows it.

    The tower of a model that sees is frozen.

    Raises:
        UserError: no model of causal language modelling, or one that packed rows would be wrong for; names the config
            and the field.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    raw, where = hf_source(source)
    check_trainable(raw, where)
    of_text = _attention(raw, hf_config(raw, where), attention)
    chosen: str | dict[str, str] = of_text
    made: type[AutoModelForCausalLM | AutoModelForImageTextToText] = AutoModelForCausalLM
    if sees(raw, where):
        # A picture's patches see each other, whichever attention the text has.
        chosen = {"text_config": of_text, "vision_config": "sdpa" if attention == PACKED else attention}
        made = AutoModelForImageTextToText
    config = whole_config(raw, where)
    try:
        with parameters_on_meta():
            built = made.from_config(config, dtype=torch.float32, attn_implementation=chosen, trust_remote_code=False)
    except Exception as error:  # each model's constructor raises what it likes
        raise UserError(f"{where}: transformers builds no model of it: {type(error).__name__}: {error}") from error
    model = cast("HfModel", built)
    _check_buffers(model, where)
    for parameter in tower(model):
        parameter.requires_grad_(False)
    # torch gives the row of the padding token no gradient, and a policy may well sample that token.
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def has_packed_attention(model: HfModel) -> bool:
    """Whether a model's attention gets the begins of a row's samples."""
    return getattr(model.config.get_text_config(), "_attn_implementation", None) == PACKED


def packs_rows(source: str | Path | Mapping[str, object]) -> bool:
    """Whether a model of a folder, or of a config given as a dict, takes attention over rows of samples."""
    raw, where = hf_source(source)
    return _attention(raw, hf_config(raw, where), PACKED) == PACKED


def row_obstacle(model: HfModel, *, packed: bool) -> str | None:
    """Why ranks cannot divide the tokens of a model's rows, for people; None where they can.

    Args:
        model: as built, with whatever attention.
        packed: whether it is to be computed with attention over rows.
    """
    if tower(model):
        return "sees pictures, and each rank would have some of a picture's tokens"
    if not packed:
        return "has attention that transformers computes in a way of its own, from whole rows"
    named = [getattr(module, "rope_type", None) for module in model.modules()]
    kinds = [kind for one in named for kind in (one.values() if isinstance(one, Mapping) else [one])]
    if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
        return "has a rope that follows the longest sample that a rank sees, which is another one on each"
    return None


def tower(model: HfModel) -> list[nn.Parameter]:
    """Parameters of what turns pictures into features, projection included; none in a model of text."""
    visual = getattr(getattr(model, "model", None), "visual", None)
    return list(visual.parameters()) if isinstance(visual, nn.Module) else []


def gathered_apart(model: HfModel) -> list[nn.Module]:
    """Modules whose parameters are gathered together, each on its own: layers, then an untied embedding and head.

    A tied embedding is the head too: it stays with what is gathered for the whole pass.
    """
    modules: list[nn.Module] = list(model.get_decoder().layers)
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        modules += [model.get_input_embeddings(), model.get_output_embeddings()]
    return modules


def plain_head(model: HfModel) -> bool:
    """Whether logits are the head's product, and nothing is done to them afterwards."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    changed = any(getattr(config, name, None) not in (None, 1, 1.0) for name in _SCALES)
    return type(head) is nn.Linear and head.bias is None and not changed


def tied_names(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Further names of parameters that have several, and the first one of each."""
    first: dict[int, str] = {}
    tied = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied.append((name, first[id(parameter)]))
    return tuple(tied)


def check_trainable(raw: Mapping[str, object], where: str) -> None:
    """Refuse a config that no transformers model of causal language modelling is for; UserError names the field."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    seeing, model_type = sees(raw, where), str(raw["model_type"])
    if seeing and model_type not in PICTURE_MODELS:
        raise UserError(
            f"{where}: model_type {model_type!r} is of a model that sees; of those, training.backend FSDP trains "
            f"{' and '.join(PICTURE_MODELS)}"
        )
    if not seeing and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(f"{where}: transformers has no model of causal language modelling for {model_type!r}")
    if raw.get("quantization_config"):
        raise UserError(f"{where}: quantization_config is not supported; use an unquantized checkpoint")
    kinds = {kind for kind in getattr(hf_config(raw, where), "layer_types", None) or () if kind not in _ATTENTIONS}
    stateful = _model_class(model_type)._is_stateful
    if kinds or stateful:
        what = ", ".join(sorted(kinds)) or "layers with a state"
        raise UserError(f"{where}: {model_type!r} has {what}; training.backend FSDP trains attention alone")


def check_settings(raw: Mapping[str, object], where: str) -> None:
    """Refuse settings of a config that its family does not have: transformers keeps what it does not know."""
    from transformers import CONFIG_MAPPING

    check_trainable(raw, where)
    made = CONFIG_MAPPING[str(raw["model_type"])]()
    known = {*made.to_dict(), *_OLDER_SETTINGS}
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise UserError(f"{where}: {key}: unknown setting of a {raw['model_type']} model{hint}")


def _attention(raw: Mapping[str, object], config: HfConfig, wanted: str) -> str:
    """Attention over rows where a layer tells it of all that its mask would: one that can have flash attention does so.

    Of the others, eager where any other would be wrong: it drops a cap of the attention's logits, and has no sinks.
    """
    kind = _model_class(str(raw["model_type"]))
    if wanted == PACKED:
        seen = set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}
        if kind._supports_attention_backend and kind._supports_flash_attn and seen:
            return PACKED
        wanted = "sdpa"
    return wanted if kind._supports_sdpa and getattr(config, "attn_logit_softcapping", None) is None else "eager"


def _model_class(model_type: str) -> _ModelClass:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if model_type in PICTURE_MODELS else MODEL_FOR_CAUSAL_LM_MAPPING
    return cast("Mapping[type, _ModelClass]", classes)[CONFIG_MAPPING[model_type]]


def _check_buffers(model: nn.Module, where: str) -> None:
    kept = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    if kept:
        raise UserError(
            f"{where}: the checkpoint has {min(kept)}, which is no parameter; the weight sync does not carry such "
            "tensors"
        )
