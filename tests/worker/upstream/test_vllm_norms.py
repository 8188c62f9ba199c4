"""vLLM's C++ norms against its definition of them."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.slow


def test_they_are_chosen_for_float32_and_agree_with_the_definition() -> None:
    from vllm.ir.ops import fused_add_rms_norm, rms_norm
    from vllm.platforms import current_platform

    from rljob_worker.upstream.install import install
    from rljob_worker.upstream.patch import Process
    from rljob_worker.upstream.switches import CPU_KERNELS

    install(Process.ENGINE, "cpu")
    current_platform.import_kernels()
    torch.manual_seed(0)
    projected, weight = torch.randn(7, 3 * 64), torch.randn(64)
    strided = projected[:, :128].view(7, 2, 64)
    with rms_norm.set_priority([CPU_KERNELS, "native"]), fused_add_rms_norm.set_priority([CPU_KERNELS, "native"]):
        for x in (strided, strided.contiguous()):
            assert rms_norm.dispatch(x, weight, 1e-6).provider == CPU_KERNELS
            torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm.impls["native"].impl_fn(x, weight, 1e-6))
        x, residual = torch.randn(7, 64), torch.randn(7, 64)
        expected = fused_add_rms_norm.impls["native"].impl_fn(x.clone(), residual.clone(), weight, 1e-6)
        assert fused_add_rms_norm.dispatch(x, residual, weight, 1e-6).provider == CPU_KERNELS
        torch.testing.assert_close(fused_add_rms_norm.maybe_inplace(x, residual, weight, 1e-6), expected)
        low = strided.bfloat16()
        assert rms_norm.dispatch(low, weight.bfloat16(), 1e-6).provider == "native"
        assert rms_norm.dispatch(torch.randn(7, 20), torch.randn(20), 1e-6).provider == "native"
