"""vLLM's captured graphs: the model inside of what replays them, and the memory that they hold on to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from rljob_worker.errors import WeightSyncError
from rljob_worker.upstream.vllm_types import ModelRunner

if TYPE_CHECKING:
    from rljob_worker.upstream.vllm_types import Model

_REMEDY = "set spec.rollout.graphMode to false"
_NO_STATE = (torch.nn.Module, torch.Tensor, type, FunctionType, MethodType)


def model_of(runner: ModelRunner) -> Model:
    """The runner's model, without what captures and replays it (`CUDAGraphWrapper`, `ACLGraphWrapper`)."""
    wrapper: Any = runner.model
    model: Model = wrapper.unwrap() if hasattr(type(wrapper), "unwrap") else wrapper
    return model


def captured_graphs(runner: ModelRunner) -> int:
    """Graphs of whole steps that the runner's model has by now."""
    for entries, graph in (("concrete_cudagraph_entries", "cudagraph"), ("concrete_aclgraph_entries", "aclgraph")):
        found: Mapping[object, object] | None = getattr(runner.model, entries, None)
        if found is not None:
            return sum(getattr(entry, graph) is not None for entry in found.values())
    return 0


class GraphMemory:
    """Addresses that captured graphs read and write.

    A graph goes on reading where a tensor lay when it was captured. What comes elsewhere later is not seen by it: the
    engine would generate with weights of an earlier step.

    Args:
        model: the captured one.
        kv_caches: addresses of the KV cache, as they are now.
    """

    def __init__(self, model: Model, kv_caches: Callable[[], Iterable[int]]) -> None:
        self._kv_caches, self._caches_at = kv_caches, set(kv_caches())
        self._owned = list(_owned(model))
        """Parameters and buffers, which are where they were at the capture or wrong."""
        self._made = [(place, tensor) for place in _made(model) if (tensor := place[1].get(place[2])) is not None]
        """Tensors that layers keep beside them, which they may make of loaded weights, as they are at the capture."""
        self._addresses = _addresses(self._owned)

    def begin(self, packed: Iterator[str]) -> None:
        """A sync begins.

        Args:
            packed: names of modules whose weights are packed anew by it.

        Raises:
            WeightSyncError: there is one, or a parameter has moved since the capture.
        """
        if (name := next(packed, None)) is not None:
            raise WeightSyncError(
                f"{name} packs its weights anew with each version, which captured graphs do not see; {_REMEDY}"
            )
        self._check(self._owned, self._addresses)

    def check(self) -> None:
        """A sync has landed: what layers have made anew goes where graphs read it.

        Raises:
            WeightSyncError: something that graphs read lies elsewhere now.
        """
        self._check(self._owned, self._addresses)
        self._put_back()
        if set(self._kv_caches()) != self._caches_at:
            raise WeightSyncError(f"the KV cache lies elsewhere than when graphs were captured; {_REMEDY}")

    @torch.no_grad()
    def _put_back(self) -> None:
        for (name, state, key), captured in self._made:
            now = state.get(key)
            if now is captured:
                continue
            if now is None or (now.shape, now.dtype) != (captured.shape, captured.dtype):
                raise WeightSyncError(f"{name} is another tensor than when graphs were captured; {_REMEDY}")
            captured.copy_(now)
            state[key] = captured

    def _check(self, places: list[_Place], addresses: list[int | None]) -> None:
        for (name, _, _), before, now in zip(places, addresses, _addresses(places), strict=True):
            if before != now:
                raise WeightSyncError(
                    f"{name} lies elsewhere than when graphs were captured, which would go on with what was there; "
                    f"{_REMEDY}"
                )


_Place = tuple[str, MutableMapping[str, Any], str]
"""Name, the dictionary that has the tensor, its key."""


def _owned(model: Model) -> Iterator[_Place]:
    for name, module in model.named_modules():
        for owned in (module._parameters, module._buffers):
            yield from ((f"{name}.{key}", owned, key) for key, tensor in owned.items() if tensor is not None)


def _made(model: Model) -> Iterator[_Place]:
    """Tensors that modules, and what computes for them (`impl`, `quant_method`), keep as attributes."""
    for name, module in model.named_modules():
        parts = {f"{name}.{key}": value for key, value in vars(module).items() if not isinstance(value, _NO_STATE)}
        for part, holder in ((name, module), *parts.items()):
            state = getattr(holder, "__dict__", None)
            if isinstance(state, dict):
                yield from ((f"{part}.{key}", state, key) for key, t in state.items() if isinstance(t, torch.Tensor))


def _addresses(places: list[_Place]) -> list[int | None]:
    # vLLM's parameters are classes that look at each call.
    with torch._C.DisableTorchFunctionSubclass():
        return [None if (tensor := state.get(key)) is None else tensor.data_ptr() for _, state, key in places]
