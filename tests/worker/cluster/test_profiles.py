"""Steps and processes that are profiled, and the report at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from record_cases import job

from rljob_worker.cluster.calls import Calls
from rljob_worker.cluster.groups import EngineGroup, TrainerGroup
from rljob_worker.cluster.profiles import Profiles
from rljob_worker.devices.profiling import ProfileOrder, ProfileResult
from rljob_worker.errors import ProcessDiedError, UserError
from rljob_worker.records.profile_request import BusyError, ProfileRequest


class Process:
    """Makes a profile of an order at once, where `takes` says so."""

    def __init__(self) -> None:
        self.orders: list[ProfileOrder | None] = []
        self.size = 1000
        self.takes = True
        self._order: ProfileOrder | None = None

    def beside(self, method: Callable[..., object], order: ProfileOrder | None) -> list[ProfileResult]:
        before, self._order = self._order, order
        self.orders.append(order)
        return [ProfileResult(before.file, self.size)] if before is not None and self.takes else []


class Gatherer:
    def gather(self, what: str, calls: Sequence[object], seconds: float) -> Sequence[object]:
        return calls


CALLS = cast(Calls, Gatherer())
Made = tuple[Profiles, list[Process], list[dict[str, Any]]]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make(tmp_path)


def make(folder: Path, **profile: Any) -> Made:
    processes, told = [Process(), Process()], list[dict[str, Any]]()
    records = {"profile": profile} if profile else {}
    profiles = Profiles(
        job(records=records).spec,
        folder,
        cast(TrainerGroup, processes[:1]),
        cast(EngineGroup, processes[1:]),
        lambda event, **more: told.append({"event": event, **more}),
    )
    return profiles, processes, told


def steps(process: Process) -> list[str]:
    return [Path(order.file).parent.name for order in process.orders if order is not None]


def test_the_steps_of_the_manifest_are_profiled_and_told(tmp_path: Path) -> None:
    profiles, (trainer, engine), told = make(tmp_path, firstStep=3, steps=2, engines=[])
    for done in range(6):
        profiles.at_boundary(done, CALLS)
    assert steps(trainer) == ["step-3", "step-4"]
    assert engine.orders == []
    assert trainer.orders.count(None) >= 1, "the last one is no standing order"
    [event] = told
    assert (event["event"], event["first"], event["last"]) == ("profiled", 3, 4)
    assert event["files"] == ["profiles/step-3/rank-0.json.gz", "profiles/step-4/rank-0.json.gz"]
    assert event["problems"] == {}


def test_a_resume_that_has_the_steps_behind_it_says_nothing(tmp_path: Path) -> None:
    profiles, (trainer, _), told = make(tmp_path, firstStep=3, steps=2)
    profiles.at_boundary(7, CALLS)
    assert (trainer.orders, told) == ([], [])
    profiles.request(ProfileRequest(9, 9))


def test_nothing_is_called_where_nothing_is_asked_for(made: Made) -> None:
    profiles, processes, told = made
    profiles.at_boundary(1, CALLS)
    assert [process.orders for process in processes] == [[], []]
    assert told == []


def test_a_second_request_is_refused_until_the_first_is_done(made: Made) -> None:
    profiles, (trainer, engine), told = made
    profiles.at_boundary(1, CALLS)
    profiles.request(ProfileRequest(3, 3))
    with pytest.raises(BusyError, match="a profile of steps 3 to 3 is not done"):
        profiles.request(ProfileRequest(9, 9))
    for done in (2, 3):
        profiles.at_boundary(done, CALLS)
    assert len(told) == 1
    profiles.request(ProfileRequest(5, 5))
    profiles.at_boundary(4, CALLS)
    assert steps(trainer) == steps(engine) == ["step-3", "step-5"]


def test_what_cannot_be_profiled_is_named(made: Made, tmp_path: Path) -> None:
    profiles, _, _ = made
    profiles.at_boundary(4, CALLS)
    for request, said in (
        (ProfileRequest(4, 4), "step 4 is over; the run is at step 5"),
        (ProfileRequest(6, 6, ranks=(1,)), "ranks: there is no 1; the job has 0 to 0"),
        (ProfileRequest(6, 6, engines=(0, 7)), "engines: there is no 7; the job has 0 to 0"),
        (ProfileRequest(6, 6, (), ()), "names neither ranks nor engines"),
    ):
        with pytest.raises(UserError, match=said):
            profiles.request(request)
    with pytest.raises(UserError, match=r"spec\.records\.profile: ranks: there is no 2"):
        make(tmp_path, firstStep=1, ranks=[2])


def test_the_byte_limit_ends_a_request(made: Made) -> None:
    profiles, (trainer, engine), told = made
    trainer.size = engine.size = 600
    profiles.request(ProfileRequest(1, 50, most_bytes=2000))
    for done in range(5):
        profiles.at_boundary(done, CALLS)
    assert steps(trainer) == ["step-1", "step-2"], "800 bytes are left for the second one"
    assert [order.most_bytes for order in trainer.orders if order] == [1000, 400]
    assert told[0]["notes"] == ["the byte limit was reached"]


def test_a_profile_that_is_never_made_does_not_hold_the_next_request_up(made: Made) -> None:
    profiles, (trainer, _), told = made
    trainer.takes = False
    profiles.request(ProfileRequest(1, 1))
    for done in range(4):
        profiles.at_boundary(done, CALLS)
    assert told[0]["files"] == ["profiles/step-1/engine-0.json.gz"]
    assert told[0]["problems"] == {"profiles/step-1/rank-0.json.gz": "its process made none"}
    profiles.request(ProfileRequest(9, 9))


def test_a_dead_process_ends_the_request_and_not_the_run(made: Made) -> None:
    profiles, _, told = made

    class Dead:
        def gather(self, *_: object) -> None:
            raise ProcessDiedError("trainer-0 died", "trainer-0")

    profiles.request(ProfileRequest(1, 1))
    profiles.at_boundary(0, cast(Calls, Dead()))
    assert len(told) == 1
    profiles.request(ProfileRequest(2, 2))
