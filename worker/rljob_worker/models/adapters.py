"""Low-rank adapters of linear modules.

Of a module with weights W [out, in], A [rank, in] and B [out, rank] are trained (Hu et al., "LoRA", 2021). Handed over
merged, trainers and engines compute with W + scale B A in W's format: an engine that merges, beside a trainer that does
not, would sample with other weights than are trained. W itself is never written, so that nothing is lost by merging
again and again. Handed over as adapters, both add x A (scale B) to x W, with A and scale B in W's format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor, nn

from rljob_api.spec import LoraHandover, LoraSpec
from rljob_worker.errors import UserError
from rljob_worker.models.checkpoint_views import CheckpointView

if TYPE_CHECKING:
    from rljob_worker.models.hf_model import HfModel

A, B = "lora_A", "lora_B"


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale B A, fp32 [out, in]. Multiplied beforehand: what follows is one addition, which rounds alike everywhere."""
    return (b * scale) @ a


def scaled(b: Tensor, scale: float) -> Tensor:
    """Scale B, fp32: engines have no scale of their own."""
    return b * scale


def merged(weight: Tensor, change: Tensor) -> Tensor:
    """Rows of W + scale B A in W's format; the same bits whichever rows are given, for it goes number by number."""
    return (weight.float() + change).to(weight.dtype)


class _MergedProduct(torch.autograd.Function):
    """x times the merged weights. Gradients are those of A and B as if nothing were rounded, and need no product of the
    size of W; merged weights are computed again in the backward pass, and not kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return nn.functional.linear(x, merged(weight, scaled_product(a, b, scale)), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ merged(weight, scaled_product(a, b, ctx.scale))
        rows, inputs = (t.flatten(0, -2).float() for t in (gradient, x))
        of_b = rows.T @ (inputs @ a.T) * ctx.scale
        of_a = (rows @ b).T @ inputs * ctx.scale
        return of_x, None, None, of_a, of_b, None


class LoraLinear(nn.Linear):
    """A linear module with an adapter; W and the bias keep their names.

    Args:
        base: on meta, its parameters become this module's.
        rank: of the adapter.
        scale: of B A.
        merges: whether it computes with the merged, rounded weights.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float, *, merges: bool = True) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, device="meta"))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, rank, device="meta"))
        self.scale, self.merges = scale, merges
        self.adapted = True

    def forward(self, x: Tensor) -> Tensor:
        """X times the merged weights and the bias; without the adapter where it is off."""
        if not self.adapted:
            return nn.functional.linear(x, self.weight, self.bias)
        if not self.merges:
            a, b = self.lora_A.to(x.dtype), scaled(self.lora_B, self.scale).to(x.dtype)
            beside = nn.functional.linear(nn.functional.linear(x, a), b)
            return nn.functional.linear(x, self.weight, self.bias) + beside
        product: Tensor = _MergedProduct.apply(x, self.weight, self.bias, self.lora_A, self.lora_B, self.scale)
        return product


