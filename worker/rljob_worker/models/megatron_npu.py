"""Makes megatron-core 0.16 run on Ascend NPUs, by MindSpeed (branch core_r0.16.0), and the modules it computes with.

MindSpeed replaces names in torch and Megatron for the whole process: nothing of Megatron may have been imported before,
and the engine needs a process of its own. Order: `install()` before the first megatron import, `finish(seed)` after
`initialize_model_parallel`.

vime (PR 285) patches Megatron's attention before it activates MindSpeed, so that MindSpeed finds the patched one. Here
the layer specification names `FusionAttention`, and neither patch is in its way.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from rljob_worker.errors import UserError
from rljob_worker.models.kernels import CausalAttention

ADAPTOR = "mindspeed.megatron_adaptor"
ARGUMENTS = ("--optimizer-selection=fused_torch_adamw",)
"""MindSpeed's settings, as the command line that it parses.

Its own Adam counts updates in the parameter group, where neither a checkpoint nor a rollback would find them; torch's
keeps the count beside the moments. Megatron binds the class when it is imported, which the adaptor does: `repatch`
comes too late for it."""

_CAUSAL = 2
"""sparse_mode `leftUpCausal`: the mask is given once, as the upper triangle of 2048 x 2048, whatever the length is."""
_MASK_SIZE = 2048

_installed = False


def install() -> None:
    """Activate MindSpeed; a second call does nothing.

    Raises:
        UserError: MindSpeed or torch_npu is missing, or does not load.
        RuntimeError: Megatron was imported before: it has bound what MindSpeed would replace.
    """
    global _installed
    if _installed:
        return
    early = sorted(name for name in sys.modules if name.partition(".")[0] == "megatron")
    if early:
        raise RuntimeError(
            f"MindSpeed must be activated before Megatron is imported, and {early[0]} is there already; import "
            "megatron only after models.platforms' install() has run"
        )
    for package, what in (
        ("torch_npu", "the torch_npu that fits this torch"),
        ("mindspeed", "MindSpeed, branch core_r0.16.0"),
    ):
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            raise UserError(f"{package} is not installed; use the worker image for Ascend, or install {what}")
    with _arguments(ARGUMENTS):
        try:
            importlib.import_module(ADAPTOR)
        except ImportError as error:
            raise UserError(
                f"{ADAPTOR} does not load ({error}); MindSpeed core_r0.16.0 needs megatron-core 0.16 and a torch_npu "
                "that fits torch, with CANN's set_env.sh sourced before Python starts"
            ) from error
    _installed = True


@contextlib.contextmanager
def _arguments(own: tuple[str, ...]) -> Iterator[None]:
    """Show MindSpeed a command line of ours: it parses the process's, which is Ray's."""
    outer = sys.argv
    sys.argv = [outer[0] if outer else "", *own]
    try:
        yield
    finally:
        sys.argv = outer


def finish(seed: int) -> None:
    """Seed Megatron's generators on the device, and check the optimizer; call after `initialize_model_parallel`.

    Raises:
        RuntimeError: Megatron's optimizer is not torch's AdamW: MindSpeed was active before with other arguments.
    """
    from megatron.core import optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    adam = optimizer.Adam
    if not issubclass(adam, torch.optim.AdamW):
        raise RuntimeError(
            f"Megatron uses {adam.__module__}.{adam.__qualname__} in the place of torch's AdamW, and a checkpoint "
            "would lose its count of updates: mindspeed was imported before models.megatron_npu"
        )
    model_parallel_cuda_manual_seed(seed)


class FusionAttention(CausalAttention):
    """On CANN's fused kernel; the size of a head is a multiple of 16."""

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        import torch_npu

        heads, width = query.shape[2:]
        context: torch.Tensor = torch_npu.npu_fusion_attention(
            query.flatten(2),
            key.flatten(2),
            value.flatten(2),
            heads,
            "SBH",
            atten_mask=_upper_triangle(query.device),
            scale=width**-0.5 if self.softmax_scale is None else self.softmax_scale,
            keep_prob=1.0,
            sparse_mode=_CAUSAL,
        )[0]
        return context


@cache
def _upper_triangle(device: torch.device) -> torch.Tensor:
    """Bool [2048, 2048], True where a query must not look: what `sparse_mode` 2 takes at any sequence length."""
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=device).triu_(1)


class FusedSwiGLU(torch.nn.Module):
    """Megatron's gated activation, silu(gate) * up of [..., 2 F] = gate beside up, on CANN's fused kernel."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, gate_and_up: torch.Tensor) -> torch.Tensor:
        """[..., F] of [..., 2 F]."""
        import torch_npu

        out: torch.Tensor = torch_npu.npu_swiglu(gate_and_up, dim=-1)
        return out
