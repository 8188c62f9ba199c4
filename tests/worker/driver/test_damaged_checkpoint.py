"""A checkpoint that is not what was written: the one before it is used, to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import events, final_state, manifest, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_bit_flip_costs_steps_and_nothing_else(tmp_path: Path) -> None:
    job = manifest(tmp_path, steps=6, checkpoint={"everySteps": 2, "keep": 3})
    folder = tmp_path / "run"
    code, output = run("run", job, "--output", folder)
    assert code == 0, output
    calm = final_state(folder)

    newest = folder / "checkpoints" / "step-6" / "rank-00000.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 4
    newest.write_bytes(content)
    code, output = run("run", job, "--output", folder, "--resume")
    assert code == 0, output
    aside = folder / "checkpoints" / "step-6.damaged"
    assert f"damaged checkpoint set aside as {aside}, the one before is used: " in output
    assert "its content is not what was written" in output
    assert (aside / newest.name).read_bytes() == content
    assert [event["restored"] for event in events(folder) if event["event"] == "ready"] == [0, 4]
    (told,) = [event for event in events(folder) if event["event"] == "checkpoint_set_aside"]
    assert told["folder"] == str(aside)
    assert final_state(folder) == calm
