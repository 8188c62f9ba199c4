"""A flipped bit anywhere in what is read back: it is refused by the file's name, or what is loaded is the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import commit, lone_store
from support.samples import ALL, SEED
from test_replay import PROMPT, step_of

from rljob_api.wire.step_record import StepRecord
from rljob_worker.checkpoints.journal import journal_files, read_journal, write_journal
from rljob_worker.checkpoints.reader import Checkpoints, Found
from rljob_worker.checkpoints.state import DriverState
from rljob_worker.errors import UserError
from rljob_worker.flow import Group
from rljob_worker.host.files import WriteFailures
from rljob_worker.rollouts.step import Step
from rljob_worker.types import Generation

BITS = 1_000_000 if ALL else 400
"""Bits of each file, drawn by seed where it has more."""


def flips(path: Path) -> Iterator[str]:
    """The file with one bit flipped at a time, and as it was at the end."""
    whole = path.read_bytes()
    places = range(8 * len(whole))
    for place in sorted(random.Random(SEED).sample(places, min(BITS, len(places)))):
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        yield f"bit {place % 8} of byte {place // 8} of {path.name}, {whole[place // 8 :][:1]!r}"
    path.write_bytes(whole)


def state(step: int) -> DriverState:
    """A state with all that one can have."""
    records = [StepRecord(step - back, 1, 1.0, 1.0, {"rollout": 0.5}, 1.0, 0.0, metrics={"a": 0.5}) for back in (0, 1)]
    part = Generation(np.array([4, 5]), np.array([-0.1, -0.2], np.float32), "")
    group = Group.begun(7, PROMPT, samples=2, seed=2**61 + 1, version=step).extended({0: part}, step)
    return DriverState(
        step,
        step,
        {"position": 160 * step, "ledger": {"next": 160, "open": [], "consumed": 150, "filtered": 10}},
        1,
        2,
        record=records[0].to_json(),
        earlier_records=(records[1].to_json() | {"index": 0, "rerun": False},),
        carried=(group.as_json(),),
    )


def loaded(found: Found | None) -> Any:
    assert found is not None
    return found.verified, asdict(found.state), [(found.folder / f"rank-{rank}").read_bytes() for rank in range(2)]


@pytest.mark.parametrize("file", ["driver.json", "driver.json.xxh3", "rank-0", "rank-1"])
@pytest.mark.parametrize(("name", "trust"), [("step-3", False), ("step-3.replaced", True)])
def test_in_a_checkpoint(tmp_path: Path, file: str, name: str, trust: bool) -> None:
    store = lone_store(tmp_path, keep=2)
    for step in (2, 3):
        commit(store, state(step))
    (tmp_path / "step-3").rename(tmp_path / name)
    reader = Checkpoints(tmp_path, trust_unverified=trust)
    newest, before = loaded(reader.find_whole()), loaded(reader.find_whole(until=2))
    assert newest != before
    refused = 0
    for where in flips(tmp_path / name / file):
        found = reader.find_whole()
        if loaded(found) == newest:
            continue
        assert found is not None
        assert loaded(found) == before, where
        (passed,) = found.passed_over
        assert f"{name}/driver.json: " in passed.reason or f"{name}/{file}: " in passed.reason, where
        refused += 1
    assert refused > 0
    assert loaded(reader.find_whole()) == newest


def test_in_the_journal(tmp_path: Path) -> None:
    step: Step = step_of(9, 7, 8)
    write_journal(tmp_path, step, 3, WriteFailures())
    path = journal_files(tmp_path)[9]
    whole = repr(read_journal(path))
    refused: list[str] = []
    for where in flips(path):
        try:
            assert repr(read_journal(path)) == whole, where
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all(f"{path}: damaged" in one for one in refused)
