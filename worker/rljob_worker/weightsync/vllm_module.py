"""A module of a vLLM 0.23 model, which a sync gives its parameters.

Parameters that the engine computes with as they are in a checkpoint are written where they are. Modules that pack their
weights out of sight (oneDNN, grouped expert kernels) get parameters in the checkpoint's layout for the time in between,
which vLLM packs, and the result goes into the memory that the engine computes with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FunctionType

import torch

from rljob_worker.devices import packed_linear
from rljob_worker.weightsync.places import Scratch, View, same_layout


@dataclass(slots=True)
class Module:
    """A module of the engine that owns parameters."""

    name: str
    module: torch.nn.Module
    in_checkpoint: dict[str, torch.Tensor]
    """Its parameters and buffers as loaders expect them, on meta."""
    in_use: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
    """The parameters and buffers that it computes with."""
    fills: list[tuple[str, View, float]] = field(default_factory=list)
    """Padding that no checkpoint has."""
    tensors: set[str] = field(default_factory=set)
    """Names of what it is loaded from."""
    never_multiplies: bool = False
    """It is a table to look things up in, though vLLM on CPU packs it for products like any other weight."""
    order: packed_linear.Order | None = None
    """Order of what torch packed of its weight; None where that is not known (yet)."""
    scratch: Scratch = field(default_factory=Scratch)
    taken: list[torch.Tensor] = field(default_factory=list)
    """Parts of the scratch memory that it uses."""
    in_place: bool | None = None
    """Result of `lands_in_place`."""

    def parameter(self, name: str) -> torch.Tensor:
        """The one that copies go to now."""
        parameter: torch.Tensor = getattr(self.module, name)
        return parameter.data

    def begin(self) -> None:
        """Give it parameters in the checkpoint's layout, unless it has them."""
        if self.lands_in_place():
            return
        in_use = self.in_use[0] | self.in_use[1]
        self._remove()
        for name, wanted in self.in_checkpoint.items():
            current = in_use.get(name)
            if current is not None and same_layout(wanted, current):
                place = current.data
            else:
                self.taken.append(self.scratch.take(wanted))
                place = self.taken[-1].detach()
            # Loading and packing need the attributes that the parameter had when it was made (`output_dim` and such).
            place.__class__ = wanted.__class__
            place.__dict__ = wanted.__dict__.copy()
            if isinstance(place, torch.nn.Parameter):
                self.module.register_parameter(name, place)
            else:
                self.module.register_buffer(name, place)

    def complete(self) -> None:
        """Pack what it was given, and put it where the engine computes with it."""
        for name, view, value in self.fills:
            view.on(self.parameter(name)).fill_(value)
        if self.lands_in_place():
            return
        if hasattr(self.module, "_already_called_process_weights_after_loading"):
            del self.module._already_called_process_weights_after_loading
        self.pack()
        parameters, buffers = self.in_use
        for name, current in (parameters | buffers).items():
            new = getattr(self.module, name)
            if self.order is not None and new.shape != current.shape:
                continue  # what vLLM leaves of a weight that it has packed
            if new.data_ptr() != current.data_ptr() or not same_layout(new, current):
                current.data.copy_(new)
        self.place_back()

    def pack(self) -> None:
        """Do what vLLM does with a module's parameters once they are loaded, in memory that is there if possible."""
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        weight, packed = getattr(self.module, "weight", None), self._packed()
        if self.order is not None and weight is not None and packed is not None:
            packed_linear.repack(packed, weight.data, self.order)
            return
        method = getattr(self.module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(self.module)
        packed = self._packed()
        if weight is not None and packed is not None:
            self.order = packed_linear.order_of(packed, weight.data)

    def _packed(self) -> torch.Tensor | None:
        """Weight as packed by torch, where `cpu_linear` multiplies with that one."""
        for cell in getattr(getattr(self.module, "cpu_linear", None), "__closure__", None) or ():
            if isinstance(cell.cell_contents, torch.Tensor) and cell.cell_contents.is_mkldnn:
                return cell.cell_contents
        return None

    def place_back(self) -> None:
        """Put the parameters and buffers back that it computes with."""
        self._remove()
        self.scratch.give_back(self.taken)
        self.taken = []
        for name, parameter in self.in_use[0].items():
            assert isinstance(parameter, torch.nn.Parameter)
            self.module.register_parameter(name, parameter)
        for name, buffer in self.in_use[1].items():
            self.module.register_buffer(name, buffer)

    def _remove(self) -> None:
        for own in (self.module._parameters, self.module._buffers):
            for name in [name for name, tensor in own.items() if tensor is not None]:
                delattr(self.module, name)

    def lands_in_place(self) -> bool:
        """Whether it computes with its parameters alone, as they are in a checkpoint.

        On CPU, `cpu_linear` is what multiplies, and where it is a plain function of the weight nothing is packed, as on
        CPUs whose instructions oneDNN's packed kernels do not support.
        """
        if self.in_place is None:
            self.in_place = self._computes_as_loaded()
        return self.in_place

    def keeps_layout(self) -> bool:
        """Whether its parameters are as in a checkpoint: new ones are written where those are, and nothing else."""
        wanted = self.in_checkpoint
        return all(name in wanted and same_layout(wanted[name], now) for name, now in self.in_use[0].items())

    def _computes_as_loaded(self) -> bool:
        if not self.keeps_layout():
            return False
        if getattr(self.module, "quant_method", None) is None:
            return True
        multiply = getattr(self.module, "cpu_linear", None)
        if multiply is None:
            return False
        plain = isinstance(multiply, FunctionType) and not multiply.__closure__ and not multiply.__defaults__
        return plain or self.never_multiplies


def find_tables(modules: Iterable[Module]) -> None:
    """Mark the embeddings of models that have a head of their own; elsewhere the embeddings are the head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules = list(modules)
    if not any(module.tensors and isinstance(module.module, ParallelLMHead) for module in modules):
        return
    for module in modules:
        kind = module.module
        module.never_multiplies = isinstance(kind, VocabParallelEmbedding) and not isinstance(kind, ParallelLMHead)
