"""The operator dies after any write of a life; the one that comes after it brings the job to the same end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from control_plane import ControlPlane
from fault_proxy import FaultProxy
from kube import Object, wait_until
from ray_driver import Attempt
from ray_standin import RayStandIn
from scenarios import Case
from support.samples import drawn

pytestmark = pytest.mark.cluster
TOGETHER = 3
DRAWN = 3
"""Writes that `make test` draws: after all of them an operator dies in the life in which none outlives a write."""
FEWER = 2
"""Writes by which a life may be shorter than another."""
LIFE = [Attempt(exit_code=1, fail_at_step=2), Attempt()]
"""A driver that fails once, so that a restart is part of the life."""


def end_state(case: Case, job: Object) -> Object:
    """The state that must be the same however often the operator died."""
    status = job["status"]
    uid = job["metadata"]["uid"]
    return {
        "phase": status["phase"],
        "restarts": status.get("restarts"),
        "attempts": [(a["number"], a["exitCode"], a["reason"], a["counted"]) for a in _filled(status["attempts"])],
        "submissions": [name.removeprefix(f"rljob-{uid}-") for name in case.submissions()],
        "progress": status["progress"]["step"],
        "records": [record["step"] for record in case.ray.run_of(uid).records],
        "conditions": {(c["type"], c["status"], c["reason"]) for c in status["conditions"]},
    }


def _filled(attempts: list[Object]) -> list[Object]:
    return [{"reason": None, "counted": False, **attempt} for attempt in attempts]


def life_with_deaths(case: Case, deaths: list[int]) -> tuple[Object, int, int]:
    """Live a life in which operators die after so many writes each; return its end, all writes, and how many died."""
    proxy = FaultProxy(case.control_plane)
    proxy.start()
    operator = case.own_operator(proxy)
    waiting, died = list(deaths), 0

    def die() -> None:
        nonlocal died
        died += 1
        operator.kill()

    try:
        if waiting:
            proxy.after_write(waiting.pop(0), die)
        operator.start()
        case.create("steps=4", attempts=LIFE)

        def ended() -> bool:
            if not operator.process.running:
                if waiting:
                    proxy.after_write(waiting.pop(0), die)
                operator.spawn()
            return case.status().get("phase") in ("Succeeded", "Failed")

        assert wait_until(ended, 240), case.status()
        assert wait_until(lambda: case.cluster() is None or not operator.process.running, 30)
        if not operator.process.running:
            operator.start()
        assert wait_until(lambda: case.cluster() is None, 30)
        return case.job(), len(proxy.requests(writes=True, namespace=case.namespace)), died
    finally:
        operator.kill()
        proxy.stop()


@pytest.fixture(scope="module")
def undisturbed(control_plane: ControlPlane, ray: RayStandIn) -> tuple[Object, int]:
    """The end of a life without deaths, and how many writes it took."""
    control_plane.use_kuberay("1.6.2")
    case = Case(control_plane, ray, None)
    job, writes, _ = life_with_deaths(case, [])
    case.close()
    return end_state(case, job), writes


def test_a_life_without_deaths(undisturbed: tuple[Object, int]) -> None:
    end, writes = undisturbed
    assert end["phase"] == "Succeeded"
    assert end["submissions"] == ["0", "1"]
    assert 5 <= writes <= 30


def test_killed_after_any_one_write(
    undisturbed: tuple[Object, int], control_plane: ControlPlane, ray: RayStandIn
) -> None:
    expected, writes = undisturbed
    chosen = drawn("writes", range(1, writes + 1), DRAWN)
    reached: set[int] = set()

    def die_after(number: int) -> str:
        case = Case(control_plane, ray, None)
        try:
            job, made, died = life_with_deaths(case, [number])
        except AssertionError as error:
            return f"killed after write {number}: {error}"
        found = end_state(case, job)
        case.close()
        if died:
            reached.add(number)
        elif made >= number:
            return f"the operator was not killed after write {number} of {made}"
        differ = {key: (found[key], value) for key, value in expected.items() if found[key] != value}
        return f"killed after write {number}: {differ}" if differ else ""

    with ThreadPoolExecutor(TOGETHER) as pool:
        wrong = list(filter(None, pool.map(die_after, chosen)))
    assert wrong == []
    # A status is written at most so often: how many writes a life takes depends on its pace.
    assert reached >= {number for number in chosen if number <= writes - FEWER}, (reached, writes)


def test_killed_after_every_write(
    undisturbed: tuple[Object, int], control_plane: ControlPlane, ray: RayStandIn
) -> None:
    case = Case(control_plane, ray, None)
    job, writes, died = life_with_deaths(case, [1] * 40)
    assert died >= undisturbed[1] - FEWER, (died, writes)
    assert end_state(case, job) == undisturbed[0]
    case.close()
