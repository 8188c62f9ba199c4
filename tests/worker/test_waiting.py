"""Waits say what they wait for, and bounded ones end."""

from __future__ import annotations

import threading

import pytest

from rljob_worker import waiting
from rljob_worker.waiting import waiting_for, within


def test_a_long_wait_says_what_for_and_a_short_one_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = threading.Event()
    shown = waiting._say

    def say(sentence: str) -> None:
        shown(sentence)
        said.set()

    monkeypatch.setattr(waiting, "_say", say)
    with waiting_for("nothing"):
        pass
    monkeypatch.setattr(waiting, "QUIET_SECONDS", 0.0)
    with waiting_for("the hub\x1b[2J\n of spec.model", 30.0):
        assert said.wait(20)
    assert capsys.readouterr().err == "rljob: waiting for the hub\\x1b[2J\\n of spec.model (at most 30 s)\n"


def test_work_without_a_deadline_of_its_own_gets_one() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        within(0.05, never.wait)
    never.set()
    assert within(20.0, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(20.0, lambda: dict[str, int]()["x"])
