"""Pictures in a real vLLM engine and a real trainer: the same patches, places and positions, the same probabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pictures_process import spec_of
from support.samples import drawn, unless_all
from support.warm.client import WarmProcess
from support.warm.protocol import ENGINE, TRAINER
from support.warm.scripts import variables_of

HERE = Path(__file__).parent
ROLES = {"engine": ENGINE, "many": ENGINE, "trainer": TRAINER}


def result_of(role: str, kind: str, folder: Path, seconds: float = 400) -> dict[str, Any]:
    """The findings of a process of its own: vLLM and a trainer have a process group each."""
    environment = variables_of(ROLES[role], spec_of(kind, folder))
    command = [str(HERE / "pictures_process.py"), role, kind, str(folder), str(folder / "found.json")]
    process = WarmProcess(ROLES[role], command, environment)
    output = process.communicate(seconds)[0]
    assert process.returncode == 0, output[-4000:]
    [line] = [line.removeprefix("RESULT ") for line in output.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("kind", drawn("pictures on an engine", ["qwen2_5_vl", "qwen3_vl"]))
def test_trainer_and_engine_see_the_same_pictures(kind: str, tmp_path: Path) -> None:
    engine = result_of("engine", kind, tmp_path)
    assert engine["same_again"]
    assert engine["moved_by_picture"] > 0.01, "pictures change what is said"
    assert not {token for answer in engine["answers"] for token in answer} & set(engine["placeholders"])
    # Features of the weights before would be taken for those of the weights after, without a word.
    assert min(engine["remembered"]) > 0
    assert engine["forgotten"] == [0, 0]
    trainer = result_of("trainer", kind, tmp_path)
    assert max(trainer["prompt_distance"]) <= 1e-4, trainer
    assert max(trainer["sampled_distance"]) <= 1e-4, trainer


@pytest.mark.slow
@pytest.mark.timeout(2000)
@unless_all("a hundred thousand tokens")
def test_none_of_many_sampled_tokens_is_a_placeholder(tmp_path: Path) -> None:
    found = result_of("many", "qwen2_5_vl", tmp_path, seconds=1900)
    assert found["forbidden"] == [100_800, 0]
    tokens, placeholders = found["allowed"]
    assert placeholders > tokens / 1000, "the model would sample them"
