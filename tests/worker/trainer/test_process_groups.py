"""Process groups that go when the trainers sleep: real Megatron and gloo in several processes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from group_ranks import DEADLINE
from support.ports import free_port
from support.samples import drawn
from support.warm.protocol import TRAINER
from support.warm.scripts import run_script
from test_trainer import write_model

pytestmark = pytest.mark.slow


TRAINING = drawn("groups of a layout", ["tp2:2", "pp2:2", "dp2:2", "tp2_pp2:4"])
WHERE = ["before release", "while released", "while rebuilding"]
FAULTS = drawn("groups of ranks that die", [f"{where}/{victim}:3" for where in WHERE for victim in (0, 1)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups")
    write_model(folder / "dense")
    script = Path(__file__).with_name("group_ranks.py")
    cases = [f"{case}:{free_port()}" for case in ("states:4", "stuck:2", "foreign:2", *FAULTS, *TRAINING)]
    (said,) = run_script(TRAINER, script, [folder, *cases], seconds=550)
    (folder / "log").write_text(said)
    return folder


def seen(case: str, folder: Path, dead: int | None = None) -> list[dict[str, Any]]:
    """Results of the ranks; the one that is to die must have died."""
    result = json.loads((folder / f"{case.replace('/', '-')}.json").read_text())
    wanted = [9 if rank == dead else 0 for rank in range(len(result["codes"]))]
    assert result["codes"] == wanted, (folder / "log").read_text()[-3000:]
    return [rank for rank in result["ranks"] if rank is not None]


@pytest.mark.parametrize("case", [case.partition(":")[0] for case in TRAINING])
def test_training_goes_on_bit_for_bit_and_nothing_grows(case: str, folder: Path) -> None:
    for rank in seen(case, folder):
        assert rank["equal"], rank
        assert rank["changed"], rank
        assert rank["after"]["descriptors"] <= rank["settled"]["descriptors"], rank
        assert rank["after"]["threads"] <= rank["settled"]["threads"], rank


def test_states(folder: Path) -> None:
    for number, rank in enumerate(seen("states", folder)):
        assert rank["states"] == ["LIVE", "RELEASED"]
        assert rank["idle"] == [0.0, 0.0]
        assert rank["took"] > 0
        assert ", given up while the trainer sleeps>" in rank["asleep"]
        assert rank["gone"]
        assert rank["replaced"]
        assert rank["value"] == (1.0 if number < 2 else 5.0)
        assert rank["unknown"].startswith("JobError: process groups: late (")
        assert "releaseProcessGroups to false" in rank["unknown"]


def test_a_place_that_cannot_be_changed_is_an_error(folder: Path) -> None:
    for rank in seen("stuck", folder):
        assert "held by a tuple" in rank["message"]
        assert rank["state"] == "BROKEN"


def test_a_group_that_an_unknown_package_keeps_is_an_error_that_names_it(folder: Path) -> None:
    for rank in seen("foreign", folder):
        assert re.search(
            r"held by a Holder of \w+; only megatron, mindspeed, rljob_worker may hold one", rank["message"]
        )
        assert rank["state"] == "BROKEN"
        assert rank["kept"]


@pytest.mark.parametrize("case", [case.partition(":")[0] for case in FAULTS])
def test_a_rank_that_dies_ends_the_others_in_time(case: str, folder: Path) -> None:
    where, victim = case.partition("/")[0], int(case.partition("/")[2])
    ranks = seen(case, folder, dead=victim)
    for rank in ranks:
        assert rank["message"].startswith("JobError: process groups: re"), rank
        # Gloo's own patience while ranks connect is five times the deadline.
        assert rank["seconds"] < (5 if where == "while rebuilding" else 1) * DEADLINE + 6, rank
        assert rank["state"] == "BROKEN"
        assert "is not allowed while BROKEN" in rank["again"]
    if victim != 0 and where != "while rebuilding":
        named = ["trainer-1 did not come within" in rank["message"] for rank in ranks]
        # Whoever gives up first ends, and if that is rank 0 the others may hear of it before their own deadline.
        followed = ["trainer-0 has ended" in rank["message"] for rank in ranks]
        assert any(named), ranks
        assert all(one or other for one, other in zip(named, followed)), ranks
