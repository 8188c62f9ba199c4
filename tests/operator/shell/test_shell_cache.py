"""The cache: the newest state wins, wherever it came from."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_operator.shell.api.resources import JobKey
from rljob_operator.shell.caches.cache import Cache

A = JobKey("n", "a")


def item(version: int, value: str = "v", uid: str = "u", name: str = "o", job: str | None = "a") -> dict[str, Any]:
    meta = {"namespace": "n", "name": name, "uid": uid, "resourceVersion": str(version), "job": job}
    return {"metadata": meta, "value": value}


def cache(told: list[JobKey]) -> Cache[str]:
    def job_of(one: Any) -> JobKey | None:
        return JobKey("n", one["metadata"]["job"]) if one["metadata"]["job"] else None

    return Cache(job_of, lambda one: one["value"], told.append)


def test_an_older_state_does_not_replace_our_own_write() -> None:
    told: list[JobKey] = []
    kept = cache(told)
    kept.learn(item(5, "before"))
    kept.learn(item(7, "ours"), tell=False)
    kept.learn(item(6, "late from the watch"))
    kept.learn(item(7, "ours"))
    assert kept.get("n", "o") == "ours"
    assert kept.version("n", "o") == 7
    assert told == [A]


def test_a_new_version_of_the_same_value_tells_nobody() -> None:
    told: list[JobKey] = []
    kept = cache(told)
    kept.learn(item(5))
    kept.learn(item(6))
    assert told == [A]
    assert kept.version("n", "o") == 6


def test_states_of_a_deleted_object_come_too_late() -> None:
    kept = cache([])
    kept.learn(item(5))
    kept.forget("n", "o", "u")
    kept.learn(item(6))
    assert kept.get("n", "o") is None
    kept.learn(item(7, "made anew", uid="other"))
    kept.forget("n", "o", "u")
    assert kept.get("n", "o") == "made anew"


def test_an_object_that_left_the_selection_may_come_back() -> None:
    kept = cache([])
    kept.learn(item(5))
    kept.forget("n", "o", "u", 6)
    kept.learn(item(5, "late"))
    assert kept.get("n", "o") is None
    kept.learn(item(7, "back"))
    assert kept.get("n", "o") == "back"


def test_values_that_explain_a_failure_stay_known_for_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    def explains_failure(value: str, following: str | None) -> bool:
        return value == "well" and following in (None, "ends")

    kept: Cache[str] = Cache(lambda _: A, lambda one: one["value"], lambda _: None, explains_failure)
    for uid, name in enumerate("xyz"):
        kept.learn(item(5, "begins", uid=str(uid), name=name))
        kept.learn(item(6, "well", uid=str(uid), name=name))
    before = time.monotonic()
    kept.forget("n", "x", "0")
    kept.learn(item(7, "ends", uid="1", name="y"))
    kept.learn(item(8, "well", uid="3", name="z"))  # another object of that name
    lately = kept.lately_of_job(A)
    assert [value for _, value in lately] == ["well"] * 3
    assert all(0 <= age <= time.monotonic() - before for age, _ in lately)
    kept.forget("n", "y", "1")
    assert len(kept.lately_of_job(A)) == 3
    assert kept.lately_of_job(JobKey("n", "b")) == []
    monkeypatch.setattr(time, "monotonic", lambda: before + 32)
    assert kept.lately_of_job(A) == []


def test_after_a_list_only_what_it_showed_and_what_is_newer_stays() -> None:
    told: list[JobKey] = []
    kept = cache(told)
    kept.learn(item(5, uid="1", name="listed"))
    kept.learn(item(6, uid="2", name="gone", job="b"))
    kept.learn(item(9, uid="3", name="written after the list"))
    told.clear()
    kept.keep_only(["1"], 8, None)
    assert kept.get("n", "listed")
    assert kept.get("n", "written after the list")
    assert kept.get("n", "gone") is None
    assert told == [JobKey("n", "b")]
    kept.keep_only([], 100, "another namespace")
    assert kept.get("n", "listed")


def test_an_object_that_changes_its_job_tells_both() -> None:
    told: list[JobKey] = []
    kept = cache(told)
    kept.learn(item(5))
    kept.learn(item(6, job="b"))
    assert kept.of_job(A) == []
    assert kept.of_job(JobKey("n", "b")) == ["v"]
    kept.learn(item(7, job=None))
    assert list(kept.jobs()) == []
    assert told == [A, A, JobKey("n", "b"), JobKey("n", "b")]


@given(st.permutations(range(1, 9)))
def test_any_order_of_arrival_ends_in_the_newest_state(order: list[int]) -> None:
    kept = cache([])
    for version in order:
        kept.learn(item(version, str(version)))
    assert kept.get("n", "o") == "8"
    assert kept.of_job(A) == ["8"]
