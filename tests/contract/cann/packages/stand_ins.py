"""A plugin of vLLM's: what an engine's process needs beside the libraries."""

from __future__ import annotations

import ctypes


def install() -> None:
    import graphs

    _compute_fused_on_host()
    _interpret_triton()
    graphs.install()


def _compute_fused_on_host() -> None:
    """The kernel that is registered last is called, and vllm-ascend's library may be loaded after the device was
    begun."""
    import vllm_ascend.vllm_ascend_C  # noqa: F401

    ctypes.CDLL("libkernels.so").compute_fused_on_host()


def _interpret_triton() -> None:
    """The one Triton kernel that vllm-ascend's path needs runs in Triton's own interpreter.

    triton-ascend, which compiles it on a machine with NPUs, is not to be had here, and vLLM takes Triton for absent.
    """
    import triton.language as tl
    import vllm.v1.worker.block_table as block_table
    from triton.runtime.interpreter import InterpretedFunction

    kernel = block_table._compute_slot_mapping_kernel
    if not isinstance(kernel, InterpretedFunction):
        kernel.__globals__["tl"] = tl
        block_table._compute_slot_mapping_kernel = InterpretedFunction(kernel)
