"""Tools in a confined process, their calls read by vLLM's own parser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from environment_hosts import MakeHosts, place_of
from support.samples import unless_all
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rljob_worker.environments.base import Answer, EnvironmentFailure, FailureKind, Stepped
from rljob_worker.environments.host_process import Deadlines
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.environments.load import REACH, Source
from rljob_worker.environments.tools import MAX_CALLS, Toolbox, ToolSource
from rljob_worker.errors import UserError

CASES = Path(__file__).with_name("tool_cases.py")
TOOLS = ("add", "later", "fails", "rubbish", "hangs", "Counter")
IMPORT_SECONDS = 300.0


def source_of(*names: str, parser: str | None = None, tokenizer: Path | None = None) -> Source:
    paths = tuple(f"{CASES}:{name}" for name in names)
    return Source(tools=ToolSource(paths, parser, None if tokenizer is None else str(tokenizer)))


def tools_of(source: Source) -> Toolbox:
    """The tools, in this process."""
    assert source.tools is not None
    return Toolbox(source.tools, REACH)


def byte_tokenizer(folder: Path) -> Path:
    """Writes anything: each byte is a token."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(letters))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return folder


def word_tokenizer(folder: Path, *words: str) -> Path:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(folder)
    return folder


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentHosts]:
    folder = tmp_path_factory.mktemp("tools")
    source = source_of(*TOOLS, parser="hermes", tokenizer=byte_tokenizer(folder / "tokenizer"))
    with EnvironmentHosts(
        source,
        place_of(source, folder),
        processes=1,
        deadlines=Deadlines(60.0, 60.0, IMPORT_SECONDS),
        deterministic=False,
        retries=0,
    ) as made:
        made.start()
        yield made


_KEYS = iter(range(10**6))


def begun(hosts: EnvironmentHosts) -> int:
    key = next(_KEYS)
    hosts.begin(key, 0, {"prompt": "count", "start": 5})
    taken(hosts)
    return key


def taken(hosts: EnvironmentHosts) -> Answer:
    while not (found := hosts.take(1.0)):
        pass
    return found[0][1]


def answered(hosts: EnvironmentHosts, key: int, action: str) -> Stepped:
    hosts.step(key, action)
    found = taken(hosts)
    assert isinstance(found, Stepped), found
    return found


def test_calls_are_made_and_their_results_are_messages_of_their_own(hosts: EnvironmentHosts) -> None:
    key = begun(hosts)
    found = answered(hosts, key, f"Let me see. {call('add', a=2)} {call('later', word='é')} {call('more', by=10)}")
    assert found.parts == ("3", '{"said": "é"}', "15")
    assert found.observation == "\n".join(found.parts)
    assert (found.reward, found.done, found.values) == (0, False, {"valid": 1, "tool_calls": 3, "tool_errors": 0})
    assert answered(hosts, key, call("more", by=1)).parts == ("16",)
    assert answered(hosts, begun(hosts), call("more", by=1)).parts == ("6",), "an object of another episode was called"
    last = answered(hosts, key, "It is 16.")
    assert (last.observation, last.done, last.values["valid"]) == ("", True, 1)
    hosts.end(key)


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("<tool_call>{'name': 'add'}</tool_call>", "error: the call cannot be read: JSONDecodeError"),
        ('<tool_call>{"name": "add", "argu', "error: the call cannot be read: JSONDecodeError"),
        ('<tool_call>{"name": "add"}</tool_call>', "error: the call cannot be read: KeyError: 'arguments'"),
        ("<tool_call>[1]</tool_call>", "error: the call cannot be read: TypeError"),
        (call("open", a=1), "error: there is no tool 'open'; there are add, later"),
        (call("reset", start=9), "error: there is no tool 'reset'"),
        (call("__init__"), "error: there is no tool '__init__'"),
        (call("add", a="2"), "error: the arguments of add do not fit: a: '2' is not of type 'integer'"),
        (call("add"), "error: the arguments of add do not fit: 'a' is a required property"),
        (call("add", a=1, c=2), "error: the arguments of add do not fit: Additional properties"),
        (call("more", by=2), "error: the arguments of more do not fit: by: 2 is not one of [1, 10]"),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "error: the arguments of add are no object"),
    ],
)
def test_a_call_that_cannot_be_made_is_the_policys_failure_and_told_to_it(
    hosts: EnvironmentHosts, action: str, said: str
) -> None:
    key = begun(hosts)
    found = answered(hosts, key, action)
    assert found.observation.startswith(said)
    assert (found.done, found.values) == (False, {"valid": 0, "tool_calls": 0, "tool_errors": 1})
    hosts.end(key)


