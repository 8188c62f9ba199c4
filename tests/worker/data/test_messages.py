"""Prompts as messages, as their JSON text, and what looks like it: read as messages, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from rljob_api.spec import DataSource, RLJobSpec
from rljob_worker.data.dataset import PromptSource
from rljob_worker.data.prompts import parsed_prompt
from rljob_worker.data.sources import load_source
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.errors import UserError

MakeSpec = Callable[..., RLJobSpec]
Write = Callable[..., str]
EXAMPLES = Path(__file__).parents[3] / "examples"
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
# A row as ROLL's data page has it: the messages are JSON text, whose strings hold line breaks as they are.
ROLL_ROW = {
    "id": "0",
    "source": "made up",
    "difficulty": "0",
    "prompt": "Write f.",
    "messages": json.dumps([ASKED[0], {"role": "user", "content": "Write f.\n\n```python\ndef f(x):\n```"}]).replace(
        "\\n", "\n"
    ),
    "ground_truth": "204",
    "case_type": "pytest",
    "test_case_function": " ",
    "test_cases": '[{"assert_code": "\n\ndef test_f():\n    assert f(1) == 1"}]',
    "tag": "math_rule",
}


@pytest.fixture
def first_text(make_spec: MakeSpec, write_jsonl: Write, tmp_path: Path) -> Callable[..., str]:
    """The text of the first prompt of a source with these prompts."""

    def render(*prompts: Any, **data: Any) -> str:
        path = write_jsonl([{"prompt": prompt, "label": "x"} for prompt in prompts])
        spec = make_spec({"path": path, "applyChatTemplate": True, "shuffle": False, **data})
        tokenizer = load_tokenizer(prepare_tokenizer(spec, tmp_path / "tokenizer"))
        return PromptSource(spec, tokenizer).next_prompts(1)[0].text

    return render


def test_json_text_of_messages_is_read_as_messages(first_text: Callable[..., str]) -> None:
    assert first_text(json.dumps(ASKED)) == first_text(ASKED) == "<|system|> Be brief. <|user|> 2 + 3? <|assistant|>"
    assert first_text(" " + json.dumps(ASKED, indent=1)) == first_text(ASKED)


@pytest.mark.parametrize("text", ["[1, 2, 3] sorted?", '[{"a": 1}]', '{"x": 1}', '"role", "content"', "[role] content"])
def test_other_json_stays_text(text: str, first_text: Callable[..., str]) -> None:
    assert first_text(text) == f"<|user|> {text} <|assistant|>"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (json.dumps(ASKED)[:-9], "looks like chat messages, but is no JSON text of them"),
        (str(ASKED), "looks like chat messages, but is no JSON text of them"),
        (json.dumps(json.dumps(ASKED)), "as JSON text inside JSON text"),
        (json.dumps({"messages": ASKED}), "is the JSON text of an object, not of a list of chat messages"),
        (json.dumps(ASKED[1]), "is the JSON text of an object"),
        (json.dumps([{"role": "user"}, {"content": "content"}]), "needs a 'role' and a 'content'"),
        (ASKED[1], "is dict: a string or a list of chat messages is needed"),
        ([], "is a list without messages"),
        ([*ASKED, {"role": "assistant", "content": "5"}], "ends with a message of the assistant"),
        ([ASKED[0]], "has no message that asks anything"),
        ([{"role": "user", "content": " \n"}], "has no message that asks anything"),
        ([{"role": "user", "content": None}], "message 0: its content is null: a string is needed"),
        ([{"role": "user", "content": 5}], "message 0: its content is int"),
        ([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "its content holds 'image'; only text"),
        ([{"from": "human", "value": "2 + 3?"}], "needs a 'role' and a 'content', not {'from'"),
        (json.dumps([{"from": "human", "value": "2 + 3?"}]), "messages with 'from' and 'value'; 'role' and 'content'"),
        ("[{'from': 'human', 'value': '2 + 3?'}]", "looks like chat messages, but is no JSON text of them"),
        ([{"role": "human", "content": "2 + 3?"}], "has the role 'human', which .* does not know"),
        (json.dumps([{"role": "user", "content": "half \ud83d"}]), r"holds half a character \(\\ud83d\)"),
    ],
)  # fmt: skip
def test_what_no_policy_can_answer_is_named(prompt: Any, message: str, first_text: Callable[..., str]) -> None:
    with pytest.raises(UserError, match=rf"(?s)data\.jsonl, line 2 \(row 1\).*{message}"):
        first_text("2 + 3?", prompt)


def test_json_text_without_a_template_is_taken_as_written_with_a_warning(
    first_text: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    assert first_text(json.dumps(ASKED), applyChatTemplate=False) == json.dumps(ASKED)
    assert "row 0): the prompt ('prompt') is the JSON text of a list of chat messages" in caplog.text
    assert "set spec.data.applyChatTemplate: true" in caplog.text


def test_a_template_s_own_role_is_known(first_text: Callable[..., str], tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}{# observation #}answer: "
    (tmp_path / "own.jinja").write_text(template)
    prompt = [*ASKED, {"role": "observation", "content": "5 apples"}]
    chat = {"templateFile": str(tmp_path / "own.jinja")}
    with pytest.raises(UserError, match="ignores add_generation_prompt"):
        first_text(prompt, chat=chat)
    (tmp_path / "own.jinja").write_text(
        template.replace("answer: ", "{% if add_generation_prompt %}assistant: {% endif %}")
    )
    assert first_text(prompt, chat=chat) == "system: Be brief. user: 2 + 3? observation: 5 apples assistant: "


def test_keys_that_a_table_fills_with_null_are_left_out(make_spec: MakeSpec, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "2 + 3?", "tool_calls": None},
        {"role": "user", "content": "now", "name": "b"},
    ]
    parquet.write_table(pa.table({"prompt": [messages], "label": ["5"]}), tmp_path / "x.parquet")
    spec = make_spec({"path": str(tmp_path / "x.parquet"), "applyChatTemplate": True})
    tokenizer = load_tokenizer(prepare_tokenizer(spec, tmp_path / "tokenizer"))
    tokenizer.chat_template = "{% for m in messages %}{{ m.keys() | list }} {{ m.content }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}A{% endif %}"
    assert "tool_calls" not in PromptSource(spec, tokenizer).next_prompts(1)[0].text


@pytest.mark.parametrize("name", ["qwen2.5-7b-rlvr-2x8-apart", "qwen2.5-7b-rlvr-2x8", "qwen3-8b-rlvr-16xa3"])
def test_examples_over_a_row_as_roll_has_it(name: str, make_spec: MakeSpec, write_jsonl: Write, tmp_path: Path) -> None:
    spec = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())["spec"]
    sources = spec["data"].get("sources") or [{k: v for k, v in spec["data"].items() if k != "maxPromptTokens"}]
    rows = write_jsonl([ROLL_ROW])
    for number, source in enumerate([*sources, *filter(None, [spec.get("evaluation", {}).get("data")])]):
        job = make_spec(source | {"path": rows, "reward": {"name": "exact"}})
        tokenizer = load_tokenizer(prepare_tokenizer(job, tmp_path / str(number)))
        (prompt,) = PromptSource(job, tokenizer).next_prompts(1)
        assert prompt.text.startswith("<|system|> Be brief. <|user|> Write f.\n\n```python\ndef f(x):")
        assert prompt.text.endswith(" <|assistant|>")
        assert prompt.label == ROLL_ROW[source["labelKey"]]


def test_all_rows_of_a_table_are_looked_at(tmp_path: Path) -> None:
    good = [[{"role": "user", "content": f"{i} + 3?"}] for i in range(5000)]
    for prompts, message in (
        ([*good, [{"role": "user", "content": ""}]], "row 5000: the prompt .* has no message that asks"),
        (["a"] * 5000 + [" "], "row 5000: the prompt .* is empty"),
        (["a"] * 5000 + [json.dumps(ASKED)[:-3]], "row 5000: the prompt .* looks like chat messages"),
        ([1, 2], "column 'prompt' .* is int64: a string or a list of chat messages is needed"),
    ):
        table = pa.table({"prompt": prompts, "label": ["x"] * len(prompts)})
        parquet.write_table(table, tmp_path / "x.parquet")
        source = DataSource(path=str(tmp_path / "x.parquet"), applyChatTemplate=True)
        with pytest.raises(UserError, match=message):
            load_source(source, "spec.data")


def test_parsing_is_idempotent() -> None:
    assert parsed_prompt(parsed_prompt(json.dumps(ASKED))) == ASKED
