"""Megatron's flat parameter and gradient buffers, where they can sleep."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from rljob_worker.memory.sleeping import Region
from rljob_worker.upstream.megatron_types import Bucket, Buffer, DistributedDataParallel


def move_buffers(
    ddp: DistributedDataParallel,
    region: Region,
    empty_cache: Callable[[], None],
    parameters: Callable[[], AbstractContextManager[object]] | None = None,
) -> list[Tensor]:
    """Put Megatron's flat parameter and gradient buffers into the memory saver; returns those of the parameters, zeros.

    Megatron allocates both in one constructor, but only parameters need their content kept during sleep. Its own are
    given back before the new ones are made: never are there two of them on the device. So call before weights are
    loaded, and before the optimizer is built, which takes views of the parameters.

    Args:
        ddp: has the buffers.
        region: of the memory saver.
        empty_cache: gives back what is unused of the device.
        parameters: context in which those of the parameters are made; None: in a region that keeps them asleep.
    """
    buffers = ddp.buffers + ddp.expert_parallel_buffers
    devices = [buffer.param_data.device for buffer in buffers]
    shapes = {param: param.shape for buffer in buffers for param in buffer.param_index_map}
    lengths = {bucket: bucket.grad_data.numel() for buffer in buffers for bucket in buffer.buckets}
    for buffer in buffers:
        holders: list[Buffer | Bucket] = [buffer, *buffer.buckets]
        for holder in holders:
            holder.param_data, holder.grad_data = holder.param_data.new_empty(0), holder.grad_data.new_empty(0)
        for param in buffer.param_index_map:
            param.data, param.main_grad = param.data.new_empty(0), param.main_grad.new_empty(0)
    empty_cache()
    for buffer, device in zip(buffers, devices, strict=True):
        with region("backup") if parameters is None else parameters():
            param_data = torch.zeros(buffer.numel, dtype=buffer.param_dtype, device=device)
        with region("discard"):
            grad_data = torch.zeros(buffer.numel, dtype=buffer.grad_dtype, device=device)
        buffer.param_data, buffer.grad_data = param_data, grad_data
        for bucket in buffer.buckets:
            span = slice(bucket.offset, bucket.offset + lengths[bucket])
            bucket.param_data, bucket.grad_data = param_data[span], grad_data[span]
        for param, (start, end, _bucket) in buffer.param_index_map.items():
            param.data = param_data[start:end].view(shapes[param])
            param.main_grad = grad_data[start:end].view(shapes[param])
    return [buffer.param_data for buffer in buffers]
