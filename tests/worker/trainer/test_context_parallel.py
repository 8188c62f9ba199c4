"""Ranks that divide a row of samples compute what one rank computes of each sample alone.

On real Megatron: GSPO with KL, whose loss is of whole responses, which may lie on several ranks.

`make test` draws a cell of the grid, `make test-faults` runs all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import SAMPLES
from context_ranks import CELLS
from support.samples import ALL, drawn
from support.warm.protocol import TRAINER
from support.warm.scripts import run_script
from test_trainer import write_model

pytestmark = pytest.mark.slow

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4}
SMALL = [cell for cell, (ranks, _, _) in CELLS.items() if ranks <= 4]
DRAWN = list(CELLS) if ALL else drawn("context", SMALL)
SCRIPT = Path(__file__).with_name("context_ranks.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    folder.chmod(0o700)
    write_model(folder / "dense", **SIZES)
    write_model(folder / "moe", "qwen3_moe", **SIZES)
    write_model(folder / "hybrid", "qwen3_5", **SIZES)
    run(folder, 1, sorted({CELLS[cell][1] for cell in DRAWN}))
    for ranks in sorted({CELLS[cell][0] for cell in DRAWN} | {2}):
        run(folder, ranks, [cell for cell in DRAWN if CELLS[cell][0] == ranks] + ["steps"] * (ranks == 2))
    return folder


def run(folder: Path, ranks: int, names: list[str]) -> None:
    run_script(TRAINER, SCRIPT, *([rank, ranks, folder, *names] for rank in range(ranks)))


def results(folder: Path, case: str) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob(f"{case}.rank-*.pt"))]


@pytest.mark.parametrize("cell", DRAWN)
def test_a_divided_row_is_computed_as_its_samples_alone(cell: str, folder: Path) -> None:
    ranks, alone, _ = CELLS[cell]
    (expected,) = results(folder, alone)
    found = results(folder, cell)
    assert len(found) == ranks
    plans = found[0].keys()
    assert plans == {"rows"} | ({"shared"} if alone != "hybrid" else set())
    assert expected["samples"]["micro_batches"] >= SAMPLES // 2 > found[0]["rows"]["micro_batches"]
    gradients, log_probs = joined([expected], "samples"), of_all([expected], "samples")
    assert len(log_probs) == 2 * SAMPLES
    for plan in plans:
        for result in found:
            assert_alike(result[plan], expected["samples"])
            assert (result[plan]["shared_segments"] > 0) == (plan == "shared")
        # The delta rule and two joined parts of attention round once more.
        assert_equal_gradients(joined(found, plan), gradients, 2e-6 if alone == "hybrid" or plan == "shared" else 1e-6)
        got = of_all(found, plan)
        assert got.keys() == log_probs.keys()
        for sample, values in log_probs.items():
            torch.testing.assert_close(got[sample], values, atol=1e-5, rtol=0)


def of_all(found: list[dict[str, Any]], plan: str) -> dict[str, torch.Tensor]:
    return {sample: values for result in found for sample, values in result[plan]["log_probs"].items()}


def joined(found: list[dict[str, Any]], plan: str) -> dict[str, torch.Tensor]:
    """Gradients of whole tensors."""
    whole: dict[str, torch.Tensor] = {}
    for result in found:
        for name, shape, dim, start, values in result[plan]["gradients"]:
            tensor = whole.setdefault(name, torch.full(shape, torch.nan))
            (tensor if dim is None else tensor.narrow(dim, start, values.shape[dim])).copy_(values)
    assert whole
    assert all(bool(tensor.isfinite().all()) for tensor in whole.values()), "a part is on no rank"
    return whole


def assert_alike(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["norm"] == pytest.approx(expected["norm"], rel=1e-6)
    # Sums over tokens of what log-probabilities differ by.
    assert got["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-5)
    assert got["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-6, abs=1e-7)
    assert got["metrics"]["kl_loss"] > 1e-6
    assert abs(got["metrics"]["ppo_kl"]) > 1e-3


def assert_equal_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    flat, reference = (torch.cat([tensors[name].flatten() for name in expected]) for tensors in (got, expected))
    assert float((flat - reference).norm()) <= tolerance * float(reference.norm())
    assert float((flat - reference).abs().max()) <= tolerance * float(reference.abs().max())


def test_a_trainer_that_goes_on_from_a_checkpoint_computes_the_same_bits(folder: Path) -> None:
    found = results(folder, "steps")
    assert len(found) == 2
    for result in found:
        assert result["whole"] == result["first"] + result["second"]
        for whole, second in zip(result["whole state"], result["second state"], strict=True):
            assert torch.equal(whole, second)
