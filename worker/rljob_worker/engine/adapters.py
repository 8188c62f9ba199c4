"""The policy's adapters in an engine, which computes with them beside the model's own weights."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rljob_api import derived
from rljob_api.spec import LoraSpec, RLJobSpec
from rljob_worker.errors import UserError
from rljob_worker.models.adapters import A, B, LinearModule, adapted_modules, linear_modules

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

_NAME, _NUMBER = "policy", 1


def load_policy_adapter(engine: LLMEngine, spec: RLJobSpec, model_folder: Path) -> LoRARequest | None:
    """Have an engine load adapters that change nothing, by vLLM's own loader; weight syncs write into them.

    Returns:
        What requests name them by; None where the job's engines have none.

    Raises:
        UserError: vLLM does not compute with adapters of these modules.
    """
    lora = derived.adapters_apart(spec)
    if lora is None:
        return None
    from vllm.lora.request import LoRARequest

    with tempfile.TemporaryDirectory(prefix="rljob-adapters-") as folder:
        _save_zeros(Path(folder) / _NAME, model_folder, lora)
        request = LoRARequest(_NAME, _NUMBER, str(Path(folder) / _NAME))
        try:
            engine.add_lora(request)
        except (RuntimeError, ValueError) as error:
            what = "spec.training.lora.handover: vLLM does not take adapters of this model"
            raise UserError(f"{what}: {error}") from error
    return request


def adapted_names(model_folder: str | Path, lora: LoraSpec) -> list[str]:
    """Names of the modules that a job's adapters are of, without their layers, in order."""
    return sorted({module.short for module in _adapted(model_folder, lora)})


def _adapted(model_folder: str | Path, lora: LoraSpec) -> tuple[LinearModule, ...]:
    from rljob_worker.models.hf_model import build_hf_model

    return adapted_modules(linear_modules(build_hf_model(model_folder)), lora, str(model_folder))


def _save_zeros(target: Path, model_folder: Path, lora: LoraSpec) -> None:
    from rljob_worker.models.merged_model import save_peft_folder

    zeros: dict[str, torch.Tensor] = {}
    for module in _adapted(model_folder, lora):
        a, b = module.adapter(lora.rank)
        zeros |= {f"{module.name}.{A}": torch.zeros(a), f"{module.name}.{B}": torch.zeros(b)}
    save_peft_folder(target, model_folder, lora, zeros, str(model_folder))
