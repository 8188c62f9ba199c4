"""Environments that die, hang, raise or lie in a run: counted as what they are, and nothing is lost or twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from failing_worlds import GROUPS, classes, drawn_faults, failures, job_of, whole_groups
from jobs import events, finish, run, start_faulty
from support.samples import ALL, SEED, unless_all, unless_drawn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

STEPS, FAULTS = (200, 20) if ALL else (7, 2)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("Colocated", marks=unless_drawn("episodes that fail")),
        pytest.param("Async", marks=unless_all("a second mode")),
    ],
)
def test_what_goes_wrong_is_counted_and_loses_nothing(mode: str, tmp_path: Path) -> None:
    folder, faults = tmp_path / "run", drawn_faults(STEPS, FAULTS)
    print(f"RLJOB_SEED={SEED}: {faults}")
    job = job_of(tmp_path, STEPS, mode=mode, step_seconds=1 if ALL else 6)
    code, output = finish(start_faulty(job, folder, faults), seconds=3000)
    assert code == 0, output
    done = classes([event for event in events(folder) if event["event"] == "environment"])
    assert done == classes(faults), "each fault was met"
    assert failures(folder) == done
    samples = whole_groups(folder, range(1, STEPS + 1))
    assert len([sample for sample in samples if sample["turns"][-1].get("error")]) == done["data"]
    code, output = run("audit", folder)
    assert (code, f"{STEPS * GROUPS} trained" in output) == (0, True), output


@unless_all("a job of its own; the share itself is tried in test_episodes_of_turns.py")
@pytest.mark.parametrize("mode", ["Colocated", "Async"])
def test_a_job_whose_environments_fail_too_often_ends_with_the_bound(mode: str, tmp_path: Path) -> None:
    code, output = run("run", job_of(tmp_path, 20, mode=mode, raises=0.1), "--output", tmp_path / "run")
    assert code == 1, output
    assert "spec.data.environment: " in output
    assert "of 16 episodes ended with an error, which is more than spec.episodes.maxErrorShare 0.2" in output
    assert "LookupError: no such way" in output
