"""megatron-core without CUDA's libraries, and on CPU; the CUDA names that it calls are in `torch_cpu`."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator

import torch
from torch.distributed import ProcessGroup

from rljob_worker.upstream.patch import EVERY_DEVICE, MEGATRON, MEGATRON_BACKEND, Patch, Process, put


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


def _warnings() -> None:
    for missing in ("Apex is not installed", "Transformer Engine and Apex are not installed"):
        warnings.filterwarnings("ignore", message=missing, category=UserWarning)


def _rng() -> None:
    from megatron.core.tensor_parallel import random

    put(
        random,
        _CUDA_RNG_STATE_TRACKER=_CpuRngTracker(),
        _CUDA_RNG_STATE_TRACKER_INITIALIZED=True,
        _get_cuda_rng_state=lambda *_args, **_kwargs: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, *_args, **_kwargs: torch.set_rng_state(state),
    )


def _grouped_products() -> None:
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        put(moe_utils, te_general_gemm=None)


def _copies_to_host() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    put(token_dispatcher, maybe_move_tensor_to_cpu=_to_host)


def _to_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _exchanges() -> None:
    from megatron.core.distributed import param_and_grad_buffer as buffers

    put(
        buffers,
        dist_reduce_scatter_func=_unless_alone(buffers.dist_reduce_scatter_func),
        dist_all_gather_func=_unless_alone(buffers.dist_all_gather_func),
    )


def _unless_alone(exchange: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(exchange)
    def exchanged(
        output: torch.Tensor, given: torch.Tensor, *, group: ProcessGroup, async_op: bool = False, **options: object
    ) -> object:
        if group.size() > 1 or async_op:
            return exchange(output, given, group=group, async_op=async_op, **options)
        # Megatron's output is the rank's share of the buffer itself: of one rank's, the whole.
        if output.data_ptr() != given.data_ptr():
            output.copy_(given)
        return None

    return exchanged


def _patch(
    name: str,
    targets: tuple[str, ...],
    why: str,
    test: str,
    apply: Callable[[], None],
    devices: tuple[str, ...] = ("cpu",),
) -> Patch:
    versions = {"megatron-core": MEGATRON}
    return Patch(name, targets, versions, why, test, apply, (Process.TRAINER,), devices, backend=MEGATRON_BACKEND)


_RANDOM = "megatron.core.tensor_parallel.random"
_MOE_TEST = "tests/worker/models/test_model_conversion.py::test_logits_equal_transformers"
PATCHES = (
    Patch(
        "megatron-warnings",
        ("warnings.filters",),
        {"megatron-core": MEGATRON},
        "it warns that Apex and Transformer Engine are missing; torch's own norm, optimizer and clipping are wanted",
        "tests/worker/models/test_model_conversion.py::test_ranks_print_no_warnings",
        _warnings,
        (Process.TRAINER,),
        ("cpu", "cuda"),
        backend=MEGATRON_BACKEND,
    ),
    _patch(
        "megatron-rng-on-cpu",
        tuple(
            f"{_RANDOM}.{name}"
            for name in (
                "_CUDA_RNG_STATE_TRACKER",
                "_CUDA_RNG_STATE_TRACKER_INITIALIZED",
                "_get_cuda_rng_state",
                "_set_cuda_rng_state",
            )
        ),
        "Megatron's tracker of random states is one of CUDA generators",
        "tests/worker/upstream/test_patches.py::test_megatron_tracks_the_cpu_generator",
        _rng,
    ),
    _patch(
        "megatron-grouped-gemm-name",
        ("megatron.core.transformer.moe.moe_utils.te_general_gemm",),
        "without Transformer Engine megatron-core never defines this name, and still reads it",
        _MOE_TEST,
        _grouped_products,
        EVERY_DEVICE,
    ),
    _patch(
        "megatron-dispatcher-on-cpu",
        ("megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",),
        "the device-to-host copy leaves CPU tensors as they are, also where numpy is asked for",
        _MOE_TEST,
        _copies_to_host,
    ),
    _patch(
        "megatron-exchange-of-one-rank",
        tuple(
            f"megatron.core.distributed.param_and_grad_buffer.{name}"
            for name in ("dist_reduce_scatter_func", "dist_all_gather_func")
        ),
        "gloo copies all gradients, and then all weights, also where no other rank is there to exchange them with",
        "tests/worker/upstream/test_patches.py::test_a_rank_alone_copies_nothing_to_exchange_it",
        _exchanges,
    ),
)
