"""Megatron on each kind of device: what can be seen without one."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from rljob_worker.trainer.megatron.models import megatron_npu
from rljob_worker.trainer.megatron.models.kernels import CausalAttention, CpuCausalAttention, SwiGLU
from rljob_worker.trainer.megatron.models.platforms import megatron_platform

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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, **options: object
) -> tuple[torch.Tensor]:
    """The formula of torch_npu.npu_fusion_attention's reference, for layout SBH and sparse modes with a mask of 2048:
    softmax(scale * q k^T, masked where the mask is true) v.
    """
    assert input_layout == "SBH"
    assert options["sparse_mode"] == 2
    assert options["keep_prob"] == 1.0
    mask = options["atten_mask"]
    assert isinstance(mask, torch.Tensor)
    assert mask.shape == (2048, 2048)
    assert mask.dtype == torch.bool
    length, batch, _ = query.shape
    width = query.shape[2] // head_num
    q, k, v = (t.view(length, batch, -1, width).permute(1, 2, 0, 3) for t in (query, key, value))
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = (q @ k.transpose(-1, -2)) * options["scale"]
    scores = scores.masked_fill(mask[:length, :length], float("-inf"))
    return ((scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2),)


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("torch_npu")
    module.npu_fusion_attention = fusion_attention  # type: ignore[attr-defined]
    module.npu_swiglu = lambda x, dim: F.silu(x.chunk(2, dim)[0]) * x.chunk(2, dim)[1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return module


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_is_the_same_on_all_platforms(scale: float | None) -> None:
    torch.manual_seed(0)
    query = torch.randn(7, 2, 4, 16, requires_grad=True)
    key, value = (torch.randn(7, 2, 2, 16, requires_grad=True) for _ in range(2))
    results = []
    for kind in (CausalAttention, CpuCausalAttention, megatron_npu.FusionAttention):
        out = kind(None, scale)(query, key, value)
        results.append((out, *torch.autograd.grad(out.square().sum(), (query, key, value))))
    for other in results[1:]:
        for expected, actual in zip(results[0], other, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for kind in (CausalAttention, megatron_npu.FusionAttention):
        with pytest.raises(ValueError, match="takes no mask"):
            kind(None)(query, key, value, attention_mask=torch.ones(1))


@pytest.mark.usefixtures("torch_npu")
def test_activation_is_the_same_on_all_platforms() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 8)
    torch.testing.assert_close(megatron_npu.FusedSwiGLU()(inputs), SwiGLU()(inputs))
