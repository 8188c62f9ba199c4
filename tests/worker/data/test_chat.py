"""System prompt, own template, template arguments; templates that drop the prompt are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rljob_api.spec import RLJobSpec
from rljob_worker.data import bounded
from rljob_worker.data.dataset import PromptSource, load_evaluation_prompts
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.errors import UserError
from rljob_worker.host import interrupting

MakeSpec = Callable[..., RLJobSpec]
Write = Callable[..., str]

# The parts of Qwen3's that matter here: roles, trimmed content, and a switch that closes the thinking.
QWEN = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
OWN_SYSTEM = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi there"}]


@pytest.fixture
def source(make_spec: MakeSpec, write_jsonl: Write, tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    """A source of these prompts, and the tokenizer of its job."""

    def make(*prompts: Any, template: str | None = None, **chat: Any) -> tuple[PromptSource, PreTrainedTokenizerBase]:
        data: dict[str, Any] = {"path": write_jsonl([{"prompt": prompt, "label": "x"} for prompt in prompts])}
        if template is not None:
            (tmp_path / "own.jinja").write_text(template)
            chat["templateFile"] = str(tmp_path / "own.jinja")
        data |= {"applyChatTemplate": True, "chat": chat}
        spec = make_spec(data, evaluation={"data": data})
        tokenizer = load_tokenizer(prepare_tokenizer(spec, tmp_path / "tokenizer"))
        found = PromptSource(spec, tokenizer)
        assert [p.text for p in load_evaluation_prompts(spec, tokenizer)] == [
            p.text for p in sorted(found.next_prompts(len(prompts)), key=lambda p: p.uid)
        ]
        found = PromptSource(spec, tokenizer)
        return found, tokenizer

    return make


def test_loops_without_end_are_named_with_their_template(
    source: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "RENDER_SECONDS", 0.2)
    loops = "{% for a in range(99999) %}" * 9 + "{{ messages }}" + "{% endfor %}" * 9
    with pytest.raises(UserError, match=r"chat\.templateFile: .*own\.jinja: renders .* row 0.* than 0\.2 s"):
        source("hi", template=loops)


def test_texts_without_end_are_named_with_their_template(
    source: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupting, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(bounded, "RENDER_BYTES", 2**24)
    monkeypatch.setattr(bounded, "MOST_CHARACTERS", 1000)
    loops = "{% for a in range(99999) %}" * 9 + "{{ messages }}" + "{% endfor %}" * 9
    for template, said in ((loops, r"MemoryError: more than 0\.015625 GiB"), ("{{ 'a' * 1001 }}", "1001 characters")):
        with pytest.raises(UserError, match=r"own\.jinja: refuses the prompt of .* row 0: .*" + said):
            source("hi", template=template)


def test_it_is_what_transformers_renders(source: Callable[..., Any]) -> None:
    prompts, tokenizer = source(
        "hi", OWN_SYSTEM, template=QWEN, system="be brief", templateArgs={"enable_thinking": False}
    )
    plain, own = sorted(prompts.next_prompts(2), key=lambda prompt: prompt.uid)
    assert plain.text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    for prompt, messages in (
        (plain, [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]),
        (own, OWN_SYSTEM),
    ):
        arguments = {"chat_template": QWEN, "add_generation_prompt": True, "enable_thinking": False}
        assert prompt.text == tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        assert list(prompt.token_ids) == tokenizer.apply_chat_template(messages, return_dict=False, **arguments)
        assert tokenizer.unk_token_id not in prompt.token_ids, "a trained tokenizer has the template's words"


def test_the_tokenizers_own_template_takes_a_system_prompt_too(source: Callable[..., Any]) -> None:
    prompts, tokenizer = source("hi", system="be brief")
    (prompt,) = prompts.next_prompts(1)
    assert prompt.text == "<|system|> be brief <|user|> hi <|assistant|>"
    assert tokenizer.unk_token_id not in prompt.token_ids


@pytest.mark.parametrize(
    ("template", "prompts", "chat", "message"),
    [
        ("{{ 'Answer:' }}", ["hi there"], {}, r"own\.jinja: drops the words of .*data\.jsonl, row 0: 'hi there' is"),
        ("{{ messages[0].content }}", ["hi"], {"system": "be brief"}, "drops the words of .*row 0: 'hi' is not in"),
        ("{{ messages[-1].content }}", ["hi"], {"system": "be brief"}, "drops the words of chat.system before .*row 0"),
        ("a b c {{ messages[0].prompt }}", ["a b", "b c"], {}, "renders two different prompts alike, .*row 0 and .*1"),
        ("{{ messages[0].content }", ["hi"], {}, "line 1: no chat template: "),
        (QWEN, ["hi"], {"templateArgs": {"enable_thinkin": False}},
         r"spec\.data\.chat\.templateArgs\.enable_thinkin: .* not use it.*; did you mean enable_thinking\?"),
    ],
)  # fmt: skip
def test_a_template_that_drops_something_is_refused(
    source: Callable[..., Any], template: str, prompts: list[str], chat: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        source(*prompts, template=template, **chat)


def test_words_may_be_quoted_and_spaced_anew(source: Callable[..., Any]) -> None:
    prompts, _ = source('say "hi"\nto\tme', "???", template="{{ messages[0].content | tojson }}")
    assert {prompt.text for prompt in prompts.next_prompts(2)} == {'"say \\"hi\\"\\nto\\tme"', '"???"'}


def test_the_template_counts_as_data_of_a_resumed_run(source: Callable[..., Any]) -> None:
    state = source("hi", template=QWEN)[0].state()
    source("hi", template=QWEN)[0].restore(state)
    with pytest.raises(UserError, match="as many rows, but other content or another chat template"):
        source("hi", template=QWEN + " ")[0].restore(state)


def test_a_template_that_cannot_be_read_is_named(make_spec: MakeSpec, write_jsonl: Write, tmp_path: Path) -> None:
    path = write_jsonl([{"prompt": "hi", "label": "x"}])
    (tmp_path / "latin1").write_bytes(b"\xe9{{ messages }}")
    for file, message in (
        (tmp_path, "is not a file"),
        (tmp_path / "no", "does not exist"),
        (tmp_path / "latin1", "utf-8"),
    ):
        chat = {"templateFile": str(file)}
        spec = make_spec({"path": path, "applyChatTemplate": True, "chat": chat})
        with pytest.raises(UserError, match=rf"spec\.data\.chat\.templateFile: .*{message}"):
            prepare_tokenizer(spec, tmp_path / "tokenizer")
