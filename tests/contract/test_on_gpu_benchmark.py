"""`benchmarks/on_gpu.py` where there is no GPU: it says so, and its parts that need none are right."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import on_gpu

    return on_gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_what_it_needs(on_gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert on_gpu.main([]) == 2
    assert "on_gpu.py needs an NVIDIA GPU: " in capsys.readouterr().err


def test_both_sides_of_the_attention_row_compute_the_same(on_gpu: ModuleType) -> None:
    lengths = on_gpu.skewed_lengths(5, 40)
    assert max(lengths) == 40
    assert len(set(lengths)) > 1
    inputs, bounds = on_gpu.row_of(lengths, 4, 2, 32, torch.device("cpu")), on_gpu.bounds_of(lengths)
    found = []
    for attend in (on_gpu.packed, on_gpu.padded_attention):
        context = attend(*inputs, bounds)
        gradients = torch.autograd.grad(context.square().sum(), inputs)
        found.append([context, *gradients])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_part_that_would_end_too_late_is_left_out_and_named(on_gpu: ModuleType) -> None:
    clock = [100.0]
    budget = on_gpu.Budget(240.0, lambda: clock[0])
    assert budget.has("first", 200.0)
    clock[0] = 180.0
    assert not budget.has("second", 161.0)
    assert budget.has("third", 160.0)
    assert budget.left_out == ["second"]


@pytest.mark.parametrize("graphs", [False, True])
def test_the_engine_that_it_starts_is_a_jobs_own(graphs: bool, on_gpu: ModuleType, tmp_path: Path) -> None:
    import json

    from rljob_worker.engine.arguments import engine_arguments

    (tmp_path / "config.json").write_text(json.dumps(on_gpu.model_config(2)))
    arguments = engine_arguments(on_gpu.job(str(tmp_path), graphs=graphs), str(tmp_path))
    assert arguments["enforce_eager"] is not graphs
    assert arguments["enable_sleep_mode"] is True


def test_it_hands_over_all_of_the_models_tensors(on_gpu: ModuleType, tmp_path: Path) -> None:
    """On `meta`: the shapes of the parameters are those of the checkpoint's tensors."""
    import json
    import math

    from weight_sync import shapes_of

    from rljob_worker.models.config import ModelConfig
    from rljob_worker.models.manifest import hf_manifest
    from rljob_worker.parallel_layout import ParallelLayout
    from rljob_worker.trainer.megatron.models.convert import local_pieces

    (tmp_path / "config.json").write_text(json.dumps(on_gpu.model_config(2)))
    config = ModelConfig.from_hf(tmp_path)
    parameters = {name: torch.empty(shape, device="meta") for name, shape in shapes_of(config).items()}
    pieces = local_pieces(parameters, config, ParallelLayout())
    assert {(piece.hf_name, tuple(piece.hf_shape)) for piece in pieces} == set(hf_manifest(config))
    assert sum(map(math.prod, shapes_of(config).values())) == sum(math.prod(piece.shape) for piece in pieces)
    assert all(piece.view is not None for piece in pieces)
