"""Megatron on each kind of device: what can be seen without one."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.attention import by_formula

from rljob_worker.trainer.megatron.models import megatron_npu
from rljob_worker.trainer.megatron.models.kernels import CausalAttention, CpuCausalAttention, SwiGLU
from rljob_worker.trainer.megatron.models.platforms import megatron_platform
from rljob_worker.trainer.packed_attention import attend_on_cuda

ADAPTOR = """
import sys
assert "megatron" not in sys.modules
with open({seen!r}, "a") as file:
    print(*sys.argv[1:], file=file)
"""


def make_packages(folder: Path) -> Path:
    """Packages of the names that activation imports; the adaptor writes down the command line that it sees."""
    for package in ("torch_npu", "mindspeed"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
    (folder / "mindspeed" / "megatron_adaptor.py").write_text(ADAPTOR.format(seen=str(folder / "seen")))
    return folder


def run(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    path = f"import sys; sys.path[:0] = {[str(p) for p in paths]!r}\n"
    return subprocess.run(
        [sys.executable, "-c", path + code, "--some", "argument of Ray"], capture_output=True, text=True, timeout=120
    )


ACTIVATE = """
from rljob_worker.upstream.install import install
from rljob_worker.upstream.patch import Process
install(Process.TRAINER, "npu", "Megatron")
install(Process.TRAINER, "npu", "Megatron")
assert sys.argv[1:] == ["--some", "argument of Ray"], sys.argv
"""


def test_mindspeed_is_activated_once_and_sees_our_command_line_alone(tmp_path: Path) -> None:
    done = run(ACTIVATE, make_packages(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seen").read_text() == "--optimizer-selection=fused_torch_adamw\n"


def test_activation_after_megatron_is_refused(tmp_path: Path) -> None:
    done = run("import megatron.core\n" + ACTIVATE, make_packages(tmp_path))
    assert "MindSpeed must be activated before Megatron is imported, and megatron is there already" in done.stderr
    assert not (tmp_path / "seen").exists()


@pytest.mark.parametrize("missing", ["torch_npu", "mindspeed"])
def test_a_missing_package_is_named(missing: str, tmp_path: Path) -> None:
    (make_packages(tmp_path) / missing / "__init__.py").unlink()
    for file in (tmp_path / missing).iterdir():
        file.unlink()
    (tmp_path / missing).rmdir()
    done = run(ACTIVATE, tmp_path)
    assert f"UserError: {missing} is not installed; use the worker image for Ascend" in done.stderr


def test_a_mindspeed_that_does_not_load_is_explained(tmp_path: Path) -> None:
    (make_packages(tmp_path) / "mindspeed" / "megatron_adaptor.py").write_text("import no_such_library")
    done = run(ACTIVATE + "", tmp_path)
    assert "UserError: mindspeed.megatron_adaptor does not load (No module named 'no_such_library')" in done.stderr


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device 'tpu' is none of cpu, cuda, npu"):
        megatron_platform("tpu")


def fusion_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, **options: Any
) -> tuple[torch.Tensor]:
    """The formula of torch_npu.npu_fusion_attention's reference, for layout TND and sparse modes with a mask."""
    assert input_layout == "TND"
    assert head_num == query.shape[1]
    assert options["sparse_mode"] == 2
    assert options["keep_prob"] == 1.0
    mask = options["atten_mask"]
    assert mask.shape == (2048, 2048)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, torch.ones_like(mask).triu(1))
    ends = options["actual_seq_qlen"]
    assert ends == options["actual_seq_kvlen"]
    assert all(type(end) is int for end in ends)
    return (by_formula(query, key, value, ends, options["scale"]),)


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("torch_npu")
    module.npu_fusion_attention = fusion_attention  # type: ignore[attr-defined]
    module.npu_swiglu = lambda x, dim: F.silu(x.chunk(2, dim)[0]) * x.chunk(2, dim)[1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return module


LENGTHS = {"many": [9, 7, 7, 3, 1], "equal": [6, 6, 6], "one": [11]}


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_of_a_row_is_the_same_on_all_platforms(scale: float | None, lengths: list[int]) -> None:
    torch.manual_seed(0)
    bounds = np.append(0, np.cumsum(lengths)).astype(np.int32)
    query = torch.randn(bounds[-1], 1, 4, 16, requires_grad=True)
    key, value = (torch.randn(bounds[-1], 1, 2, 16, requires_grad=True) for _ in range(2))
    given = query.squeeze(1), key.squeeze(1), value.squeeze(1)
    results = [by_formula(*given, bounds[1:].tolist(), scale or 0.25).flatten(1).unsqueeze(1)]
    params = types.SimpleNamespace(cu_seqlens_q=torch.from_numpy(bounds), cu_seqlens_kv_padded=None)
    for kind in (CausalAttention, CpuCausalAttention, megatron_npu.FusionAttention):
        results.append(kind(None, scale)(query, key, value, packed_seq_params=params))
    upper = torch.randn_like(results[0])
    expected, *others = [(out, *torch.autograd.grad((out * upper).sum(), (query, key, value))) for out in results]
    for other in others:
        torch.testing.assert_close(other, expected, rtol=1e-5, atol=1e-5)
    for kind in (CausalAttention, megatron_npu.FusionAttention):
        with pytest.raises(ValueError, match="takes no mask"):
            kind(None)(query, key, value, attention_mask=torch.ones(1))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_row_of_equal_sequences_is_the_batch_of_them(lengths: list[int]) -> None:
    torch.manual_seed(0)
    shape = (max(lengths), len(lengths))
    batch = [torch.randn(*shape, heads, 16) for heads in (4, 2, 2)]
    row = [tensor.transpose(0, 1).flatten(0, 1).unsqueeze(1) for tensor in batch]
    bounds = torch.arange(len(lengths) + 1) * shape[0]
    params = types.SimpleNamespace(cu_seqlens_q=bounds, cu_seqlens_kv_padded=None)
    got = CpuCausalAttention(None)(*row, packed_seq_params=params)
    expected = CpuCausalAttention(None)(*batch)
    assert torch.equal(got.squeeze(1), expected.transpose(0, 1).flatten(0, 1))


def test_16_bits_on_cuda_go_to_torchs_kernel_for_many_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own signature; its window of (-1, 0) is the causal mask."""
    from torch.nn.attention import varlen

    signature = inspect.signature(varlen.varlen_attn)

    def varlen_attn(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs).arguments
        assert given["window_size"] == (-1, 0)
        starts = given["cu_seq_q"]
        assert torch.equal(starts, given["cu_seq_k"])
        assert starts.dtype == torch.int32
        assert given["max_q"] == given["max_k"] == int(starts.diff().max())
        assert given["query"].shape == given["key"].shape == given["value"].shape
        return by_formula(given["query"], given["key"], given["value"], starts[1:].tolist(), given["scale"])

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    bounds = [0, 9, 16, 23, 26]
    query = torch.randn(26, 4, 16, dtype=torch.bfloat16)
    key, value = (torch.randn(26, 2, 16, dtype=torch.bfloat16) for _ in range(2))
    got = attend_on_cuda(query, key, value, bounds, 0.25)
    torch.testing.assert_close(got, by_formula(query, key, value, bounds[1:], 0.25))


@pytest.mark.usefixtures("torch_npu")
def test_activation_is_the_same_on_all_platforms() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 8)
    torch.testing.assert_close(megatron_npu.FusedSwiGLU()(inputs), SwiGLU()(inputs))
