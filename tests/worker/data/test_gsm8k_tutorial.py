"""docs/tutorial-gsm8k.md: manifest, commands and what stands in for its downloads, with a much smaller model."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from rljob_api.local_files import resolved
from rljob_api.validation import load_manifest
from rljob_worker.cli.main import main, parser
from rljob_worker.driver.inputs import read_inputs
from rljob_worker.rewards.builtin import gsm8k
from rljob_worker.rollouts.inputs import Inputs

ROOT = Path(__file__).parents[3]
MANIFEST = ROOT / "examples" / "gsm8k.yaml"
PAGE = (ROOT / "docs" / "tutorial-gsm8k.md").read_text(encoding="utf-8")


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inputs]:
    """Files that the job reads where the script was started, as `rljob run` reads them."""
    folder = tmp_path_factory.mktemp("empty")
    stand_in = module("gsm8k_stand_in")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        stand_in.main(["--tiny"])
        job = resolved(load_manifest(MANIFEST), MANIFEST.parent)
        read = read_inputs(job.spec, folder / "run")
        with pytest.raises(SystemExit, match="is there already"):
            stand_in.main(["--tiny"])
    yield read
    read.rewards.close()


def test_the_stand_in_is_read_as_the_model_and_the_data(inputs: Inputs) -> None:
    tokenizer = inputs.tokenizer
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]) == [2000, 2002]
    assert tokenizer.eos_token_id == 2002
    assert len(tokenizer) <= inputs.model.vocab_size
    prompt = inputs.prompts.next_prompts(1)[0]
    text = tokenizer.decode(prompt.token_ids)
    assert text.startswith("<|im_start|>system\nSolve the problem step by step.")
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n"), "without thinking"
    assert prompt.label is not None
    assert gsm8k(prompt.label, prompt.label) == 1.0


def test_made_up_problems_are_right() -> None:
    for row in module("gsm8k_stand_in").rows(50, seed=2):
        assert set(row) == {"question", "answer"}
        for product, value in re.findall(r"<<([\d*+-]+)=(\d+)>>", row["answer"]):
            assert eval(product) == int(value)
        assert row["answer"].endswith(f"#### {value}")


@pytest.mark.parametrize(
    ("response", "score"), [("9*8=72\n#### 72", 1.0), ("#### 1,072.50 ", 1.0), ("#### 72 clips", 0.2), ("none", 0.0)]
)
def test_the_layout_reward(response: str, score: float) -> None:
    assert module("gsm8k_rewards").layout(response, "#### 72") == score


def commands() -> list[list[str]]:
    words = [shlex.split(line) for line in PAGE.splitlines() if line.startswith((".venv/", "make "))]
    assert len(words) >= 10
    return words


def test_the_commands_of_the_page_are_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    makefile = Path("Makefile").read_text()
    for program, *arguments in commands():
        if program == "make":
            assert all(f"\n{target}: " in makefile for target in arguments)
        elif program == ".venv/bin/rljob":
            given = parser().parse_args(arguments)
            if given.command in ("run", "validate", "plan"):
                assert load_manifest(given.manifest, overrides=given.overrides).metadata.name == "gsm8k"
        elif program == ".venv/bin/python":
            assert Path(arguments[0]).is_file()


def within(shown: Any, whole: Any) -> bool:
    if isinstance(shown, dict):
        return all(key in whole and within(value, whole[key]) for key, value in shown.items())
    return bool(shown == whole)


def test_the_manifest_is_the_one_that_the_page_shows() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    spec = yaml.safe_load(MANIFEST.read_text())["spec"]
    assert within(yaml.safe_load(block), spec)
    rows = re.findall(r"^\| `([\w.]+)` \| (\d+) \|", PAGE, re.MULTILINE)
    assert len(rows) >= 6
    for field, value in rows:
        found = spec
        for part in field.split("."):
            found = found[part]
        assert str(found) == value, field


def test_the_memory_is_what_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(module("gsm8k_stand_in").CONFIG))
    monkeypatch.chdir(ROOT)
    assert main(["plan", str(MANIFEST), "--model", str(tmp_path), "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    peak, phase = max((table["peak"], table["peak_phase"]) for table in tables)
    assert f"needs {peak / 2**30:.1f} GiB at its peak, in `{phase}`" in PAGE