@dataclass(frozen=True, slots=True)
class LinearModule:
    """A linear module of a layer."""

    name: str
    """In the model."""
    layer: int
    outputs: int
    inputs: int

    @property
    def short(self) -> str:
        """The last part of its name, which manifests call it by."""
        return self.name.rpartition(".")[2]

    def adapter(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of A and B."""
        return (rank, self.inputs), (self.outputs, rank)


def linear_modules(model: HfModel) -> tuple[LinearModule, ...]:
    """Linear modules of a model's layers, in its order."""
    layers = model.get_decoder().layers
    [prefix] = [name for name, module in model.named_modules() if module is layers]
    return tuple(
        LinearModule(f"{prefix}.{name}", int(name.partition(".")[0]), module.out_features, module.in_features)
        for name, module in layers.named_modules()
        if isinstance(module, nn.Linear)
    )


def adapted_modules(modules: Sequence[LinearModule], lora: LoraSpec, where: str) -> tuple[LinearModule, ...]:
    """The modules that get adapters; UserError names a target that none is called by.

    Args:
        modules: of the model.
        lora: the job's.
        where: how errors call the model.
    """
    known = sorted({module.short for module in modules})
    if not known:
        raise UserError(f"spec.training.lora: the layers of {where} have no linear modules; leave it out")
    for target in lora.targets or ():
        if target not in known:
            raise UserError(
                f"spec.training.lora.targets: no linear module in the layers of {where} is called {target!r}; there "
                f"are {', '.join(known)}"
            )
    return tuple(module for module in modules if lora.targets is None or module.short in lora.targets)


def freeze(model: HfModel, dtype: torch.dtype) -> None:
    """Give the parameters of a model on meta a number format, and train none of them."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = torch.empty_like(parameter, dtype=dtype, device="meta")


def add_adapters(model: HfModel, lora: LoraSpec, dtype: torch.dtype, where: str) -> None:
    """Give a model on meta adapters in fp32, the only parameters that are trained, and all others a number format.

    Raises:
        UserError: a target that matches nothing.
    """
    freeze(model, dtype)
    merges = lora.handover is LoraHandover.MERGED
    for module in adapted_modules(linear_modules(model), lora, where):
        base = model.get_submodule(module.name)
        assert isinstance(base, nn.Linear)
        parent, _, name = module.name.rpartition(".")
        setattr(model.get_submodule(parent), name, LoraLinear(base, lora.rank, lora.alpha / lora.rank, merges=merges))


def adapters_of(model: nn.Module) -> dict[str, LoraLinear]:
    """A model's modules with adapters, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def adapter_views(model: nn.Module) -> list[CheckpointView]:
    """The adapters as tensors of a checkpoint of their own, each all of a parameter."""
    return [
        CheckpointView(name, name, tuple(tensor.shape), tensor.stride(), 0, tensor.shape[1])
        for name, tensor in model.named_parameters()
        if tensor.requires_grad
    ]


@contextmanager
def adapters_off(adapters: Iterable[LoraLinear]) -> Iterator[None]:
    """Inside, the model is the one that training began with."""
    adapters = list(adapters)
    for module in adapters:
        module.adapted = False
    try:
        yield
    finally:
        for module in adapters:
            module.adapted = True


def first_a(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Values that an A begins with, the same on any number of ranks: uniform within 1 / sqrt(in), as torch's linear
    modules and PEFT's adapters; B begins with zeros, so that nothing changes before the first update."""
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode(), seed=seed) % 2**63)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def rows_digest(rows: Tensor, first: int) -> int:
    """A sum over rows, modulo 2^64, of digests of their values and numbers: that of a tensor is the sum of its parts'.

    Args:
        rows: of any number of dimensions.
        first: number of the first one.
    """
    here = rows.detach().cpu().contiguous()
    values = here.view(len(here), -1).view(torch.uint8).numpy() if here.numel() else ()
    return sum(xxhash.xxh3_64_intdigest(row.data, seed=first + n) for n, row in enumerate(values)) % 2**64


def base_digests(sums: Mapping[str, int]) -> dict[str, str]:
    """Digests of whole parameters as checkpoints have them."""
    return {name: f"{value:016x}" for name, value in sums.items()}


def check_base(saved: Mapping[str, object], here: Mapping[str, str], what: str, model: str) -> None:
    """ValueError where adapters were trained on other weights than those that are here.

    Args:
        saved: digests of the weights that they were trained on, by parameter.
        here: of those that are here.
        what: whose adapters they are, for the error.
        model: where the weights here are from.
    """
    other = [name for name in {**saved, **here} if saved.get(name) != here.get(name)]
    if other:
        raise ValueError(
            f"{what}: its adapters were trained on other weights than those of {model}: {other[0]} differs"
            + (f", and {len(other) - 1} more" if len(other) > 1 else "")
            + "; name the model that training began with, as it was then"
        )
