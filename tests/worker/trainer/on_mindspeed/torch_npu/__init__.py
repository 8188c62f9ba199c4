"""Functions of torch_npu that MindSpeed and RLJob's NPU layers call, on the CPU.

The fused operators that RLJob calls, or that MindSpeed calls in its place, compute what CANN's documentation says of
them, in torch's own operators. Every other name is there and does nothing: MindSpeed binds hundreds at import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from unittest.mock import MagicMock

import torch
from torch import Tensor

__version__ = "2.10.0.post4"


class _Anything(types.ModuleType):
    """A module that has whatever name it is asked for."""

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        there = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, there)
        return there


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of torch_npu, and of packages that only MindSpeed needs: the image for Ascend has the last one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        mine = name.startswith("torch_npu.") or name.partition(".")[0] in ("torchair", "scipy")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The normed rows, and what they were multiplied by."""
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale).to(x.dtype) * gamma, scale


def npu_rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, *_args: object, **_kwargs: object) -> Tensor:
    """In halves."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """SwiGLU of gate beside up."""
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor,
    scale: float,
    keep_prob: float,
    sparse_mode: int,
    actual_seq_qlen: Sequence[int],
    actual_seq_kvlen: Sequence[int],
) -> tuple[Tensor]:
    """Causal attention of each sequence of a row [T, heads, width]; of the modes only that which RLJob asks for."""
    assert (input_layout, sparse_mode, keep_prob) == ("TND", 2, 1.0)
    assert list(actual_seq_qlen) == list(actual_seq_kvlen)
    assert actual_seq_qlen[-1] == len(query)
    assert query.shape[1] == head_num
    assert atten_mask.shape == (2048, 2048)
    assert bool(atten_mask[0, 1])
    assert not bool(atten_mask[1, 0])
    starts = [0, *actual_seq_qlen[:-1]]
    # [L, heads, width] -> [heads, L, width]
    contexts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(row[start:end].transpose(0, 1).unsqueeze(0) for row in (query, key, value)),
            is_causal=True,
            scale=scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )[0].transpose(0, 1)
        for start, end in zip(starts, actual_seq_qlen, strict=True)
    ]
    return (torch.cat(contexts),)


sys.meta_path.insert(0, _Finder())
sys.modules[__name__].__class__ = _Anything
npu = _Anything("torch_npu.npu")
npu._lazy_call = lambda call, **_: call()  # type: ignore[attr-defined]
npu.current_device = lambda: "cpu"  # type: ignore[attr-defined]
sys.modules["torch_npu.npu"] = npu
torch.npu = npu
