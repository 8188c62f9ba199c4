"""Both ends of a prompt: where an answer begins, and what a tokenizer adds to a text."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from rljob_api.spec import RLJobSpec
from rljob_worker.cli.main import main
from rljob_worker.data.dataset import PromptSource
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer, tokens_added_after
from rljob_worker.errors import UserError

MakeSpec = Callable[..., RLJobSpec]
Write = Callable[..., str]
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
BEGIN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.fixture
def source(make_spec: MakeSpec, write_jsonl: Write, tmp_path: Path) -> Callable[..., PromptSource]:
    def make(template: str, prompt: Any = "a b", **chat: Any) -> PromptSource:
        (tmp_path / "own.jinja").write_text(template)
        chat["templateFile"] = str(tmp_path / "own.jinja")
        data = {"path": write_jsonl([{"prompt": prompt, "label": "x"}]), "applyChatTemplate": True, "chat": chat}
        return PromptSource(make_spec(data), load_tokenizer(prepare_tokenizer(make_spec(data), tmp_path / "tokenizer")))

    return make


@pytest.mark.parametrize(
    "template",
    [
        CHATML + BEGIN,
        CHATML + "<|im_start|>assistant\n",
        MISTRAL,
        "{{ messages[0].content }}",
        "{{ messages[-1].content }}",
        "Q: {{ messages[0].content }}\nA:{% if messages[1] %} {{ messages[1].content }}{% endif %}",
    ],
)
def test_a_prompt_that_ends_where_an_answer_begins_is_taken(template: str, source: Callable[..., Any]) -> None:
    assert len(source(template).next_prompts(1)) == 1


def test_a_template_that_ignores_the_generation_prompt_is_refused(source: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r"own\.jinja: ignores add_generation_prompt: .*assistant"):
        source(CHATML)
    with pytest.raises(UserError, match="an answer begins after 'A: '"):
        source("{% for m in messages %}{{ 'Q: ' if m.role == 'user' else 'A: ' }}{{ m.content }}\n{% endfor %}")


def test_a_template_that_refuses_answers_is_taken_with_a_word(
    source: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    source("{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}{{ messages[0].content }}")
    assert "whether a prompt ends where an answer begins cannot be told" in caplog.text


def test_a_variable_that_nobody_gave_is_named(source: Callable[..., Any]) -> None:
    template = "{{ date_string }} {{ bos_token }}" + CHATML + BEGIN
    with pytest.raises(UserError, match=r"prints the variable 'date_string'.*spec\.data\.chat\.templateArgs\.date_"):
        source(template)
    assert source(template, templateArgs={"date_string": "today"}).next_prompts(1)[0].text.startswith("today ")
    source("{% if date_string is defined %}{{ date_string }}{% endif %}{{ x | default('') }}" + CHATML + BEGIN)


def test_a_list_of_parts_needs_a_template_for_it(source: Callable[..., Any]) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a b"}]}]
    with pytest.raises(UserError, match=r"row 0: .*takes the content of a message as a string"):
        source("{% for m in messages %}{{ m.content }}{% endfor %}", parts)
    template = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
    assert source(template, parts).next_prompts(1)[0].text == "a b"


def test_an_end_token_that_a_tokenizer_appends_is_left_away(
    make_spec: MakeSpec, write_jsonl: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = make_spec({"path": write_jsonl([{"prompt": "a b", "label": "x"}])})
    tokenizer = load_tokenizer(prepare_tokenizer(spec, tmp_path / "tokenizer"))
    plain = PromptSource(spec, tokenizer).next_prompts(1)[0].token_ids
    assert tokens_added_after(tokenizer) == ()
    end, begin = tokenizer.eos_token_id, tokenizer.pad_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A <eos> <eos>", special_tokens=[("<eos>", end), ("<pad>", begin)]
    )
    assert tokens_added_after(tokenizer) == (end, end)
    with caplog.at_level(logging.WARNING):
        assert PromptSource(spec, tokenizer).next_prompts(1)[0].token_ids == (begin, *plain)
    assert "the tokenizer ends every text with ['<eos>', '<eos>']" in caplog.text


def test_a_begin_token_of_text_and_tokenizer_is_one(make_spec: MakeSpec, write_jsonl: Write, tmp_path: Path) -> None:
    spec = make_spec({"path": write_jsonl([{"prompt": "<pad> a b", "label": "x"}])})
    tokenizer = load_tokenizer(prepare_tokenizer(spec, tmp_path / "tokenizer"))
    begin = tokenizer.pad_token_id
    tokenizer.bos_token = "<pad>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", begin)]
    )
    assert list(PromptSource(spec, tokenizer).next_prompts(1)[0].token_ids[:2]).count(begin) == 1


def test_validate_shows_what_a_row_becomes(
    write_jsonl: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl([{"prompt": [{"role": "user", "content": "one two"}], "label": 1.5}])
    job = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "shown"},
        "spec": {
            "steps": 1,
            "model": {"random": {"config": {"model_type": "qwen3"}}},
            "data": {"path": path, "applyChatTemplate": True},
            "reward": {"name": "exact"},
            "rollout": {"promptsPerStep": 1, "samplesPerPrompt": 2, "maxResponseTokens": 8},
            "resources": {"profile": "cpu"},
        },
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    assert main(["validate", str(tmp_path / "job.yaml")]) == 0
    said = capsys.readouterr().out
    assert "shown is valid\nfirst prompt data/0, 4 tokens: 4='<|user|>'" in said
    assert "  | <|user|> one two <|assistant|>\n  label '1.5'\n" in said
    short = ("--set", "spec.rollout.engineArgs={max_model_len: 11}")
    assert main(["validate", str(tmp_path / "job.yaml"), *short]) == 2
    assert "is longer than 3 tokens, the smaller of data.maxPromptTokens and the engine's" in capsys.readouterr().err
    write_jsonl([{"prompt": [{"role": "user", "content": "one two"}], "label": float("nan")}])
    assert main(["validate", str(tmp_path / "job.yaml")]) == 2
    assert "data.jsonl, line 1 (row 0): the label ('label', spec.data.labelKey) is NaN" in capsys.readouterr().err
