"""A flipped bit anywhere in what is read back: it is refused by the file's name, or what is loaded is the same."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import commit, lone_store
from support.flips import flips
from test_replay import PROMPT, step_of

from rljob_api.wire.step_record import StepRecord
from rljob_worker.checkpoints.journal import journal_files, read_journal, write_journal
from rljob_worker.checkpoints.reader import Checkpoints, Found
from rljob_worker.checkpoints.state import DriverState
from rljob_worker.errors import UserError
from rljob_worker.flow import Episode, Group, TokenStream
from rljob_worker.flow.turns import Finish, Opening, Turn
from rljob_worker.host.files import WriteFailures
from rljob_worker.rollouts.step import Step
from rljob_worker.types import Generation


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


def with_turns() -> Step:
    """A step whose samples are episodes: an environment answered once, and ended each."""
    step: Step = step_of(9, 7)
    (group,) = step.groups
    first, second = Turn("Left", "P _ G", -0.1, False, {"valid": 1.0}), Turn("Right", "_ _ V", 1.0, True)
    episodes = []
    for sample in range(2):
        begun = Episode(7, sample, TokenStream.of_prompt([5, 6]), opening=Opening(2**40, "P _ _", {"size": 4.0}))
        said = Generation(np.array([4, 5]), np.array([-0.1, -0.2], np.float32), "stop")
        turned = begun.with_sampled(said, 7).observed(first, [9, 9]).with_sampled(said, 7)
        episodes.append(turned.ended(second, Finish.ENVIRONMENT))
    step.groups[0] = replace(group, episodes=tuple(episodes))
    return step


@pytest.mark.parametrize("step", [step_of(9, 7, 8), with_turns()], ids=["answers", "episodes"])
def test_in_the_journal(tmp_path: Path, step: Step) -> None:
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
