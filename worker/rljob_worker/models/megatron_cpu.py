"""Makes megatron-core 0.16 run on CPU: it asks for CUDA by name in places where the CPU would do as well.

Order: `install()` before the first megatron import, `finish(seed)` after `initialize_model_parallel`. What is patched
stays so for the life of the process, on every thread, and costs nothing in the training loop.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full")
"""What megatron-core 0.16 calls with a literal `device="cuda"`."""

_installed = False


class _NullStream:
    """Stands for a CUDA stream or event where all work is synchronous."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

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


class _CpuRngTracker:
    """Megatron's CUDA RNG tracker over torch's CPU generator: named states, forked in and out."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def is_initialized(self) -> bool:
        return True

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        if name in self.states_:
            raise ValueError(f"RNG state {name!r} exists already")
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)


def _redirect_cuda(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def redirected(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return redirected


def install() -> None:
    """Redirect Megatron's CUDA calls to the CPU; a second call does nothing.

    Raises:
        RuntimeError: the process has a CUDA device.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim for Megatron must not be installed where CUDA is available")
    # Neither has a CPU build; torch's own norm, optimizer and gradient clipping are what is wanted.
    for missing in ("Apex is not installed", "Transformer Engine and Apex are not installed"):
        warnings.filterwarnings("ignore", message=missing, category=UserWarning)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron warns without it

    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_args, **_kwargs: None
    cuda.empty_cache = lambda: None
    cuda.Stream = cuda.Event = cuda.stream = cuda.current_stream = cuda.default_stream = _NullStream
    for name in _FACTORIES:
        setattr(torch, name, _redirect_cuda(getattr(torch, name)))

    tensor_class: Any = torch.Tensor
    cpu_type = tensor_class.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The optimizer groups parameters by the names of CUDA tensor types.
        result = cpu_type(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    tensor_class.type = cuda_type
    tensor_class.cuda = lambda self, *_args, **_kwargs: self
    _installed = True


def finish(seed: int) -> None:
    """Set Megatron's RNG tracker on the CPU; call after `initialize_model_parallel`.

    Seeds as in Megatron's `model_parallel_cuda_manual_seed`: tensor-parallel ranks differ, data-parallel ranks agree.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    tracker = _CpuRngTracker()
    module: Any = megatron_random
    module._CUDA_RNG_STATE_TRACKER = tracker
    module._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    module._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    expert_tensor_rank = parallel_state.get_expert_tensor_parallel_rank()
    tracker.add(megatron_random.get_data_parallel_rng_tracker_name(), seed)
    tracker.add(megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME, seed + 2718 + tensor_rank)
    tracker.add(
        megatron_random.get_expert_parallel_rng_tracker_name(), seed + 1024 + 100 * expert_rank + expert_tensor_rank
    )

    # Without Transformer Engine megatron-core 0.16 never defines this name, and still reads it.
    moe: Any = moe_utils
    if not hasattr(moe, "te_general_gemm"):
        moe.te_general_gemm = None
    dispatcher: Any = token_dispatcher
    dispatcher.maybe_move_tensor_to_cpu = _to_host


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's device-to-host copy, which leaves CPU tensors as they are even where numpy is asked for."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
