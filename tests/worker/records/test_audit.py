"""The audit of prompts: sound runs of any shape pass, and each damage is named."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from rljob_api.wire.prompts_of_step import PromptsOfStep
from rljob_api.wire.step_record import StepRecord
from rljob_api.wire.values import WireError
from rljob_worker.checkpoints.state import DriverState, write_state
from rljob_worker.cli.main import main
from rljob_worker.flow import Decision, Frontier
from rljob_worker.records.audit import audit_prompts
from rljob_worker.records.trajectories import FOLDER
from rljob_worker.trainer.checked_file import CheckedFile


def record(step: int, prompts: PromptsOfStep | None, attempt: int = 1, **fields: Any) -> StepRecord:
    phases = {"rollout": 0.1}
    return StepRecord(step, attempt, 0.0, 0.1, phases, 0.0, 0.0, {}, prompts=prompts, **fields)


def simulated(seed: int, steps: int = 12) -> tuple[list[StepRecord], dict[int, dict[str, Any]]]:
    """Records of a run that fell back now and then, and the ledger after each step that counts."""
    chance = random.Random(seed)
    frontier, records, ledgers, states = Frontier(), [], {}, {0: Frontier().state()}
    step = attempt = 1
    while step <= steps:
        available = [*frontier.open_ordinals, *frontier.open(chance.randint(1, 5))]
        fates = {ordinal: chance.choice("tfo") for ordinal in available}
        trained = [o for o, fate in fates.items() if fate == "t"]
        filtered = [o for o, fate in fates.items() if fate == "f"]
        frontier.close(trained, Decision.TRAINED)
        frontier.close(filtered, Decision.FILTERED)
        block = PromptsOfStep.of(frontier.next, trained, filtered, frontier.open_ordinals)
        records.append(record(step, block, attempt))
        states[step] = ledgers[step] = frontier.state()
        if chance.random() < 0.3:
            step, attempt = chance.randint(max(0, step - 3), step), attempt + 1
            frontier = Frontier.restore(states[step])
        step += 1
    return records, ledgers


@pytest.mark.parametrize("seed", range(25))
def test_a_sound_run_passes_however_often_it_was_restarted(seed: int) -> None:
    records, ledgers = simulated(seed)
    records = [StepRecord.parse({**one.to_json(), "index": i, "rerun": False}) for i, one in enumerate(records)]
    audit = audit_prompts(records)
    last = ledgers[max(ledgers)]
    for step, ledger in ledgers.items():
        audit.check_checkpoint(step, {"ledger": ledger})
    assert audit.findings == []
    assert (audit.trained, audit.filtered, audit.next) == (last["consumed"], last["filtered"], last["next"])
    assert sorted(audit.open) == last["open"]


def block(next_: int, trained: list[int], filtered: list[int] = [], open_: list[int] = []) -> PromptsOfStep:  # noqa: B006
    return PromptsOfStep.of(next_, trained, filtered, open_)


SOUND = [block(4, [0, 1], [2], [3]), block(6, [3, 4], [5]), block(8, [6, 7])]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ({1: block(6, [3, 4, 1], [5])}, ["step 2: prompt 1 was trained, but trained by step 1 already"]),
        ({1: block(6, [3, 4], [5, 2])}, ["step 2: prompt 2 was filtered, but filtered by step 1 already"]),
        (
            {1: block(6, [4], [5])},
            [r"step 2: prompts \[3\] were drawn, and neither trained, filtered, skipped nor left open"],
        ),
        ({2: block(8, [6, 7, 9])}, ["step 3: prompt 9 was trained, but never drawn"]),
        ({2: block(8, [6, 7], [], [5])}, [r"step 3: prompts \[5\] are called open but were closed before"]),
        ({2: block(5, [])}, ["step 3: prompts were drawn up to 5, after 6 before it"]),
        ({1: None}, ["step 2: its record does not say", "step 3: prompt"]),
    ],
)
def test_what_was_taken_twice_or_lost_is_named(damage: dict[int, PromptsOfStep | None], named: list[str]) -> None:
    blocks = [damage.get(i, sound) for i, sound in enumerate(SOUND)]
    findings = audit_prompts([record(i + 1, one) for i, one in enumerate(blocks)]).findings
    for pattern in named:
        assert any(re.match(pattern, finding) for finding in findings), findings


def test_a_step_that_left_no_record_is_named() -> None:
    records = [record(i + 1, one) for i, one in enumerate(SOUND) if i != 1]
    assert any("step 3: its record follows that of step 1" in finding for finding in audit_prompts(records).findings)


def test_steps_of_a_version_that_did_not_number_prompts_are_counted_not_judged() -> None:
    later = [block(34, [32, 33]), block(36, [34, 35])]
    audit = audit_prompts([record(1, None), record(2, None), *(record(i + 3, one) for i, one in enumerate(later))])
    assert (audit.findings, audit.not_numbered, audit.steps, audit.trained) == ([], 2, 2, 36)


@pytest.mark.parametrize("wrong", [{"next": 1}, {"next": 1, "trained": [[2, 1]], "filtered": [], "open": []}, []])
def test_a_block_that_no_driver_wrote_is_refused(wrong: Any) -> None:
    with pytest.raises(WireError, match="prompts"):
        PromptsOfStep.parse(wrong, "prompts")


# --- the command ------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Three steps, a checkpoint after each of the last two and the samples of the first."""
    job = {"metadata": {"name": "a"}, "spec": {"checkpoint": {"path": None}}}
    (tmp_path / "run.json").write_text(json.dumps({"job": job, "attempt": 1, "pid": 1}))
    lines = [{**record(i + 1, one).to_json(), "index": i, "rerun": False} for i, one in enumerate(SOUND)]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, ledger in audit_prompts([record(i + 1, one) for i, one in enumerate(SOUND)]).ledgers.items():
        if step > 1:
            _checkpoint(tmp_path, step, ledger)
    decisions = ["trained", "trained", "filtered", "surplus"]
    _samples(tmp_path, decisions)
    return tmp_path


