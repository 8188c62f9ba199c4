"""Lives of a job from a seed, on one virtual clock, network and disk: `RLJOB_LIVES=10000` for as many.

`make test` plays some, `make test-faults` more.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from life import Life
from support.samples import ALL, SEED

LIVES = int(os.environ.get("RLJOB_LIVES", "1000" if ALL else "60"))
FIRST = SEED
MOST_TRIED = 80


def play_all(folder: Path, seeds: Iterable[int]) -> None:
    for seed in seeds:
        place = folder / str(seed)
        place.mkdir()
        try:
            Life(seed, place).live()
        except Exception as error:
            error.add_note(f"again with RLJOB_SEED={seed} RLJOB_LIVES=1")
            raise


@pytest.mark.timeout(7200 if LIVES > 60 else 600)
def test_any_life_keeps_the_invariants(tmp_path: Path) -> None:
    play_all(tmp_path, range(FIRST, FIRST + LIVES))


def nothing(*_: object, **__: object) -> None:
    return None


@pytest.mark.parametrize(
    ("taken_away", "noticed", "first"),
    [
        ("rljob_worker.checkpoints.store.sync_folder", "the newest checkpoint is of step", 0),
        ("rljob_worker.checkpoints.fencing.Claim.check", "two drivers that can commit|was given up committed", 0),
        # In few lives: one of them is the first that is tried, while the code draws as it did.
        ("rljob_operator.shell.api.leader.LeaderElection.check", "writes while", 50),
        ("rljob_worker.records.writer.RecordWriter.recover", "effective_steps", 0),
    ],
    ids=["folders are not synced", "no fence", "no look at the Lease", "records of a checkpoint are left out"],
)
def test_the_invariants_notice_what_is_missing(
    taken_away: str, noticed: str, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taken_away, nothing)
    with pytest.raises(AssertionError, match=noticed):
        play_all(tmp_path, dict.fromkeys([first, *range(MOST_TRIED)]))
