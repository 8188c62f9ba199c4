"""A stand-in for captured graphs, which CANN's driver replays: a graph is the list of operators that it saw.

Each is called again with the memory that it was captured with, whatever tensors the model has by then. So a weight that
has moved is not seen, as on a device. Reading from the device ends a capture with an error. A replay stops where the
graph waits for an event and goes on when another stream records it, as vllm-ascend's new lengths come while the graph
waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_npu
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

_IN_PYTHON = ("vllm", "vllm_ascend")
"""Namespaces whose kernels are Python functions: a device sees what they call, and not them."""
_NO_WORK = ("aten::empty", "aten::detach")
_ATTENTION = "npu_fused_infer_attention_score"


def install() -> None:
    """Put the stand-ins where torch_npu has its own."""
    for name, stand_in in (
        ("NPUGraph", Graph),
        ("ExternalEvent", Event),
        ("graph_pool_handle", lambda: (0, 0)),
        ("graph_task_group_begin", _group_begin),
        ("graph_task_group_end", _group_end),
        ("graph_task_update_begin", _update_begin),
        ("graph_task_update_end", _update_end),
    ):
        setattr(torch.npu, name, stand_in)
        setattr(torch_npu.npu, name, stand_in)
    _attend_into()


@dataclass(slots=True)
class _Launch:
    """An operator, with the memory that it was captured with."""

    operator: OpOverload[..., Any]
    args: Any
    kwargs: Any
    results: list[torch.Tensor]

    def run(self) -> None:
        found = [t for t in tree_flatten(self.operator(*self.args, **self.kwargs))[0] if isinstance(t, torch.Tensor)]
        for result, new in zip(self.results, found, strict=True):
            if result.data_ptr() != new.data_ptr():
                result.copy_(new)


@dataclass(slots=True)
class _Step:
    """A wait for an event, or its reset."""

    event: Event
    waits: bool


class Event:
    """`torch.npu.ExternalEvent`: a graph waits for what another stream records."""

    def __init__(self) -> None:
        self.recorded = False

    def wait(self, _stream: object) -> None:
        _capturing().steps.append(_Step(self, waits=True))

    def reset(self, _stream: object) -> None:
        _capturing().steps.append(_Step(self, waits=False))

    def record(self, _stream: object) -> None:
        self.recorded = True
        if Graph.running is not None:
            Graph.running.go_on()


class Graph:
    """`torch.npu.NPUGraph`."""

    capturing: Graph | None = None
    running: Graph | None = None
    """The one whose replay waits for an event."""
    replays = 0
    auto_dispatch_capture = False

    def __init__(self) -> None:
        self.steps: list[_Launch | _Step] = []
        self._next = 0

    def capture_begin(self, *_pool: object, **_options: object) -> None:
        Graph.capturing = self
        self._mode = _Recording(self)
        self._mode.__enter__()

    def capture_end(self) -> None:
        self._mode.__exit__(None, None, None)
        Graph.capturing = None

    def replay(self) -> None:
        assert Graph.running is None, "a graph is replayed while another one waits"
        Graph.replays += 1
        self._next, Graph.running = 0, self
        self.go_on()

    def go_on(self) -> None:
        """Run to the next event that nobody has recorded, or to the end."""
        while self._next < len(self.steps):
            step = self.steps[self._next]
            if isinstance(step, _Launch):
                step.run()
            elif not step.waits:
                step.event.recorded = False
            elif not step.event.recorded:
                return
            self._next += 1
        Graph.running = None

    def pool(self) -> tuple[int, int]:
        return (0, 0)


class _Recording(TorchDispatchMode):
    """Notes what a capture would."""

    supports_higher_order_operators = True

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        _types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            with self:
                return func.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
        if func.namespace in _IN_PYTHON:
            with self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1), *args, **kwargs)
        results = func(*args, **kwargs)
        taken = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        made = [t for t in tree_flatten(results)[0] if isinstance(t, torch.Tensor)]
        read = any(t.device.type == "npu" for t in taken)
        if read and (func.name() == "aten::_local_scalar_dense" or any(t.device.type == "cpu" for t in made)):
            raise RuntimeError(f"stand-in for CANN: {func.name()} reads from the device while a graph is captured")
        if (read or any(t.device.type == "npu" for t in made)) and not func.name().startswith(_NO_WORK):
            noted, options, kept = tree_map(_same_memory, (tuple(args), dict(kwargs), made))
            self._graph.steps.append(_Launch(func, noted, options, kept))
        else:
            self._kept += made
        return results


class _Updating(TorchDispatchMode):
    """Gives launches of a graph other arguments instead of running them."""

    def __init__(self, launches: list[_Launch]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        _types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for launch in self._launches:
            if launch.operator is func:
                launch.args, launch.kwargs = tree_map(_same_memory, (tuple(args), dict(kwargs or {})))
                return (kwargs or {}).get("out")
        return func(*args, **(kwargs or {}))


def _same_memory(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach()


def _capturing() -> Graph:
    assert Graph.capturing is not None, "stand-in for CANN: no graph is captured"
    return Graph.capturing


_begun: list[int] = []
_updates: list[_Updating] = []


def _group_begin(_stream: object) -> None:
    _begun.append(len(_capturing().steps))


def _group_end(_stream: object) -> list[_Launch]:
    steps = _capturing().steps[_begun.pop() :]
    return [step for step in steps if isinstance(step, _Launch)]


def _update_begin(_stream: object, handle: list[_Launch]) -> None:
    _updates.append(_Updating(handle))
    _updates[-1].__enter__()


def _update_end(_stream: object) -> None:
    _updates.pop().__exit__(None, None, None)


_library: torch.library.Library | None = None


def _attend_into() -> None:
    """Register attention that writes into given memory, which a graph needs; `kernels.cpp` has the one that returns."""
    global _library
    plain: Callable[..., Any] = getattr(torch.ops.npu, _ATTENTION).default

    def attend(*args: Any, workspace: Any = None, out: Sequence[torch.Tensor] = (), **kwargs: Any) -> Any:
        context, _ = plain(*args, **kwargs)
        out[0].copy_(context)
        return out[0], out[1]

    def no_workspace(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(1, dtype=torch.uint8, device=query.device)

    _library = torch.library.Library("npu", "IMPL")
    _library.impl(f"{_ATTENTION}.out", attend, "PrivateUse1", allow_override=True)
    _library.impl(f"_{_ATTENTION}_get_max_workspace", no_workspace, "PrivateUse1", allow_override=True)
