"""Megatron's flat parameter and gradient buffers, where they can sleep."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from rljob_worker.upstream.megatron_types import DistributedDataParallel

Region = Callable[[str], AbstractContextManager[object]]
"""`with region(tag)`: tensors created inside belong to the memory saver under that tag (`backup` or `discard`)."""


def move_buffers(ddp: DistributedDataParallel, region: Region) -> list[Tensor]:
    """Put Megatron's flat parameter and gradient buffers into the memory saver; returns those of the parameters.

    Megatron allocates both in one constructor, but only parameters need their content kept during sleep. Call before
    the optimizer is built: it takes views of the parameters.
    """
    parameters = []
    for buffer in ddp.buffers + ddp.expert_parallel_buffers:
        with region("backup"):
            param_data = torch.zeros(buffer.numel, dtype=buffer.param_dtype, device=buffer.param_data.device)
        with region("discard"):
            grad_data = torch.zeros(buffer.numel, dtype=buffer.grad_dtype, device=buffer.grad_data.device)
        param_data.copy_(buffer.param_data)
        buffer.param_data, buffer.grad_data = param_data, grad_data
        for bucket in buffer.buckets:
            span = slice(bucket.offset, bucket.offset + bucket.grad_data.numel())
            bucket.param_data, bucket.grad_data = param_data[span], grad_data[span]
        for param, (start, end, _bucket) in buffer.param_index_map.items():
            param.data = param_data[start:end].view(param.shape)
            param.main_grad = grad_data[start:end].view(param.shape)
        parameters.append(param_data)
    return parameters
