"""Reach of a policy's program in the sandbox: attacks from inside, as root, as another user and as in a pod."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_confinement import WHO, confined, needs_landlock
from test_confinement import place as place


@needs_landlock
@pytest.mark.parametrize("who", WHO)
def test_attacks_of_a_program_are_refused(place: Path, who: str) -> None:
    done = confined(place, who, str(place / "code" / "program_runner.py"), str(place), memory=2**30)
    assert done.returncode == 0, done.stderr
    refused, allowed = json.loads(done.stderr.removeprefix("reward | "))
    assert [name for name, error in refused.items() if not error] == []
    assert {name: error for name, error in allowed.items() if error} == {}
    assert len(refused) > 30
    assert not list((place / "tmp").iterdir())