def test_good_calls_beside_bad_ones_are_made_up_to_a_bound(hosts: EnvironmentHosts) -> None:
    key = begun(hosts)
    found = answered(hosts, key, call("add", a=1) + call("open"))
    assert found.parts[0] == "2"
    assert found.values == {"valid": 0, "tool_calls": 1, "tool_errors": 1}
    found = answered(hosts, key, call("more", by=1) * (MAX_CALLS + 3))
    assert len(found.parts) == MAX_CALLS + 1
    assert found.parts[-1].startswith(f"error: {MAX_CALLS + 3} calls in one answer")
    assert found.values == {"valid": 0, "tool_calls": MAX_CALLS, "tool_errors": 3}
    hosts.end(key)


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (call("fails", word="water"), r"RuntimeError: no water here \(.*tool_cases.py, line \d+, in fails\)"),
        (call("rubbish"), r"tool rubbish returned <object .*which is no text and no JSON"),
    ],
)
def test_a_tool_that_raises_or_returns_no_text_is_a_failure_of_the_data(
    hosts: EnvironmentHosts, action: str, said: str
) -> None:
    key = begun(hosts)
    hosts.step(key, action)
    found = taken(hosts)
    assert isinstance(found, EnvironmentFailure)
    assert found.kind is FailureKind.DATA
    import re

    assert re.search(said, found.text), found.text
    # The others go on.
    other = begun(hosts)
    assert answered(hosts, other, call("add", a=1)).parts == ("2",)
    hosts.end(other)


def test_schemas_follow_from_hints_and_docstrings(hosts: EnvironmentHosts) -> None:
    functions = {schema["function"]["name"]: schema["function"] for schema in hosts.schemas}
    assert list(functions) == ["add", "later", "fails", "rubbish", "hangs", "more"]
    assert functions["add"]["parameters"]["required"] == ["a"]
    assert functions["more"]["parameters"]["properties"]["by"]["enum"] == [1, 10]
    # Calls without a choice, and all choices of others.
    written = [f'<tool_call>{{"name":"more","arguments":{{"by":{by}}}}}</tool_call>' for by in (1, 10)]
    assert hosts.examples[-2:] == written


def test_the_arguments_of_a_call_are_words_of_their_own() -> None:
    """A trained tokenizer has these words, and a policy of those learns what each argument is."""
    examples = tools_of(source_of("put")).examples
    assert examples[0] == '<tool_call>{"name":"put","arguments":{"shelf":"a", "place":1}}</tool_call>'
    assert len(examples) == len({word for one in examples for word in one.split()}) == 4


@unless_all("imports vLLM in another process; other environments are ended by the same code")
def test_a_tool_that_hangs_is_ended_by_the_deadline_and_is_infra(hosts: EnvironmentHosts, tmp_path: Path) -> None:
    source = hosts._source
    with EnvironmentHosts(
        source,
        place_of(source, tmp_path),
        deadlines=Deadlines(60.0, 1.0, IMPORT_SECONDS),
        deterministic=False,
        retries=0,
    ) as made:
        key = begun(made)
        made.step(key, call("hangs"))
        found = taken(made)
    assert isinstance(found, EnvironmentFailure)
    assert found.kind is FailureKind.INFRA
    assert "within environment.stepSeconds (1 s)" in found.text


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["unhinted"], r"tools\[0\].python: '.*unhinted', tool unhinted: Argument a is missing a type hint"),
        (["add", "undescribed"], r"tools\[1\].python: .*no description for the argument 'a'"),
        (["silent"], r"tools\[0\].python: .*it has no docstring"),
        (["starred"], r"its parameter words is not one that is given by name"),
        (["Empty"], r"has no public method beside reset and close"),
        (["number"], r"is not a function or class but int"),
        (["ad"], r"has no 'ad'; did you mean add"),
        (["add", "add"], r"tools\[1\]: a tool 'add' is there already, in environment.tools\[0\]"),
    ],
)
def test_what_is_no_tool_is_refused_by_its_place(names: list[str], said: str) -> None:
    with pytest.raises(UserError, match=f"^environment.{said}" if said.startswith("tools") else said):
        tools_of(source_of(*names))


def test_a_reset_that_says_something_is_refused(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(source_of("Talks"))
    hosts.begin(0, 0, {"prompt": "x"})
    found = taken(hosts)
    assert isinstance(found, EnvironmentFailure)
    assert "reset returned 'hello' (str), which no policy would see" in found.text


@pytest.mark.parametrize(
    ("parser", "words", "said"),
    [
        ("hermess", [], r"^spec.episodes.toolParser: this vLLM has no tool parser 'hermess'; it has .*hermes"),
        ("deepseek_v3", [], r"^spec.episodes.toolParser: 'deepseek_v3' cannot be used with the model's tokenizer"),
        (
            "hermes",
            ["add", "1"],
            r"^environment.tools: .* cannot write a call of add: <tool_call>.* becomes '<unk>'",
        ),
    ],
)
@unless_all("each imports vLLM in a process of its own")
def test_a_parser_and_a_tokenizer_that_cannot_be_used_are_refused(
    tmp_path: Path, parser: str, words: list[str], said: str
) -> None:
    tokenizer = word_tokenizer(tmp_path / "made", *words) if words else byte_tokenizer(tmp_path / "made")
    source = source_of("add", parser=parser, tokenizer=tokenizer)
    hosts = EnvironmentHosts(source, place_of(source, tmp_path), deadlines=Deadlines(60.0, 60.0, IMPORT_SECONDS))
    with hosts, pytest.raises(UserError, match=said):
        hosts.start()
