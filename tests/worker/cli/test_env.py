"""`rljob env`: an environment in the terminal."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rljob_worker.cli.main import main
from rljob_worker.data.tokenizer import CHAT_TEMPLATE

BOARD = ["--args", '{"size": 2, "holes": 0, "instructions": false}']
HOSTILE = """
class Game:
    def reset(self, *, seed, options):
        return "a\\x1b[2J\\u202eb\\nrljob: fine", {}

    def step(self, action):
        if action == "stop":
            raise RuntimeError("\\x1b[2Jno")
        return action, 0.5, False, False, {"\\x1bn": 1}
"""


def test_actions_are_played_to_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "FrozenLake", "--seed", "3", *BOARD, "--actions", "Right", "hm", "Down", "Up"]) == 0
    assert capsys.readouterr().out == (
        "FrozenLake, seed 3\n"
        "  P _\n  _ G\n"
        "step 1: Right  ->  reward 0  valid 1  success 0\n  _ P\n  _ G\n"
        "step 2: hm  ->  reward -0.1  valid 0  success 0\n  _ P\n  _ G\n"
        "step 3: Down  ->  reward 1  valid 1  success 1\n  _ _\n  _ V\n"
        "ended after 3 steps: reward 0.9\n"
    )


def test_the_tokens_of_each_turn_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = ["<unk>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "P", "_", "G", "V", "Right", "Down"]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<eos>", "unk_token": "<unk>", "additional_special_tokens": names[2:5]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=CHAT_TEMPLATE, **special)
    tokenizer.save_pretrained(tmp_path)
    command = ["env", "FrozenLake", *BOARD, "--tokenizer", str(tmp_path), "--actions", "Right", "Down"]
    assert main(command) == 0
    assert capsys.readouterr().out == (
        "FrozenLake, seed 0\n  P _\n  _ G\n  prompt: 6 tokens, '<|user|> P _ _ G <|assistant|>'\n"
        "step 1: Right  ->  reward 0  valid 1  success 0\n  _ P\n  _ G\n"
        "  sampled: 2 tokens, 'Right <eos>'\n  observed: 6 tokens, '<|user|> _ P _ G <|assistant|>'\n"
        "step 2: Down  ->  reward 1  valid 1  success 1\n  _ _\n  _ V\n  sampled: 2 tokens, 'Down <eos>'\n"
        "ended after 2 steps: reward 1\n"
    )
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt_tokens"] == [3, 5, 6, 6, 7, 4]
    assert [step["sampled_tokens"] for step in found["steps"]] == [[9, 1], [10, 1]]
    assert [step["observed_tokens"] for step in found["steps"]] == [[3, 6, 5, 6, 7, 4], []]


def test_actions_come_from_standard_input_line_by_line() -> None:
    command = [sys.executable, "-m", "rljob_worker.cli.main", "env", "FrozenLake", *BOARD, "--json"]
    done = subprocess.run(command, input="Down\n\n", capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert (found["environment"], found["seed"], found["observation"]) == ("FrozenLake", 0, "P _\n_ G")
    assert [step["action"] for step in found["steps"]] == ["Down", ""]
    assert found["steps"][0] == {
        "action": "Down", "observation": "_ _\nP G", "reward": 0.0, "terminated": False, "truncated": False,
        "values": {"valid": 1.0, "success": 0.0},
    }  # fmt: skip
    assert (found["reward"], found["done"], found["failure"]) == (-0.1, False, None)


def test_a_terminal_is_asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("Down\n"))
    assert main(["env", "FrozenLake", *BOARD]) == 0
    said = capsys.readouterr().out
    assert "action> step 1: Down  ->" in said
    assert said.endswith("action> \nnot ended after 1 step: reward 0\n")


def test_what_an_environment_says_is_shown_and_not_obeyed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "game.py").write_text(HOSTILE)
    monkeypatch.chdir(tmp_path)
    assert main(["env", "game.py:Game", "--actions", "\x1b[2J", "stop", "more"]) == 1
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert said.startswith(
        "game.py:Game, seed 0\n  a\\x1b[2J\\u202eb\n  rljob: fine\nstep 1: \\x1b[2J  ->  reward 0.5  "
    )
    assert "failed: environment game.py:Game, seed 0, step 2: step: RuntimeError: \\x1b[2Jno (" in said


def test_the_example_of_the_page_passes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs/agents.md").read_text()
    (tmp_path / "my_game.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    assert main(["env", "my_game.py:Game", "--args", '{"most": 5}', "--check"]) == 0
    assert capsys.readouterr().out == (
        "my_game.py:Game: answers resets and steps, also texts that are no action\n"
        "the same seed and actions give the same answers, alone and beside another episode\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py:Game"], "rljob: environment.python: nowhere.py: there is no file "),
        (["FrozenLake", "--tokenizer", "/nowhere"], "rljob: --tokenizer: /nowhere: there is no such folder"),
        (["FrozenLake", "--memory", "much"], "rljob: --memory: 'much' is no amount"),
        (["FrozenLake", "--seed", "-1"], "'-1' is no seed"),
        (["FrozenLake", "--args", "[1]"], "a JSON object is needed"),
        (["FrozenLake", "--args", "{"], "not valid JSON"),
        (["FrozenLake", "--step-seconds", "0"], "'0' is no number of seconds"),
    ],
)
def test_a_wrong_command_line_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    try:
        code = main(["env", *arguments])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    assert message in capsys.readouterr().err