def _checkpoint(run: Path, step: int, ledger: dict[str, Any]) -> None:
    folder = run / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    files = (CheckedFile("rank-0", 0, xxhash.xxh3_64_hexdigest(b"")),)
    write_state(folder, DriverState(step, step, {"ledger": ledger}, 1, 1, files=files))


def _samples(run: Path, decisions: list[str]) -> None:
    from rljob_api.spec import RecordsSpec
    from rljob_worker.records.trajectories import write_trajectories

    rows = [[{"ordinal": i, "decision": decision}] for i, decision in enumerate(decisions)]
    write_trajectories(run, RecordsSpec(), 1, rows)


def test_the_command_proves_a_sound_run(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run_folder)]) == 0
    out = capsys.readouterr().out
    assert out == (
        "8 prompts: 6 trained, 2 filtered, 0 open; each exactly once (3 steps, 2 checkpoints, 1 file of trajectories)\n"
    )


def _other_ledger(run: Path) -> None:
    _checkpoint(run, 2, {"next": 7, "open": [5], "consumed": 4, "filtered": 2})


def _line_lost(run: Path) -> None:
    lines = (run / "steps.jsonl").read_text().splitlines(keepends=True)
    (run / "steps.jsonl").write_text(lines[0] + lines[2])


def _half_a_file(run: Path) -> None:
    file = next((run / FOLDER).iterdir())
    file.write_bytes(file.read_bytes()[:20])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_other_ledger, r"checkpoint of step 2: open is [5], but [] by the records"),
        (_line_lost, "step 3: its record follows that of step 1"),
        (_half_a_file, "damaged"),
        (lambda run: _samples(run, ["trained", "filtered", "filtered", "surplus"]), "step 1: prompts [1] have another"),
        (
            lambda run: (run / "checkpoints/step-3/driver.json").write_text("{"),
            "its content is not what was written",
        ),
    ],
)
def test_the_command_names_what_is_damaged(
    run_folder: Path, damage: Callable[[Path], Any], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run_folder)
    assert main(["audit", str(run_folder)]) == 1
    assert named in capsys.readouterr().out


def test_a_run_that_numbers_no_prompts_cannot_be_audited(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [replace(record(1, None), index=0)]
    (run_folder / "steps.jsonl").write_text("".join(json.dumps(one.to_json()) + "\n" for one in records))
    assert main(["audit", str(run_folder)]) == 2
    assert "no step whose record says" in capsys.readouterr().err
