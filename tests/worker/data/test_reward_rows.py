"""Rewards by a column: every row is looked at before anything starts, and each is scored by its own parts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from rljob_api.spec import RLJobSpec
from rljob_worker.cli.main import main
from rljob_worker.data.dataset import PromptSource, load_evaluation_prompts
from rljob_worker.data.renderer import ScoredRows
from rljob_worker.data.reward_rows import RoutedRows, unused_parts
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.errors import UserError
from rljob_worker.rewards.label_check import LabelCheck
from rljob_worker.rewards.runner import RewardRunner
from rljob_worker.rewards.score_calls import RewardSample
from rljob_worker.rewards.scorers import Scorers
from rljob_worker.types import Generation, Prompt

MakeSpec = Callable[..., RLJobSpec]
BY_TAG = {
    "by": "tag",
    "parts": [
        {"name": "math", "rows": ["deepmath_103k", "aime"]},
        {"name": "exact", "rows": ["KodCode"], "weight": 2.0},
        {"name": "length", "args": {"limit": 10}, "weight": 0.5},
    ],
}
ROWS = [
    {"prompt": "a b", "label": "7", "tag": "deepmath_103k"},
    {"prompt": "c d", "label": "def f", "tag": "KodCode", "tests": "assert f"},
    {"prompt": "e f", "label": "8", "tag": "aime"},
]
ALONE = {**BY_TAG, "parts": BY_TAG["parts"][:2]}


def write(folder: Path, rows: list[dict[str, Any]], kind: str = "jsonl", name: str = "data") -> str:
    path = folder / f"{name}.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def tokenizer_for(tmp_path: Path) -> Callable[[RLJobSpec], PreTrainedTokenizerBase]:
    return lambda spec: load_tokenizer(prepare_tokenizer(spec, tmp_path / "tokenizer"))


def routed(source: PromptSource) -> RoutedRows:
    (scored,) = source.scored()
    assert scored.routed is not None
    return scored.routed


def score(spec: RLJobSpec, tokenizer: Any, prompts: list[Prompt], texts: list[str], **more: Any) -> list[Any]:
    generations = [Generation(np.arange(4), np.zeros(4, np.float32), "stop") for _ in prompts]
    samples = [RewardSample(prompt, 0, made, text) for prompt, made, text in zip(prompts, generations, texts)]
    with RewardRunner(Scorers(spec, tokenizer, **more)) as runner:
        return runner.score(samples, time.monotonic() + 120)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_each_row_is_scored_by_its_own_parts(
    tmp_path: Path, make_spec: MakeSpec, tokenizer_for: Any, kind: str
) -> None:
    spec = make_spec({"path": write(tmp_path, ROWS, kind)}, reward=BY_TAG)
    tokenizer = tokenizer_for(spec)
    source = PromptSource(spec, tokenizer)
    assert list(routed(source).lines()) == [
        "spec.data (data): 1 row with tag KodCode: exact + length",
        "spec.data (data): 1 row with tag aime: math + length",
        "spec.data (data): 1 row with tag deepmath_103k: math + length",
    ]
    assert unused_parts([routed(source)]) == []
    prompts = source.prompts_of([f"data/{row}" for row in range(3)])
    results = score(spec, tokenizer, prompts, [r"\boxed{7}", "def f", "9"], routed={"spec.data": routed(source)})
    assert [result.parts for result in results] == [
        {"math": 1.0, "length": -0.4}, {"exact": 1.0, "length": -0.4}, {"math": 0.0, "length": -0.4},
    ]  # fmt: skip
    assert [result.score for result in results] == [0.8, 1.8, -0.2]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_field_of_a_column_whole_numbers_and_truth(
    tmp_path: Path, make_spec: MakeSpec, tokenizer_for: Any, kind: str
) -> None:
    def parts(*rows: str) -> dict[str, Any]:
        return {"parts": [{"name": "exact", "rows": [row], "recordAs": f"r{row}"} for row in rows]}

    rows = [
        {"prompt": "a", "label": "1", "extra_info": {"source": 1}, "good": True},
        {"prompt": "b", "label": "2", "extra_info": {"source": 2}, "good": False},
    ]
    path = write(tmp_path, rows, kind)
    for by, values in (("extra_info.source", ("1", "2")), ("good", ("true", "false"))):
        spec = make_spec({"path": path}, reward={"by": by, **parts(*values)})
        prompts = PromptSource(spec, tokenizer_for(spec)).prompts_of(["data/0", "data/1"])
        assert [[part.record_as for part in prompt.reward.parts or []] for prompt in prompts] == [
            [f"r{value}"] for value in values
        ]
        assert prompts[0].metadata == {"extra_info": {"source": 1}, "good": True}


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"tag": "KodCde"}, ALONE, r"row 1: tag is 'KodCde', which is in no part's rows \(did you mean 'KodCode'\?\)"),
    ({"tag": "KodCde"}, BY_TAG, ""),
    ({"tag": None}, ALONE, "row 1: has no 'tag', and each part is for some of its values: KodCode, aime"),
    ({"tag": ["a"]}, ALONE, "row 1: tag is list: text, a whole number or true or false is needed"),
    ({"tag": 1.5}, BY_TAG, "row 1: tag is float"),
    ({"tag": "KodCode", "label": " "}, ALONE, "row 1: the reward exact compares with the label, which is empty"),
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(("other", "reward", "said"), WRONG)
def test_rows_without_a_reward_are_named_before_the_start(
    tmp_path: Path, make_spec: MakeSpec, tokenizer_for: Any, kind: str, other: Any, reward: Any, said: str
) -> None:
    rows = [ROWS[0], ROWS[1] | other, ROWS[1] | other]
    if kind == "parquet" and not isinstance(other["tag"], str | None):
        # A column of a table has one type.
        rows = [ROWS[0] | {"tag": other["tag"]}, *rows[1:]]
        said = said.replace("row 1", "row 0")
    path = write(tmp_path, rows, kind)
    spec = make_spec({"path": path}, reward=reward)
    if not said:
        PromptSource(spec, tokenizer_for(spec))
        return
    with pytest.raises(UserError, match=said) as caught:
        PromptSource(spec, tokenizer_for(spec))
    assert f"{path}, row" in str(caught.value)
    assert str(caught.value).startswith("spec.reward.by: ")
    assert "(2 rows)" in str(caught.value) or "(3 rows)" in str(caught.value)
    held_out = make_spec(
        {"path": write(tmp_path, ROWS, kind, "good")},
        reward=ALONE,
        evaluation={"data": {"path": path, "reward": reward}},
    )
    PromptSource(held_out, tokenizer_for(held_out))
    with pytest.raises(UserError, match=r"spec\.evaluation\.data\.reward\.by: "):
        load_evaluation_prompts(held_out, tokenizer_for(held_out))
    few = held_out.model_copy(update={"evaluation": held_out.evaluation.model_copy(update={"max_prompts": 1})})  # type: ignore[union-attr]
    if "row 1" in said:
        assert len(load_evaluation_prompts(few, tokenizer_for(few))) == 1
        skipping = make_spec({"path": path, "skip": [1, 2]}, reward=reward)
        assert list(routed(PromptSource(skipping, tokenizer_for(skipping))).values) == ["deepmath_103k"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_that_is_not_there(tmp_path: Path, make_spec: MakeSpec, tokenizer_for: Any, kind: str) -> None:
    spec = make_spec({"path": write(tmp_path, ROWS, kind)}, reward=BY_TAG | {"by": "tga"})
    with pytest.raises(
        UserError, match=r"spec\.reward\.by: .* \(spec\.data\) has no column 'tga'; .*'label', 'prompt'"
    ):
        PromptSource(spec, tokenizer_for(spec))


def test_built_in_rewards_that_rows_cannot_have(tmp_path: Path, make_spec: MakeSpec, tokenizer_for: Any) -> None:
    path = write(tmp_path, ROWS)
    spec = make_spec({"path": path, "labelKey": None}, reward=ALONE)
    with pytest.raises(UserError, match=r"row 0: the reward math compares with a label, and spec\.data\.labelKey is"):
        PromptSource(spec, tokenizer_for(spec))
    parts = [{"name": "environment", "rows": ["aime"]}, {"name": "format"}]
    spec = make_spec({"path": path}, reward={"by": "tag", "parts": parts})
    with pytest.raises(UserError, match=r"row 2: the reward environment scores it, and spec\.data has no environment"):
        PromptSource(spec, tokenizer_for(spec))


def test_parts_and_values_that_no_row_has(tmp_path: Path, make_spec: MakeSpec, tokenizer_for: Any) -> None:
    parts = [{"name": "math", "rows": ["deepmath_103k", "gsm8k"]}, {"name": "exact", "rows": ["b"]}, {"name": "format"}]
    spec = make_spec({"path": write(tmp_path, ROWS)}, reward={"by": "tag", "parts": parts})
    found = routed(PromptSource(spec, tokenizer_for(spec)))
    assert unused_parts([found]) == [
        "spec.reward.parts[0].rows: no row has 'gsm8k'",
        "spec.reward.parts[1] (exact) scores nothing: no row has 'b'",
    ]


def test_a_function_is_held_to_the_columns_of_its_own_rows(
    tmp_path: Path, make_spec: MakeSpec, tokenizer_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def ran(response, tests): return float(tests in response)\n")
    many = [ROWS[0]] * 150 + [ROWS[1]]
    parts = [{"name": "exact", "rows": ["deepmath_103k"]}, {"python": "./mine.py:ran", "rows": ["KodCode"]}]
    spec = make_spec({"path": write(tmp_path, many)}, reward={"by": "tag", "parts": parts})
    tokenizer = tokenizer_for(spec)
    source = PromptSource(spec, tokenizer)
    given = {"columns": source.columns(), "routed": {"spec.data": routed(source)}}
    (result,) = score(spec, tokenizer, source.prompts_of(["data/150"]), ["an assert f here"], **given)
    assert (result.score, result.parts) == (1.0, {"ran": 1.0})
    parts[1]["rows"] = ["deepmath_103k"]
    wrong = make_spec({"path": write(tmp_path, [ROWS[0]])}, reward={"by": "tag", "parts": [parts[1]]})
    source = PromptSource(wrong, tokenizer)
    with pytest.raises(UserError, match=r"spec\.reward\.parts\[0\]\.python: .* asks for 'tests'"):
        RewardRunner(Scorers(wrong, tokenizer, columns=source.columns(), routed={"spec.data": routed(source)}))


def test_labels_are_read_by_the_reward_of_their_row(tmp_path: Path, make_spec: MakeSpec, tokenizer_for: Any) -> None:
    rows = [
        *ROWS,
        {"prompt": "x", "label": r"\frac{1}{", "tag": "aime"},
        {"prompt": "y", "label": "{", "tag": "KodCode"},
    ]
    spec = make_spec({"path": write(tmp_path, rows)}, reward=ALONE)
    scored: list[ScoredRows] = PromptSource(spec, tokenizer_for(spec)).scored()
    for _ in range(2):
        # The second time from what the first one kept.
        check = LabelCheck(scored, tmp_path / "cache")
        check.run()
        with pytest.raises(UserError, match=r"spec\.data: 1 labels cannot be read by the reward math:\n.*row 3"):
            check.refuse()


def test_validate_and_score_show_the_rows_of_each_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = {
        "apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "by-tag"},
        "spec": {
            "steps": 1, "model": {"path": "someone/some-model"}, "data": {"path": write(tmp_path, ROWS)},
            "reward": {"by": "tag", "parts": [*ALONE["parts"], {"name": "format", "rows": ["r1"]}]},
            "rollout": {"promptsPerStep": 2, "samplesPerPrompt": 2, "maxResponseTokens": 8},
            "resources": {"profile": "cpu", "nodes": 1},
        },
    }  # fmt: skip
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(job))
    assert main(["validate", str(file)]) == 0
    said = capsys.readouterr().out
    assert "spec.data (data): 1 row with tag KodCode: exact\n" in said
    assert "warning: spec.reward.parts[2] (format) scores nothing: no row has 'r1'\n" in said
    small = {
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64,
    }  # fmt: skip
    job["spec"]["model"] = {"random": {"config": small}}  # type: ignore[index]
    file.write_text(json.dumps(job))
    assert main(["score", str(file), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["sets"]
    assert {name: part["count"] for name, part in found["parts"].items()} == {"math": 2, "exact": 1}
    assert found["scores"]["mean"] == pytest.approx(4 / 3)
