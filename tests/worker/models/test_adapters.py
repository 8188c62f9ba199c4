"""Adapters against the formula, and what is said about targets and bases."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pictures_process import CONFIGS
from safetensors.torch import load_file
from support.architectures import ARCHITECTURES
from support.peft_adapters import PEFT, SCRIPT, needs_peft, trained_adapters
from support.warm.protocol import TRAINER
from support.warm.scripts import run_script
from torch import Tensor, nn

from rljob_api.spec import LoraSpec, RandomModel, TrainingBackend
from rljob_worker.errors import UserError
from rljob_worker.models import adapters
from rljob_worker.models.adapters import LoraLinear, adapted_modules, add_adapters, first_a, rows_digest
from rljob_worker.models.hf_check import checkpoint_bytes
from rljob_worker.models.hf_model import build_hf_model
from rljob_worker.models.merged_model import MergedModel, save_peft_folder
from rljob_worker.models.random_model import make_random_model
from rljob_worker.models.trained import trained_model
from rljob_worker.models.transformers_model import TransformersModel


def linear(dtype: torch.dtype, *, bias: bool) -> tuple[LoraLinear, Tensor]:
    """A module [12, 10] with an adapter of rank 3, scale 2.5, and its input [2, 7, 10]."""
    torch.manual_seed(0)
    module = LoraLinear(nn.Linear(10, 12, bias=bias, device="meta"), 3, 2.5)
    module._apply(lambda p: torch.randn(p.shape))
    for parameter in (module.weight, *([module.bias] if bias else [])):
        parameter.requires_grad_(False)
        parameter.data = parameter.to(dtype)
    return module, torch.randn(2, 7, 10).to(dtype).requires_grad_()


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_the_formula(bias: bool) -> None:
    module, x = linear(torch.float32, bias=bias)
    a, b = (p.detach().double().requires_grad_() for p in (module.lora_A, module.lora_B))
    x64 = x.detach().double().requires_grad_()
    weight = module.weight.double() + 2.5 * b @ a
    y64 = nn.functional.linear(x64, weight, module.bias.double() if bias else None)
    y = module(x)
    torch.testing.assert_close(y.double(), y64, atol=1e-4, rtol=1e-5)
    y.square().sum().backward()
    y64.square().sum().backward()
    for got, want in ((x.grad, x64.grad), (module.lora_A.grad, a.grad), (module.lora_B.grad, b.grad)):
        assert got is not None
        assert want is not None
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-2)


def test_bf16_computes_with_the_rounded_sum() -> None:
    module, x = linear(torch.bfloat16, bias=False)
    rounded = (module.weight.float() + 2.5 * module.lora_B @ module.lora_A).bfloat16()
    apart = nn.functional.linear(x, module.weight) + 2.5 * nn.functional.linear(
        nn.functional.linear(x.float(), module.lora_A), module.lora_B
    )
    assert torch.equal(module(x), nn.functional.linear(x, rounded))
    assert not torch.equal(module(x), apart.bfloat16())
    module(x).float().sum().backward()
    assert module.lora_A.grad is not None
    assert module.lora_A.grad.dtype == torch.float32


def test_merged_weights_are_not_kept_for_the_backward_pass() -> None:
    module, x = linear(torch.float32, bias=False)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(x)
    assert {id(tensor) for tensor in kept} == {id(t) for t in (x, module.weight, module.lora_A, module.lora_B)}


@pytest.mark.parametrize("rows", [1, 2, 5, 12])
def test_rows_are_merged_as_the_whole(rows: int) -> None:
    module, _ = linear(torch.bfloat16, bias=False)
    change = adapters.scaled_product(module.lora_A, module.lora_B, 2.5)
    parts = [adapters.merged(w, c) for w, c in zip(module.weight.split(rows), change.split(rows))]
    assert torch.equal(torch.cat(parts), adapters.merged(module.weight, change))


@pytest.mark.parametrize("shape", [(7, 4), (5,), (3, 2, 4)])
def test_a_digest_is_the_sum_of_its_rows_and_sees_every_change(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).bfloat16()
    whole = rows_digest(tensor, 0)
    assert (rows_digest(tensor[:2], 0) + rows_digest(tensor[2:], 2) + rows_digest(tensor[:0], 9)) % 2**64 == whole
    changes: list[Callable[[Tensor], Tensor]] = [lambda t: t + 1, lambda t: t.flip(0), lambda t: t[:-1]]
    assert all(rows_digest(change(tensor), 0) != whole for change in changes)


def test_an_adapter_begins_alike_wherever_it_is() -> None:
    one, same, other = (first_a(name, (4, 16), seed) for name, seed in (("q", 1), ("q", 1), ("q", 2)))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one, first_a("k", (4, 16), 1))
    assert float(one.abs().max()) <= 0.25


def test_what_is_adapted() -> None:
    model = build_hf_model(ARCHITECTURES["mixtral"])
    add_adapters(model, LoraSpec(rank=4, targets=["q_proj", "o_proj"]), torch.bfloat16, "x")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all(("q_proj" in name or "o_proj" in name) and "lora_" in name for name in trained)
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert all(p.is_meta for p in model.parameters())


def test_a_target_that_matches_nothing_is_named() -> None:
    model = TransformersModel.from_hf(ARCHITECTURES["llama"])
    with pytest.raises(
        UserError, match=r"lora.targets: no linear module in .*llama.* is called 'qkv'; there are .*q_proj"
    ):
        model.adapters(LoraSpec(targets=["q_proj", "qkv"]))
    with pytest.raises(UserError, match=r"spec.training.lora: the layers of x have no linear modules"):
        adapted_modules((), LoraSpec(), "x")


def test_a_checkpoint_of_adapters_is_small() -> None:
    model = trained_model(TrainingBackend.FSDP, ARCHITECTURES["llama"])
    one_layer = 4 * (4 * 128 + 128 + 64 + 64 + 128 + 2 * (128 + 96) + 96 + 128)
    assert checkpoint_bytes(model, "bf16", LoraSpec(rank=4)) == 12 * 2 * one_layer


@pytest.fixture
def written(tmp_path: Path, tokenizer_folder: Path) -> Path:
    config = {key: value for key, value in ARCHITECTURES["mixtral"].items() if not key.endswith("_token_id")}
    make_random_model(RandomModel(config=config), tokenizer_folder, tmp_path / "model")
    return tmp_path / "model"


@needs_peft
@pytest.mark.parametrize("what", ["merged", "update"])
def test_peft_computes_the_same(what: str, written: Path, tmp_path: Path) -> None:
    run_script(TRAINER, SCRIPT, [PEFT, what, written, tmp_path / "adapters"])


def test_adapters_as_peft_names_them(written: Path, tmp_path: Path) -> None:
    lora = LoraSpec(rank=4, alpha=6)
    trained = trained_adapters(written, lora)
    save_peft_folder(tmp_path / "peft", written, lora, trained, "org/name")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 6, "org/name")
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    saved = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert torch.equal(
        saved["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"],
        trained["model.layers.1.self_attn.q_proj.lora_A"],
    )
    assert len(saved) == len(trained) == 2 * 4 * 2
    with pytest.raises(UserError, match="has adapters already"):
        save_peft_folder(tmp_path / "peft", written, lora, trained, "org/name")


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_a_tower_gets_no_adapters_from_peft(kind: str, tmp_path: Path) -> None:
    model, lora = tmp_path / "model", LoraSpec(rank=4, targets=["q_proj", "up_proj"])
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": kind, **CONFIGS[kind]}))
    save_peft_folder(tmp_path / "peft", model, lora, trained_adapters(model, lora), "org/name")
    targets = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["target_modules"]
    linear = [name for name, module in build_hf_model(model).named_modules() if isinstance(module, nn.Linear)]
    # PEFT's: the name, or what a name ends with after a dot.
    adapted = [name for name in linear if any(f".{name}".endswith(f".{target}") for target in targets)]
    assert len(adapted) == 2 * 2
    assert all(name.startswith("model.language_model.layers.") for name in adapted)


def test_a_base_that_changed_is_named(written: Path) -> None:
    model = MergedModel(written, LoraSpec(), {}, torch.float32)
    digests = {name: f"{rows_digest(model._read(name), 0):016x}" for name in model._views}
    model.check(digests, "step-3")
    with pytest.raises(ValueError, match=r"step-3: its adapters .* model.norm.weight differs"):
        model.check(digests | {"model.norm.weight": "0"}, "step-3")
