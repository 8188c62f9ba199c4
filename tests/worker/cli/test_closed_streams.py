"""Commands whose standard streams the shell has closed, or gives what is no text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[3] / "examples/quickstart.yaml"
RLJOB = [sys.executable, "-m", "rljob_worker.cli.main"]


def run(arguments: list[str], redirections: str, given: bytes = b"", **variables: str) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    shell = ["env", *(f"{name}={value}" for name, value in variables.items()), "sh", "-c", f'exec "$@" {redirections}']
    done = subprocess.run([*shell, "sh", *RLJOB, *arguments], input=given, capture_output=True, timeout=120)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_a_manifest_from_a_closed_standard_input_is_none() -> None:
    assert run(["validate", "-"], "<&-") == (2, "", "rljob: standard input holds no manifest\n")


def test_a_game_without_standard_input_has_no_action() -> None:
    code, said, errors = run(["env", "FrozenLake"], "<&-")
    assert (code, errors) == (0, "")
    assert said.endswith("not ended after 0 steps: reward 0\n")


@pytest.mark.parametrize(
    ("redirections", "errors"),
    [("<&-", "rljob: no-such.yaml: "), (">&-", "rljob: no-such.yaml: "), ("<&- >&- 2>&-", "")],
)
def test_an_error_needs_no_other_stream(redirections: str, errors: str) -> None:
    code, said, found = run(["validate", "no-such.yaml"], redirections)
    assert (code, said) == (2, "")
    assert found.startswith(errors)
    assert "Traceback" not in found


def test_a_command_that_prints_may_have_no_output() -> None:
    assert run(["validate", str(QUICKSTART)], "<&- >&-") == (0, "", "")


def test_actions_that_are_no_text_are_played() -> None:
    code, said, errors = run(["env", "FrozenLake"], "", b"\xff\xfe\n", PYTHONIOENCODING="utf-8:strict")
    assert (code, errors) == (0, "")
    assert "step 1: \ufffd\ufffd  ->" in said


def test_an_action_that_no_environment_takes_is_named() -> None:
    code, _, errors = run(["env", "FrozenLake"], "", b"a" * 2_000_000)
    assert (code, errors) == (2, "rljob: an action of 2000000 characters: 1048576 at most\n")
