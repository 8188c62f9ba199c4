"""Adapters in a running vLLM 0.23 model, beside weights that no sync brings.

As for weights, vLLM's own code says where: `set_lora` of each module runs once, and the copies that it makes are noted.
What it keeps them in has a slot for each adapter; the policy is alone, in the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from rljob_worker.errors import WeightSyncError
from rljob_worker.tensor_slice import storage_of
from rljob_worker.upstream.vllm_types import AdaptedLayer, AdapterManager, ModelConfig
from rljob_worker.weightsync.places import Copy, Places, View

if TYPE_CHECKING:
    from rljob_worker.upstream.vllm_types import Model

_SLOT = 0
A, B = "lora_A", "lora_B"
"""Last parts of the names of tensors, as the trainers' models have them."""


@dataclass(slots=True)
class _Adapted:
    """A module that adds what adapters compute, and computes with them where they are."""

    name: str
    layer: AdaptedLayer
    tensors: set[str] = field(default_factory=set)
    fills: Sequence[object] = ()

    @property
    def stacked(self) -> dict[str, torch.Tensor]:
        """Its memory, by name."""
        named: dict[str, torch.Tensor] = {}
        for kind, tensors in ((A, self.layer.lora_a_stacked), (B, self.layer.lora_b_stacked)):
            named |= {f"{kind}.{part}": tensor for part, tensor in enumerate(tensors)}
        return named

    def parameter(self, name: str) -> torch.Tensor:
        return self.stacked[name]

    def keeps_layout(self) -> bool:
        return True

    def lands_in_place(self) -> bool:
        return True

    def begin(self) -> None:
        pass

    def complete(self) -> None:
        pass

    def place_back(self) -> None:
        pass


class AdapterPlaces(Places):
    """The place of each tensor of an adapter in one model; made once, good for as long as `holds`."""

    def __init__(
        self, model: Model, manager: AdapterManager, tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        """Run `set_lora` of each module over zeros of these names and shapes.

        Raises:
            WeightSyncError: no adapter was loaded, a module has no place for a tensor, or does more than copy it.
        """
        self._model, self._manager = model, manager
        if not self._loaded():
            raise WeightSyncError("the engine has no adapter in its first slot")
        copies: dict[str, list[Copy]] = {name: [] for name in tensors}
        owners: dict[str, _Adapted] = {}
        for name, layer in manager.modules.items():
            owner = _Adapted(name, layer)
            parts = manager.packed_modules.get(name, ())
            given = [_zeros(owner, part, tensors, dtype) for part in parts or (name,)]
            if any(given):
                a, b = ([None if one is None else one[which] for one in given] for which in (0, 1))
                with _Trace(owner, copies, given, parts or (name,)):
                    layer.set_lora(_SLOT, a if parts else a[0], b if parts else b[0])
                owners[name] = owner
        for name, found in copies.items():
            if not found:
                raise WeightSyncError(f"the engine's model has no place for {name}")
        super().__init__(tensors, copies, owners)
        self._adapted = owners
        self._addresses = self._addresses_now()

    def holds(self, model: Model) -> bool:
        """Whether `model` still computes with this adapter, where it was in memory."""
        return model is self._model and self._loaded() and self._addresses_now() == self._addresses

    def finish(self, model_config: ModelConfig) -> None:
        """Nothing: nothing is derived from adapters."""

    def _loaded(self) -> bool:
        return self._manager.lora_index_to_id[_SLOT] is not None

    def _addresses_now(self) -> list[int]:
        return [tensor.data_ptr() for owner in self._adapted.values() for tensor in owner.stacked.values()]


def _zeros(
    owner: _Adapted, part: str, tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A and B of a module, or of a part of a fused one; None where it has no adapter."""
    names = f"{part}.{A}", f"{part}.{B}"
    missing = [name for name in names if name not in tensors]
    if len(missing) == 1:
        raise WeightSyncError(f"{part} has half an adapter: {missing[0]} does not come")
    if missing:
        return None
    device = owner.layer.lora_a_stacked[0].device
    a, b = (torch.zeros(tensors[name], dtype=dtype, device=device) for name in names)
    return a, b


class _Trace(TorchDispatchMode):
    """Notes where `set_lora` copies what it is given."""

    def __init__(
        self,
        owner: _Adapted,
        copies: Mapping[str, list[Copy]],
        given: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
        parts: Sequence[str],
    ) -> None:
        super().__init__()
        self._owner, self._copies = owner, copies
        self._places = {storage_of(tensor): name for name, tensor in owner.stacked.items()}
        self._given = {
            storage_of(tensor): f"{part}.{kind}"
            for part, pair in zip(parts, given, strict=True)
            if pair is not None
            for kind, tensor in zip((A, B), pair, strict=True)
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            assert isinstance(target, torch.Tensor)
            assert isinstance(source, torch.Tensor)
            place, name = self._places.get(storage_of(target)), self._given.get(storage_of(source))
            if place is not None and name is not None:
                self._copies[name].append(Copy(self._owner.name, place, View.of(source), View.of(target)))
                self._owner.tensors.add(name)
        return func(*args, **(kwargs or {}))
