"""Rows with pictures on ranks of which one has text alone: they are in step, and compute what one rank does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from picture_ranks import KIND
from pictures_process import make_model, spec_of, write_rows
from support.warm.protocol import TRAINER
from support.warm.scripts import answer_in, run_script

pytestmark = pytest.mark.slow


def trained_on(ranks: int, folder: Path) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("picture_ranks.py")
    outputs = run_script(TRAINER, script, *([rank, ranks, folder] for rank in range(ranks)))
    return [answer_in(output) for output in outputs]


def test_a_rank_with_text_alone_is_in_step(tmp_path: Path) -> None:
    make_model(spec_of(KIND, write_rows(tmp_path)), tmp_path / "model")
    [one], two = trained_on(1, tmp_path), trained_on(2, tmp_path)
    assert one["seen"] == [True, True, False, False]
    assert [sorted(pair) for pair in zip(*(rank["seen"] for rank in two), strict=True)] == [
        [False, True], [False, True], [False, False], [False, False],
    ]  # fmt: skip
    for rank in two:
        for got, want in zip(rank["metrics"], one["metrics"], strict=True):
            assert got["train/loss"] == pytest.approx(want["train/loss"], abs=1e-6)
            assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=1e-5)
            assert got["train/grad_norm"] > 0
