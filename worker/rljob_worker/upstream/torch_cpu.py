"""torch on CPU answers to the CUDA names that megatron-core calls where the CPU would do as well.

What is patched stays so for the life of the process, on every thread, and costs nothing in the training loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch

from rljob_worker.upstream.patch import MEGATRON, MEGATRON_BACKEND, TORCH, Patch, Process, put

P = ParamSpec("P")

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full")
"""Functions that megatron-core 0.16 calls with a literal `device="cuda"`."""
_STREAMS = ("Stream", "Event", "stream", "current_stream", "default_stream")


class _NullStream:
    """Stands for a CUDA stream or event where all work is synchronous."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def __enter__(self) -> _NullStream:
        return self

    def __exit__(self, *_exc: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, _stream: object = None) -> None: ...

    def wait_stream(self, _stream: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...

    def record(self, _stream: object = None) -> None: ...

    def record_event(self, _event: object = None) -> _NullStream:
        return _NullStream()

    def query(self) -> bool:
        return True


def _redirect_cuda(factory: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    @functools.wraps(factory)
    def redirected(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return redirected


def _cuda_module() -> None:
    """Raises RuntimeError where the process has a CUDA device."""
    if torch.cuda.is_available():
        raise RuntimeError("torch must not be told that the CPU is its CUDA device where CUDA is available")
    put(
        torch.cuda,
        current_device=lambda: "cpu",
        synchronize=lambda *_args, **_kwargs: None,
        empty_cache=lambda: None,
        **dict.fromkeys(_STREAMS, _NullStream),
    )


def _factories() -> None:
    put(torch, **{name: _redirect_cuda(getattr(torch, name)) for name in _FACTORIES})


def _tensor_class() -> None:
    cpu_type: Callable[..., object] = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        result = cpu_type(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    put(torch.Tensor, type=cuda_type, cuda=lambda self, *_args, **_kwargs: self)


def _patch(name: str, targets: tuple[str, ...], why: str, test: str, apply: Callable[[], None]) -> Patch:
    test = f"tests/worker/upstream/test_patches.py::{test}"
    versions = {"torch": TORCH, "megatron-core": MEGATRON}
    return Patch(name, targets, versions, why, test, apply, (Process.TRAINER,), ("cpu",), backend=MEGATRON_BACKEND)


PATCHES = (
    _patch(
        "torch-cuda-module-on-cpu",
        tuple(f"torch.cuda.{name}" for name in ("current_device", "synchronize", "empty_cache", *_STREAMS)),
        "Megatron asks for the current CUDA device, its streams and events by name",
        "test_torch_answers_to_cuda_names",
        _cuda_module,
    ),
    _patch(
        "torch-factories-on-cpu",
        tuple(f"torch.{name}" for name in _FACTORIES),
        'Megatron makes tensors with a literal device="cuda"',
        "test_torch_answers_to_cuda_names",
        _factories,
    ),
    _patch(
        "torch-tensor-type-on-cpu",
        ("torch.Tensor.type", "torch.Tensor.cuda"),
        "Megatron's optimizer groups parameters by the names of CUDA tensor types, and moves tensors by .cuda()",
        "test_torch_answers_to_cuda_names",
        _tensor_class,
    ),
)
