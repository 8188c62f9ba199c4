"""Output of `status` and `list`, to the letter."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from plugin_worlds import NOW, job

from rljob_api.phases import PHASES
from rljob_api.safe_text import visible
from rljob_api.wire.step_record import StepRecord
from rljob_operator.plugin.bars import OTHER, Step, draw_phases, draw_steps, progress_bar
from rljob_operator.plugin.rendering import to_yaml
from rljob_operator.plugin.status import PHASE_LOOKS, show_list, show_status
from rljob_operator.plugin.terminal import Style, columns, number, seconds, wrapped

PLAIN = Style(width=80)
GOLDEN = Path(__file__).parent / "status.txt"


def step(number: int, rollout: float = 31.2, checkpoint: float = 0.0, rerun: bool = False) -> Step:
    """A step of the published 8-NPU setup (Qwen3-4B GRPO: sleep, update and wake take 1.6 to 2.3 s)."""
    phases = {
        "rollout": rollout,
        "reward": 0.3,
        "rollout_sleep": 0.31,
        "wake_up": 0.8,
        "ref_log_probs": 1.9,
        "log_probs": 2.2,
        "actor_train": 11.9,
        "checkpoint": checkpoint,
        "rollout_wake_weights": 0.12,
        "update_weights": 1.9,
        "sleep": 0.45,
        "rollout_wake_kv": 0.07,
    }
    return Step(number, sum(phases.values()) + 0.2, phases, rerun)


STEPS = [step(40, rerun=True), step(41, 35.0), step(42, 28.4, checkpoint=6.0), step(43, 33.3), step(44)]
STATUS = {
    "phase": "Running",
    "queue": "rl",
    "restarts": 1,
    "attempt": 1,
    "progress": {
        "step": 44,
        "steps": 300,
        "eta": "3h38m",
        "stepSeconds": 51.15,
        "rewardMean": 0.4123,
        "lastStep": {"step": 44, "seconds": 51.15, "logProbAbsDiff": 0.003127},
        "lastCheckpoint": {"step": 42, "time": "2027-01-15T07:58:10Z"},
    },
    "conditions": [
        {
            "type": kind,
            "status": state,
            "reason": reason,
            "message": message,
            "lastTransitionTime": when,
        }
        for kind, state, reason, message, when in (
            ("Queued", "False", "Admitted", "Kueue has admitted the job.", "2027-01-15T07:02:00Z"),
            ("ClusterReady", "True", "AllPodsReady", "The head and 2 workers are ready.", "2027-01-15T07:05:00Z"),
            ("Running", "True", "DriverReady", "Step 45 runs, in phase rollout.", "2027-01-15T07:52:00Z"),
        )
    ],
    "attempts": [
        {
            "number": 0,
            "startTime": "2027-01-15T07:06:00Z",
            "endTime": "2027-01-15T07:47:00Z",
            "startStep": 0,
            "endStep": 41,
            "reason": "OutOfMemory",
            "message": "Worker pod qwen3-4b-grpo-workers-worker-7qv8d ran out of memory; raise "
            "spec.resources.worker.memory.",
            "exitCode": 1,
            "counted": True,
        },
        {"number": 1, "startTime": "2027-01-15T07:48:00Z", "startStep": 39},
    ],
    "goodput": {
        "since": "2027-01-15T07:52:00Z",
        "queuedSeconds": 120.0,
        "startingSeconds": 720.0,
        "runningSeconds": 2300.0,
        "usefulSeconds": 2250.0,
        "lostSeconds": 102.3,
        "lostSteps": 2,
    },
}


def test_the_whole_status_as_it_is_printed() -> None:
    view = replace(job(STATUS), created=NOW - 3600)
    text = "\n".join(show_status(view, STEPS, "The last 5 of 46 step records", NOW, PLAIN)) + "\n"
    assert text == GOLDEN.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [40, 60, 80, 132, 200])
def test_it_fits_the_width_and_colours_change_no_letter(width: int) -> None:
    view = job(STATUS)
    plain = show_status(view, STEPS, "The last steps", NOW, Style(width=width))
    coloured = show_status(view, STEPS, "The last steps", NOW, Style(width=width, colours="256"))
    bare = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in coloured]
    if width >= 80:
        assert max(map(len, plain)) <= width
    shades = str.maketrans("▓▒░▚▞▟·", "█" * 7)
    without_note = [line.replace("  (all ░)", "").translate(shades) for line in plain]
    assert [line.translate(shades) for line in bare] == without_note
    assert all(line.count("\x1b[0m") * 2 == line.count("\x1b") for line in coloured)


def test_without_unicode_it_is_ascii() -> None:
    view = job(STATUS)
    lines = show_status(view, STEPS, "The last steps", NOW, Style(unicode=False))
    assert "\n".join(lines).isascii()
    assert any("###" in line and "===" in line and "---" in line for line in lines)


def test_bars_are_as_long_as_their_steps() -> None:
    lines = draw_steps([step(1), step(2, 82.35)], PLAIN)
    lengths = [len(line.split(" s  ")[1]) for line in lines]
    assert lengths[1] == 80 - 2 - 13
    assert lengths[0] / lengths[1] == pytest.approx(0.5, abs=0.02)


numbers = st.floats(0, 3e4, allow_nan=False)


@given(
    phases=st.dictionaries(st.sampled_from([*PHASES, "new_phase"]), numbers), rest=numbers, width=st.integers(40, 300)
)
def test_any_step_can_be_drawn(phases: dict[str, float], rest: float, width: int) -> None:
    drawn = Step(7, sum(phases.values()) + rest, phases)
    style = Style(width=width)
    assert all(len(line) <= max(width, 60) for line in [*draw_steps([drawn], style), *draw_phases([drawn], style)])
    assert list(drawn.parts)[-1] == OTHER
    assert sum(drawn.parts.values()) == pytest.approx(drawn.seconds)


def test_nothing_to_draw_draws_nothing() -> None:
    assert draw_steps([], PLAIN) == draw_phases([], PLAIN) == []
    assert progress_bar(2.0, PLAIN, 4) == "[████]"
    assert progress_bar(-1.0, PLAIN, 4) == "[····]"


def test_a_job_with_nothing_but_a_spec() -> None:
    lines = show_status(job({}), [], "", NOW, PLAIN)
    assert lines[0] == "RLJob rl/qwen3-4b-grpo: not seen by the operator yet"
    assert len(lines) == 2


def test_a_broken_spec_is_shown_with_its_problem() -> None:
    view = replace(job({"phase": "Pending"}), spec=None, problem="spec.steps: 0: is too small")
    assert "spec.steps: 0: is too small" in "\n".join(show_status(view, [], "", NOW, PLAIN))


def test_a_list_takes_odd_objects() -> None:
    item = {"metadata": {"namespace": "rl", "name": "a", "creationTimestamp": "2027-01-15T07:59:00Z"}}
    lines = columns(show_list([item, {**item, "status": {"phase": "Queued"}, "spec": {"steps": 3}}], True, NOW), PLAIN)
    assert [line.split() for line in lines[1:]] == [
        ["rl", "a", "-", "-", "-", "-", "-", "-", "-", "1m"],
        ["rl", "a", "Queued", "-", "3", "-", "-", "-", "-", "1m"],
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "-"),
        (0.0004, "0 ms"),
        (0.012, "12 ms"),
        (0.0996, "0.10 s"),
        (0.314, "0.31 s"),
        (9.996, "10.0 s"),
        (312, "312 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


def test_number() -> None:
    assert [number(None), number(0.41234), number(1234.0)] == ["-", "0.412", "1.23e+03"]


def test_what_a_terminal_would_obey_is_shown() -> None:
    assert visible("a\x1b[2Jb\tc\nd‮é中") == "a\\x1b[2Jb\tc\nd\\u202eé中"
    assert wrapped("a\x07 b", PLAIN, "  ") == ["  a\\x07 b"]


def test_phases_of_a_driver_and_rows_of_a_status_are_shown_and_not_obeyed() -> None:
    hostile = "x\x1b[2J\u202e\nRLJob: Succeeded"
    record = StepRecord(1, 1, 0.0, 9.0, {hostile: 8.0}, 1.0, 1.9, metrics={})
    lines = [*draw_phases([Step.from_record(record)], PLAIN), *columns([[hostile, hostile]], PLAIN)]
    assert not [line for line in lines if visible(line) != line or line.startswith("RLJob") or "\n" in line]


@pytest.mark.parametrize("value", ["a\u202e\x9b\x1b", "plain 日本"])
def test_yaml_says_the_same_and_holds_nothing_that_is_obeyed(value: str) -> None:
    text = to_yaml({"a": [value]})
    assert yaml.safe_load(text) == {"a": [value]}
    assert visible(text) == text
    assert ("日本" in text) == ("日本" in value)


def test_the_style_of_a_stream() -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    terminal = Terminal(io.BytesIO(), encoding="UTF-8")
    wide = {"COLUMNS": "100"}
    assert Style.of(terminal, wide) == Style(100, "standard")
    assert Style.of(terminal, wide | {"TERM": "xterm-256color"}).colours == "256"
    assert Style.of(terminal, wide | {"COLORTERM": "truecolor"}).colours == "truecolor"
    assert not Style.of(terminal, {"NO_COLOR": "1"}).colour
    assert not Style.of(terminal, {"TERM": "dumb"}).colour
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert Style.of(pipe, wide) == Style(100, unicode=False)
    assert not Style.of(pipe, {"FORCE_COLOR": "1"}).colour, "nothing that is piped has colours"
    assert Style.of(terminal, {"COLUMNS": "10"}).width == 40


def test_states_are_coloured_as_rljob_colours_them_and_rows_are_aligned_by_what_is_seen() -> None:
    rows = [["NAME", "PHASE", "STEP"], ["日本", "Failed", "1"], ["b", "Running", "2"], ["c", "odd\x1b[2J", "3"]]
    style = Style(80, "standard")
    lines = columns(rows, style, "", heading=True, looks=PHASE_LOOKS)
    assert "\x1b[1mNAME\x1b[0m" in lines[0]
    assert "\x1b[1;31mFailed\x1b[0m" in lines[1]
    assert "\x1b[32mRunning\x1b[0m" in lines[2]
    plain = columns(rows, PLAIN, "", heading=True, looks=PHASE_LOOKS)
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines] == plain
    assert plain[1:3] == ["日本  Failed      1", "b     Running     2"]
    assert r"odd\x1b[2J" in plain[3]
    assert columns([["a", "one " * 60]], Style(50), "  ") == ["  a  " + " ".join(["one"] * 11)] + [
        "     " + " ".join(["one"] * 11)
    ] * 4 + ["     " + " ".join(["one"] * 5)]
