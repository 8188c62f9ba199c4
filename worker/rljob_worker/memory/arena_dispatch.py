"""Placement of torch's new CPU tensors inside an arena region."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeGuard

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

_aten = torch.ops.aten


class TensorAllocator(Protocol):
    """Something that hands out tensors in memory of its own."""

    def allocate_strided(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, tag: str, *, zero: bool = False
    ) -> torch.Tensor:
        """Tensor of that layout."""
        ...

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether it was handed out here."""
        ...


def strided_bytes(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the first to the last element, ends included; strides in elements, not negative."""
    if 0 in shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (last + 1) * dtype.itemsize


# How an output is filled: not at all, with a constant, with the argument at a position, or as a copy of argument 0.
_EMPTY = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default}
_EMPTY |= {_aten.new_empty.default, _aten.new_empty_strided.default}
_ZERO = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
_ONE = {_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default}
_FULL = {_aten.full.default: 1, _aten.full_like.default: 1, _aten.new_full.default: 2}
_COPY = {_aten.clone.default, _aten._to_copy.default}
_DIRECT = _EMPTY | _ZERO | _ONE | set(_FULL) | _COPY


class ArenaDispatchMode(TorchDispatchMode):
    """Puts every CPU tensor with fresh storage in memory of the allocator; views and in-place results keep theirs.

    Plain factories and copies are made there at once; the output of any other operator is copied there.
    """

    def __init__(self, allocator: TensorAllocator, tag: Callable[[], str]) -> None:
        super().__init__()
        self._allocator = allocator
        self._tag = tag

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in _DIRECT and _lands_on_cpu(args, kwargs):
            return self._make(func, args, kwargs)
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if _is_plain(t)}
        # torch.tensor() shows its new storage first as the input of lift_fresh; from_numpy() does the same with the
        # array's memory, which is not resizable and must stay shared.
        if func is _aten.lift_fresh.default and _tensor(args[0]).untyped_storage().resizable():
            given.clear()
        return tree_map_only(torch.Tensor, lambda out: self._placed(out, given), func(*args, **kwargs))

    def _make(
        self, func: OpOverload[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> torch.Tensor:
        if func is _aten.clone.default:
            layout = _tensor(
                _aten.empty_like.default(
                    args[0], device=torch.device("meta"), memory_format=kwargs.get("memory_format")
                )
            )
        else:
            layout = _tensor(func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": None}))
        zero = func in _ZERO
        out = self._allocator.allocate_strided(layout.size(), layout.stride(), layout.dtype, self._tag(), zero=zero)
        if func in _ONE:
            out.fill_(1)
        elif func in _FULL:
            _aten.fill_.Scalar(out, args[_FULL[func]])
        elif func in _COPY:
            out.copy_(_tensor(args[0]))
        return out

    def _placed(self, out: torch.Tensor, given: set[int]) -> torch.Tensor:
        if not _is_plain(out) or out.untyped_storage()._cdata in given or self._allocator.contains(out):
            return out
        target = self._allocator.allocate_strided(out.size(), out.stride(), out.dtype, self._tag())
        return target.copy_(out)


def _tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a dense CPU tensor with memory of its own, not a wrapper subclass."""
    return (
        isinstance(value, torch.Tensor)
        and type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and value.device.type == "cpu"
    )


def _lands_on_cpu(args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    source = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if source is not None and not _is_plain(source):
        return False
    device = kwargs.get("device")
    on_cpu = torch.device(str(device)).type == "cpu" if device is not None else True
    return on_cpu and kwargs.get("layout") in (None, torch.strided) and not kwargs.get("pin_memory")
