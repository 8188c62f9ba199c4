"""A judge's engine against transformers' own forward pass, before and after a sleep."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from support.judge_models import own_answers, own_scores, write_judge
from support.warm.protocol import ENGINE
from support.warm.scripts import run_script

from rljob_api import RLJobSpec
from rljob_api.spec import JudgeKind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
WORDS = [f"w{number}" for number in range(40)]
BROKEN, LONGEST, TEXTS = "w7", 96, 48


def spec_of(folder: Path, **judge: Any) -> RLJobSpec:
    judge = {"name": "scorer", "kind": "Score", "model": {"path": str(folder), "kvCacheBytes": 2**26}} | judge
    return RLJobSpec.model_validate(
        {
            "steps": 1,
            "model": {"path": "x"},
            "data": {"synthetic": {}},
            "rollout": {"promptsPerStep": 4, "samplesPerPrompt": 2, "maxResponseTokens": 8},
            "reward": {"name": "judge"},
            "judges": [judge],
            "training": {"precision": "fp32"},
            "resources": {"profile": "cpu", "threadsPerDevice": 1},
        }
    )


def test_scores_are_those_of_transformers_and_stay_so_over_a_sleep(tmp_path: Path) -> None:
    folder = write_judge(tmp_path / "judge", WORDS, broken=BROKEN)
    draw = random.Random(3)
    # 6 to 45 are the words; that of one is NaN, so that texts with it have no score.
    texts = [[draw.randrange(6, 46) for _ in range(draw.randint(1, LONGEST))] for _ in range(TEXTS)]
    answer = asked(spec_of(folder), folder, texts)
    expected = own_scores(folder, texts)
    assert 0 < sum(map(math.isnan, expected)) < TEXTS
    for found, right in zip(answer["first"], expected, strict=True):
        assert math.isnan(found) if math.isnan(right) else abs(found - right) < 1e-5
    assert len({round(score, 3) for score in expected if not math.isnan(score)}) > 5
    assert repr(answer["again"]) == repr(answer["first"])
    assert answer["released"] > 0
    assert answer["too_long"] == f"judge: text 0 has {LONGEST + 1} tokens; 1 to {LONGEST} are taken"


def test_words_are_those_of_transformers_and_stay_so_over_a_sleep(tmp_path: Path) -> None:
    folder = write_judge(tmp_path / "judge", WORDS, writes=True)
    draw = random.Random(4)
    texts = [[draw.randrange(6, 46) for _ in range(draw.randint(1, LONGEST - 8))] for _ in range(16)]
    answer = asked(spec_of(folder, kind="Chat", maxTokens=8), folder, texts)
    # vLLM writes the blank before an answer's first word, too.
    assert [one["text"].strip() for one in answer["first"]] == own_answers(folder, texts, 8)
    assert answer["again"] == answer["first"]
    assert answer["too_long"] == f"judge: text 0 has {LONGEST + 1} tokens; 1 to {LONGEST - 8} are taken"


def asked(spec: RLJobSpec, folder: Path, texts: list[list[int]]) -> dict[str, Any]:
    given = {
        "spec": spec.model_dump(mode="json", by_alias=True),
        "folder": str(folder),
        "max_tokens": LONGEST,
        "texts": texts,
        "writes": spec.judges[0].kind is JudgeKind.CHAT,
    }
    asking = folder.with_name("asking.json")
    asking.write_text(json.dumps(given))
    (output,) = run_script(ENGINE, Path(__file__).with_name("judge_process.py"), [asking], spec=spec)
    (line,) = [line for line in output.splitlines() if line.startswith("ANSWER ")]
    answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
    return answer
