"""`rljob validate` of a manifest with environments: each is tried as a job would try it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rljob_worker.cli.main import main

GAMES = """
import random, time
from pathlib import Path

class Fine:
    def reset(self, *, seed, options):
        return f"seed {seed}", {}
    def step(self, action):
        return "on", 0.0, False, False, {}

class Long(Fine):
    def step(self, action):
        return "on " * 40, 0.0, False, False, {}

class Numbers(Fine):
    def step(self, action):
        return 3, 0.0, False, False, {}

class NoAction(Fine):
    def step(self):
        return "", 0.0, False, False, {}

class Deaf(Fine):
    examples = ("go",)
    def step(self, action):
        return "", 0.0, False, False, {"valid": 0}

class Hangs(Fine):
    def step(self, action):
        time.sleep(600)

class Global(Fine):
    def reset(self, *, seed, options):
        random.seed(seed)
        return "begin", {}
    def step(self, action):
        return str(random.random()), 0.0, False, False, {}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "games.py").write_text(GAMES)
    (tmp_path / "torn.py").write_text("import no_such_module\nclass Game: ...\n")
    monkeypatch.chdir(tmp_path)

    def written(environment: dict[str, Any], data: dict[str, Any] | None = None, **spec: Any) -> str:
        job = {
            "apiVersion": "rljob.dev/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": "played"},
            "spec": {
                "steps": 1,
                "model": {"random": {"config": {"model_type": "qwen3"}}},
                "data": {"seeds": {"first": 40, "count": 100}, "environment": environment, **(data or {})},
                "episodes": {"maxTurns": 3, "maxTokens": 60},
                "reward": {"name": "environment"},
                "rollout": {"promptsPerStep": 2, "samplesPerPrompt": 2, "maxResponseTokens": 2},
                "resources": {"profile": "cpu"},
                **spec,
            },
        }
        (tmp_path / "job.json").write_text(json.dumps(job))
        return str(tmp_path / "job.json")

    return written


def test_one_that_is_right_is_tried_and_shown(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lake = {"name": "FrozenLake", "args": {"size": 2, "instructions": False}}
    assert main(["validate", write(lake, {"applyChatTemplate": True})]) == 0
    said = capsys.readouterr().out
    assert "spec.data.environment: FrozenLake was tried: it answers resets and steps\n" in said
    assert "first prompt of seed 40, spec.data, 6 tokens: " in said
    assert "<|user|> P _ O G <|assistant|>" in said
    assert "label" not in said


def test_code_that_is_not_here_is_told(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", write({"python": "/of/an/image/game.py:Game"})]) == 0
    said = capsys.readouterr().out
    assert "game.py:Game is tried when the job starts: spec.data.environment.python: /of/an/image/game.py does" in said
    assert main(["validate", write({"python": "./nowhere.py:Game"})]) == 2
    assert "spec.data.environment.python: ./nowhere.py: there is no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"python": "./games.py:Fin"}, r"^spec.data.environment.python: .*games.py has no 'Fin'; did you mean Fine"),
        ({"python": "./torn.py:Game"}, "module .* does not import: ModuleNotFoundError: .*no_such_module"),
        ({"python": "./games.py:Numbers"}, r"seed 40, step 1: step: step returned the observation 3 \(int\)"),
        ({"python": "./games.py:NoAction"}, r"games.py:NoAction' is called as step\(action\), which fails: too many"),
        ({"python": "./games.py:Deaf"}, "the pattern of its actions never matches: it does not take 'go'"),
        ({"python": "./games.py:Global"}, "two episodes disturb each other: with seed 40 and the same actions, step 1"),
        (
            {"python": "./games.py:Hangs", "stepSeconds": 0.3},
            r"seed 40, step 1: step gave no answer within environment.stepSeconds \(0.3 s\)",
        ),
        ({"python": "./games.py:Fine", "args": {"size": 3}}, "spec.data.environment.args: .* which fails: .*"),
        ({"name": "FrozenLake", "args": {"size": 99}}, "^spec.data.environment.args.size: "),
        ({"name": "FrozenLake", "args": {"size": "4"}}, "^spec.data.environment.args.size: .* valid integer"),
        ({"name": "FrozenLake", "args": {"holes": "0.2"}}, "^spec.data.environment.args.holes: .* valid number"),
        ({"name": "FrozenLake", "args": {"slippery": 1}}, "^spec.data.environment.args.slippery: .* valid boolean"),
        ({"name": "Sokoban", "args": {"boxes": 1.0}}, "^spec.data.environment.args.boxes: .* valid integer"),
        ({"gymnasium": {"id": "FrozenLake-v1", "kwargs": {"map_name": "9x9"}}}, "'FrozenLake-v1' cannot be made: Key"),
        ({"python": "./games.py:Fine", "processes": 1, "perProcess": 3}, r"perProcess: 4 episodes .* hold 3 env"),
    ],
)
def test_one_that_cannot_be_used_is_refused_by_its_field(
    write: Any, capsys: pytest.CaptureFixture[str], environment: dict[str, Any], message: str
) -> None:
    assert main(["validate", write(environment)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    refusal = next(line for line in said.err.splitlines() if line.startswith("rljob: spec.")).removeprefix("rljob: ")
    assert refusal.startswith("spec.data.environment")
    assert re.search(message, refusal), refusal


@pytest.mark.parametrize(
    ("environment", "template", "tokens", "message"),
    [
        (
            "Fine",
            "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %} {{ 'END' }}{% endif %} {% endfor %}",
            60,
            "spec.data.applyChatTemplate: the chat template: closes an answer with 'END'",
        ),
        (
            "Fine",
            "{% for m in messages %}{{ m.content }} {{ messages | length }} {% endfor %}",
            60,
            "the chat template: what a turn appends depends on what was said before: ",
        ),
        (
            "Fine",
            "{% for m in messages if m.role != 'assistant' %}{{ m.content }} {% endfor %}",
            60,
            "the chat template: drops what the assistant said before",
        ),
        ("Fine", None, 3, "spec.episodes.maxTokens: 3, and spec.data.environment begins with 4 tokens, which leaves"),
        (
            "Long",
            None,
            20,
            "spec.data.environment begins with 4 tokens and answers with 42, which leaves no room for a ",
        ),
    ],
)
def test_turns_that_a_stream_cannot_follow_are_refused(
    write: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    environment: str,
    template: str | None,
    tokens: int,
    message: str,
) -> None:
    data: dict[str, Any] = {"applyChatTemplate": True}
    if template is not None:
        (tmp_path / "turns.jinja").write_text(template)
        data["chat"] = {"templateFile": "./turns.jinja"}
    episodes = {"maxTurns": 3, "maxTokens": tokens, "maxTokensPerTurn": 1}
    assert main(["validate", write({"python": f"./games.py:{environment}"}, data, episodes=episodes)]) == 2
    assert message in capsys.readouterr().err
