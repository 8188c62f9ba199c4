"""Holds adapters to PEFT, whose packages have a folder of their own: the lock file has neither it nor accelerate.

Called as `python peft_adapters.py PACKAGES merged|update BASE ADAPTERS`, which makes adapters of a base and has PEFT
find them in a folder, or as `python peft_adapters.py PACKAGES exported BASE ADAPTERS MERGED` for what a run has left.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rljob_api.spec import LoraSpec, OptimizerSpec
from rljob_worker.models.adapters import add_adapters
from rljob_worker.models.hf_model import build_hf_model
from rljob_worker.models.merged_model import MergedModel, save_peft_folder
from rljob_worker.trainer.fsdp.optimizer import ShardedAdamW

SCRIPT = Path(__file__)
PEFT = Path(os.environ.get("RLJOB_PEFT", Path(sys.prefix) / "peft"))
"""Folder that `make peft-packages` fills."""
needs_peft = pytest.mark.skipif(not (PEFT / "peft").is_dir(), reason="needs `make peft-packages`")
TOKENS = torch.arange(15)[None]
"""Ids that every model here has."""
LORA = LoraSpec(rank=4, alpha=6, targets=["q_proj", "o_proj"])


def trained_adapters(folder: Path, lora: LoraSpec) -> dict[str, Tensor]:
    model = build_hf_model(folder)
    add_adapters(model, lora, torch.float32, "x")
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(parameter.shape, generator=generator) * 0.1
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


@torch.no_grad()
def merged(base_folder: Path, folder: Path) -> None:
    """A model with its adapters merged has the logits of PEFT's."""
    trained = trained_adapters(base_folder, LORA)
    save_peft_folder(folder, base_folder, LORA, trained, str(base_folder))
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    before = base(TOKENS).logits
    after = adapted(base, folder)(TOKENS).logits
    whole = AutoModelForCausalLM.from_pretrained(base_folder)
    tensors = dict(MergedModel(base_folder, LORA, trained, torch.float32).tensors())
    assert tensors.keys() == load_file(base_folder / "model.safetensors").keys()
    whole.load_state_dict({name: tensors.get(name, tensor) for name, tensor in whole.state_dict().items()})
    torch.testing.assert_close(whole(TOKENS).logits, after, atol=1e-5, rtol=0)
    assert float((after - before).abs().max()) > 0.01


def update(base_folder: Path, folder: Path) -> None:
    """Loss, gradients and one Adam step of the same adapters on the same base."""
    trained = trained_adapters(base_folder, LORA)
    save_peft_folder(folder, base_folder, LORA, trained, str(base_folder))
    theirs = adapted(AutoModelForCausalLM.from_pretrained(base_folder), folder, is_trainable=True)
    ours: Any = build_hf_model(base_folder)
    add_adapters(ours, LORA, torch.float32, "x")
    weights = AutoModelForCausalLM.from_pretrained(base_folder).state_dict() | {
        name: tensor.clone() for name, tensor in trained.items()
    }
    ours.load_state_dict(weights, assign=True)
    rows = {name: ours.get_parameter(name).requires_grad_() for name in trained}
    frozen = {name: p for name, p in ours.named_parameters() if name not in trained}
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    beside = {name: theirs.get_parameter(f"base_model.model.{name}.default.weight") for name in trained}
    losses = [model(TOKENS, labels=TOKENS).loss for model in (ours, theirs)]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=0)
    for loss in losses:
        loss.backward()
    # Adam divides by a gradient's size: an epsilon that is no smaller than noise keeps noise small.
    spec = OptimizerSpec(lr=0.01, eps=1e-4)
    gradients = {name: gradient_of(parameter) for name, parameter in rows.items()}
    with torch.no_grad():
        ShardedAdamW(rows, spec, nullcontext).step(gradients, spec.lr)
    torch.optim.Adam(beside.values(), lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps).step()
    for name, row in rows.items():
        torch.testing.assert_close(gradients[name], gradient_of(beside[name]), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(row, beside[name], atol=1e-5, rtol=0)
        assert float((row.detach() - trained[name]).abs().max()) > 1e-3


@torch.no_grad()
def exported(base_folder: Path, folder: Path, merged_folder: Path) -> None:
    """PEFT merges the adapters of an export into the weights of the other one, in bf16: the logits are equal."""
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    rounded(base)
    before = base(TOKENS).logits
    theirs = adapted(base, folder).merge_and_unload()
    rounded(theirs)
    after = theirs(TOKENS).logits
    ours = AutoModelForCausalLM.from_pretrained(merged_folder, dtype=torch.float32)
    # Sums of products in another order may round a weight to its neighbour.
    torch.testing.assert_close(ours(TOKENS).logits, after, atol=2e-3, rtol=0)
    assert float((after - before).abs().max()) > 0.05


def adapted(base: Any, folder: Path, **settings: object) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(base, folder, **settings).eval()


def rounded(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    {"merged": merged, "update": update, "exported": exported}[sys.argv[2]](*map(Path, sys.argv[3:]))
