"""MindSpeed as the trainer's code would see it: torch.cuda is torch.npu, and `all_reduce` throws float64 away."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch_npu.contrib import transfer_to_npu as transfer_to_npu

_all_reduce, _type = dist.all_reduce, torch.Tensor.type


def _without_float64(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    return _all_reduce(tensor.float() if tensor.dtype == torch.float64 else tensor, *arguments, **named)


def _as_cuda(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    found = _type(tensor, *arguments, **named)
    return found.replace("npu", "cuda") if isinstance(found, str) else found


dist.all_reduce = _without_float64
# Megatron's optimizer compares names of types.
torch.Tensor.type = _as_cuda  # type: ignore[method-assign]
