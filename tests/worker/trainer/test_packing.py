"""A row of samples is computed as each of them alone, on real Megatron: GSPO with KL, whose loss is of whole responses.

`make test` draws two cells of the grid, `make test-faults` runs all of them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from packing_ranks import CELLS
from support.samples import ALL, SEED
from test_trainer import launch, write_model

pytestmark = pytest.mark.slow

DRAWN = list(CELLS) if ALL else random.Random(f"{SEED} packing").sample(list(CELLS), 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packing")
    write_model(folder / "dense")
    write_model(folder / "moe", "qwen3_moe")
    write_model(folder / "hybrid", "qwen3_5")
    alone = [name for name in DRAWN if name.startswith("one")]
    together = [name for name in DRAWN if name not in alone]
    launch(folder, "packing", together, (alone[::2], alone[1::2]), (Path(__file__).with_name("packing_ranks.py"),))
    return folder


@pytest.mark.parametrize("cell", DRAWN)
def test_a_row_is_computed_as_its_samples_alone(cell: str, folder: Path) -> None:
    results: list[dict[str, Any]] = [
        torch.load(path, weights_only=False) for path in sorted(folder.glob(f"{cell}.rank-*.pt"))
    ]
    assert len(results) == (1 if cell.startswith("one") else 2)
    for result in results:
        rows, samples = result["rows"], result["samples"]
        assert 1 < rows["micro_batches"] < samples["micro_batches"]
        assert rows["norm"] == pytest.approx(samples["norm"], rel=1e-6)
        assert rows["metrics"] == pytest.approx(samples["metrics"], rel=1e-5, abs=1e-6)
        assert rows["metrics"]["loss"] == pytest.approx(samples["metrics"]["loss"], rel=1e-6, abs=1e-7)
        assert rows["metrics"]["kl_loss"] > 1e-6
        difference = (rows["gradients"] - samples["gradients"]).abs().max()
        assert difference <= 1e-6 * samples["gradients"].abs().max()
        assert rows["log_probs"].keys() == samples["log_probs"].keys()
        for sample, values in samples["log_probs"].items():
            torch.testing.assert_close(rows["log_probs"][sample], values, atol=1e-5, rtol=0)
    assert any(result["rows"]["log_probs"] for result in results)
