"""A row of samples is computed as each of them alone, whether or not they share their prompts, and whether its output
layer is computed at once or in blocks.

On real Megatron: GSPO with KL, whose loss is of whole responses.

`make test` draws a cell of the grid, `make test-faults` runs all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packing_ranks import CELLS
from support.samples import drawn
from test_trainer import launch, write_model

pytestmark = pytest.mark.slow

DRAWN = drawn("packing", list(CELLS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packing")
    write_model(folder / "dense")
    write_model(folder / "moe", "qwen3_moe")
    write_model(folder / "hybrid", "qwen3_5")
    alone = [name for name in DRAWN if name.startswith("one")]
    together = [name for name in DRAWN if name not in alone]
    launch(
        folder,
        "packing",
        together,
        ([*alone[::2], "rectangles"], [*alone[1::2], "resumed"]),
        (Path(__file__).with_name("packing_ranks.py"),),
    )
    return folder


@pytest.mark.parametrize("cell", DRAWN)
def test_a_row_is_computed_as_its_samples_alone(cell: str, folder: Path) -> None:
    results: list[dict[str, Any]] = [
        torch.load(path, weights_only=False) for path in sorted(folder.glob(f"{cell}.rank-*.pt"))
    ]
    assert len(results) == (1 if cell.startswith("one") else 2)
    largest = max(float(result["samples"]["gradients"].abs().max()) for result in results)
    for result in results:
        assert 1 < result["rows"]["micro_batches"] < result["samples"]["micro_batches"]
        assert ("shared" in result) == ("hybrid" not in cell), "a running state is each sample's own"
        for name in result.keys() & {"rows", "shared", "blocks"}:
            assert_alike(result[name], result["samples"], largest)
            assert (result[name]["shared_segments"] > 0) == (name == "shared")
        if "shared" in result:
            assert torch.equal(result["shared"]["gradients"], result["again"]["gradients"])
    # A group's samples are of one rank where they share their prompt, so whose sample it is differs.
    expected = log_probs(results, "samples")
    assert expected
    for name in results[0].keys() & {"rows", "shared", "blocks"}:
        got = log_probs(results, name)
        assert got.keys() == expected.keys()
        for sample, values in expected.items():
            torch.testing.assert_close(got[sample], values, atol=1e-5, rtol=0)


def log_probs(results: list[dict[str, Any]], name: str) -> dict[str, torch.Tensor]:
    return {sample: values for result in results for sample, values in result[name]["log_probs"].items()}


def test_a_trainer_that_goes_on_computes_the_same_bits(folder: Path) -> None:
    result = torch.load(folder / "resumed.rank-0.pt", weights_only=False)
    assert all(shared > 0 for name in ("whole", "first", "second") for _, shared in result[name])
    assert result["whole"] == result["first"] + result["second"]
    for whole, piece in zip(result["whole weights"], result["second weights"], strict=True):
        assert whole[:4] == piece[:4]
        assert torch.equal(whole[4], piece[4])


def test_the_padded_side_of_the_benchmarks_takes_the_same_step(folder: Path) -> None:
    result = torch.load(folder / "rectangles.rank-0.pt", weights_only=False)
    assert result["rectangles"] == pytest.approx(result["rows"], rel=1e-5, abs=1e-6)


def assert_alike(rows: dict[str, Any], samples: dict[str, Any], largest: float) -> None:
    """Values of one rank; `largest` gradient of all."""
    assert rows["norm"] == pytest.approx(samples["norm"], rel=1e-6)
    assert rows["metrics"] == pytest.approx(samples["metrics"], rel=1e-5, abs=1e-6)
    assert rows["metrics"]["loss"] == pytest.approx(samples["metrics"]["loss"], rel=1e-6, abs=1e-7)
    assert rows["metrics"]["kl_loss"] > 1e-6
    difference = rows["gradients"] - samples["gradients"]
    assert float(difference.norm()) <= 1e-6 * float(samples["gradients"].norm())
    # Two parts of attention that are joined round once more.
    assert float(difference.abs().max()) <= (2e-6 if rows["shared_segments"] else 1e-6) * largest
