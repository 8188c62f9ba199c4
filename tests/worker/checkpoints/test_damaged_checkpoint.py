"""Disks that lose, refuse or tear what a real run writes: nothing that was saved is lost, to the same bits."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest
from jobs import events, final_state, manifest, run
from support.disk_faults import Fault

from rljob_worker.records.steps import effective_steps, read_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_bit_flip_a_full_disk_and_a_torn_record_cost_steps_and_nothing_else(tmp_path: Path) -> None:
    job = manifest(tmp_path, steps=6, checkpoint={"everySteps": 2, "keep": 3})
    folder = tmp_path / "run"
    saved = folder / "checkpoints"
    code, output = run("run", job, "--output", folder)
    assert code == 0, output
    calm = final_state(folder)

    newest = saved / "step-6" / "rank-00000.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 4
    newest.write_bytes(content)
    full = Fault(saved, 2, errno.ENOSPC, calls="write", contains=".a2.incomplete/rank-", forever=True)
    code, output = run("run", job, "--output", folder, "--resume", environment=full.environment(tmp_path / "full"))
    assert code == 1, output
    assert (tmp_path / "full").exists(), output
    aside = saved / "step-6.damaged"
    assert f"damaged checkpoint set aside as {aside}, the one before is used: " in output
    assert "its content is not what was written" in output
    assert (aside / newest.name).read_bytes() == content
    room = rf"No space left on device \({len(content)} bytes wanted, \d+ bytes free\): "
    assert re.search(rf"{room}'{saved}/step-6\.a2\.incomplete/rank-", output), output
    assert sorted(path.name for path in saved.glob("step-*")) == ["step-2", "step-4", "step-6.damaged"]

    # As a version that wrote no checksum of driver.json left them.
    for seal in saved.glob("step-?/driver.json.xxh3"):
        seal.unlink()
    code, output = run("run", job, "--output", folder, "--resume")
    assert code == 2, output
    assert f"{saved}/step-4: has no driver.json.xxh3" in output
    torn = Fault(folder, 1, errno.ENOSPC, calls="write", contains="/steps.jsonl", short=True)
    resume = ("--resume", "--trust-unverified")
    code, output = run("run", job, "--output", folder, *resume, environment=torn.environment(tmp_path / "torn"))
    assert code == 0, output
    assert (tmp_path / "torn").exists(), output
    assert [event["restored"] for event in events(folder) if event["event"] == "ready"] == [0, 4, 4]
    (told,) = [event for event in events(folder) if event["event"] == "checkpoint_set_aside"]
    assert told["folder"] == str(aside)
    (told,) = [event for event in events(folder) if event["event"] == "checkpoint_unverified"]
    assert (told["folder"], told["restored"]) == (str(saved / "step-4"), 4)
    assert f"{saved}/step-4 is used as it is: it has no checksum of its own" in output
    assert final_state(folder) == calm
    records = read_steps(folder)
    assert [(record.index, record.step, record.attempt) for record in records] == [
        *((step - 1, step, 1) for step in range(1, 7)),
        *((6, 5, 2), (7, 5, 4), (8, 6, 4)),
    ]
    assert [record.step for record in effective_steps(records)] == [1, 2, 3, 4, 5, 6]
    assert output.count("step records cannot be written, the run goes on without: ") == 1
    assert [event["what"] for event in events(folder) if event["event"] == "write_failed"] == ["step records"]
    assert json.loads((folder / "summary.json").read_text())["write_failures"] == {"step records": 1}
