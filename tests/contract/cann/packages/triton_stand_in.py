"""A plugin of vLLM's: the one Triton kernel that vllm-ascend's path needs runs in Triton's own interpreter.

triton-ascend, which compiles it on a machine with NPUs, is not to be had here, and vLLM takes Triton for absent.
"""

from __future__ import annotations


def interpret() -> None:
    import triton.language as tl
    import vllm.v1.worker.block_table as block_table
    from triton.runtime.interpreter import InterpretedFunction

    kernel = block_table._compute_slot_mapping_kernel
    if not isinstance(kernel, InterpretedFunction):
        kernel.__globals__["tl"] = tl
        block_table._compute_slot_mapping_kernel = InterpretedFunction(kernel)
