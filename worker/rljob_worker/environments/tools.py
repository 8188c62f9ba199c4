"""Tools as an environment: an answer's calls are made, and what they return is said to the policy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rljob_worker.confined.loading import whole_characters
from rljob_worker.data.turns import Schema
from rljob_worker.environments.base import MAX_OBSERVATION_BYTES, Replies
from rljob_worker.environments.calls import CallReader, ToolCall, UnreadableCallError
from rljob_worker.environments.mcp_tools import McpTools
from rljob_worker.environments.python_tools import PythonTools, ToolError, python_tools
from rljob_worker.environments.tool_schemas import examples, sample, validator, written
from rljob_worker.errors import UserError

MAX_CALLS = 16
"""In one answer; further ones are not made."""
_MAX_EXAMPLES = 64
_HERMES = "hermes"
_MARK_BYTES = 64
"""Half of what stands in the place of a middle that was left out, and more."""
_SHOWN = 2000
"""Characters of a fault, which may repeat what a policy wrote."""


@dataclass(frozen=True, slots=True)
class ToolSource:
    """Tools by their names."""

    tools: tuple[str | tuple[str, ...], ...]
    """Each `package.module:NAME` or `FILE.py:NAME`, or the command of an MCP server."""
    parser: str | None = None
    """vLLM's, by name; None: the tools are looked at, and no answer is read."""
    tokenizer: str | None = None
    """Folder of the tokenizer that the parser gets."""


class Toolbox:
    """Makes an environment for each episode, of tools that were looked at once.

    Args:
        source: of the tools.
        reach: as of `load_named`.

    Raises:
        UserError: a tool or the parser cannot be used, or the policy's tokenizer cannot write a call.
    """

    def __init__(self, source: ToolSource, reach: str) -> None:
        self.groups: list[PythonTools | McpTools] = []
        self._owners: dict[str, int] = {}
        try:
            self._look(source, reach)
        except BaseException:
            self.close()
            raise

    def _look(self, source: ToolSource, reach: str) -> None:
        for place, one in enumerate(source.tools):
            self.groups.append(_group(one, f"environment.tools[{place}]", reach))
        schemas: dict[str, Schema] = {}
        for place, group in enumerate(self.groups):
            for name, schema in group.schemas.items():
                if name in schemas:
                    raise UserError(
                        f"environment.tools[{place}]: a tool {name!r} is there already, in environment.tools"
                        f"[{self._owners[name]}]: a call could not tell them apart"
                    )
                schemas[name], self._owners[name] = schema, place
        self.schemas = list(schemas.values())
        """Chat templates get these."""
        self._validators = {
            name: validator(schema, f"environment.tools[{self._owners[name]}]") for name, schema in schemas.items()
        }
        self.examples = list(itertools.islice(examples(self.schemas), _MAX_EXAMPLES))
        """Calls whose arguments are all enumerated, as `hermes` reads them."""
        self.reader: CallReader | None = None
        if source.parser is not None:
            assert source.tokenizer is not None
            self.reader = CallReader(source.parser, source.tokenizer, self.schemas)
            if source.parser == _HERMES:
                self._check_writable(self.reader)

    def close(self) -> None:
        """End the servers."""
        for group in self.groups:
            if isinstance(group, McpTools):
                group.close()

    def __call__(self) -> ToolEnvironment:
        """An episode's environment."""
        return ToolEnvironment(self)

    def owner(self, name: str) -> int | None:
        """Place in `groups` of a tool; None: there is no such tool."""
        return self._owners.get(name)

    def fault(self, call: ToolCall) -> str | None:
        """The fault of a call that a policy wrote; None: it can be made."""
        if call.name not in self._owners:
            return f"there is no tool {call.name!r}; there are {', '.join(self._owners)}"
        if not isinstance(call.arguments, dict):
            return f"the arguments of {call.name} are no object"
        from jsonschema.exceptions import best_match

        try:
            error = best_match(self._validators[call.name].iter_errors(call.arguments))
        except RecursionError:
            return f"the arguments of {call.name} are nested too deeply"
        if error is None:
            return None
        place = "".join(f".{part}" for part in error.absolute_path)
        return f"the arguments of {call.name} do not fit: {place.lstrip('.') + ': ' if place else ''}{error.message}"

    def _check_writable(self, reader: CallReader) -> None:
        """Refuse a tokenizer that turns a call into something else: no policy could ever make one."""
        tokenizer = reader.tokenizer
        for schema in self.schemas:
            name = schema["function"]["name"]
            # Whether the arguments fit the tool is another matter.
            text = next(examples([schema]), None) or written(name, sample(schema))
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            back = str(tokenizer.decode(ids, skip_special_tokens=False))
            if not _same(reader, text, back):
                raise UserError(
                    f"environment.tools: the model's tokenizer cannot write a call of {name}: {text} becomes {back!r} "
                    "in its tokens; a tokenizer that is trained on words knows calls whose parameters are all "
                    "Literal: take model.random.tokenizer.kind: BPE, or such parameters"
                )


class ToolEnvironment:
    """One episode. An answer without a call is the last one.

    Args:
        box: the tools.
    """

    def __init__(self, box: Toolbox) -> None:
        self._box = box
        self._held: list[object] = []

    def reset(self, *, seed: int, options: Mapping[str, object]) -> tuple[str, dict[str, float]]:
        """Begin with the columns of a row; the prompt is the row's, and nothing is said."""
        del seed
        for group in self._box.groups:
            self._held.append(held := group.make())
            group.reset(held, options)
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, float]]:
        """Make an answer's calls.

        What tools return is cut in the middle where it is too long for an observation: a policy chose the call.

        Raises what a tool raises, ValueError where one returns what is no text, and GoneError where a server ended.
        """
        assert self._box.reader is not None
        try:
            calls = self._box.reader.read(action)
        except UnreadableCallError as error:
            said = _told(f"the call cannot be read: {error}")
            return Replies.of([said]), 0.0, False, False, {"valid": 0.0, "tool_calls": 0.0, "tool_errors": 1.0}
        if not calls:
            return "", 0.0, True, False, {"valid": 1.0, "tool_calls": 0.0, "tool_errors": 0.0}
        faults = [self._box.fault(call) for call in calls[:MAX_CALLS]]
        failed = 0
        replies = []
        for call, fault in zip(calls[:MAX_CALLS], faults):
            try:
                replies.append(self._call(call) if fault is None else _told(fault))
            except ToolError as error:
                failed += 1
                replies.append(f"error: {error}")
        if len(calls) > MAX_CALLS:
            replies.append(f"error: {len(calls)} calls in one answer: {MAX_CALLS} at most, the others were not made")
        made = faults.count(None)
        values = {
            "valid": float(made == len(calls)),
            "tool_calls": float(made),
            "tool_errors": float(len(calls) - made + failed),
        }
        return Replies.of(_fitting(replies)), 0.0, False, False, values

    def close(self) -> None:
        """Close the objects that have a `close`."""
        for held in self._held:
            close = getattr(held, "close", None)
            if callable(close):
                with suppress(Exception):
                    close()
        self._held.clear()

    def _call(self, call: ToolCall) -> str:
        place = self._box.owner(call.name)
        assert place is not None
        assert isinstance(call.arguments, dict)
        return self._box.groups[place].call(self._held[place], call.name, call.arguments)


def _group(tool: str | tuple[str, ...], field: str, reach: str) -> PythonTools | McpTools:
    if isinstance(tool, str):
        return python_tools(tool, f"{field}.python", reach)
    return McpTools(tool, f"{field}.mcp")


def _same(reader: CallReader, text: str, back: str) -> bool:
    """Whether a text that went through the tokenizer has the call that it had."""
    if back == text:
        return True
    try:
        calls = reader.read(back)
        return bool(calls) and calls[:1] == reader.read(text)[:1]
    except UnreadableCallError:
        return False


def _fitting(replies: Sequence[str]) -> list[str]:
    """Replies that can be sent, together less than an observation may have."""
    whole = [whole_characters(reply).encode() for reply in replies]
    if sum(map(len, whole)) + len(whole) <= MAX_OBSERVATION_BYTES:
        return [text.decode() for text in whole]
    half = MAX_OBSERVATION_BYTES // (2 * len(whole)) - _MARK_BYTES
    return [text.decode() if len(text) <= 2 * half else _without_middle(text, half) for text in whole]


def _without_middle(text: bytes, half: int) -> str:
    head, tail = text[:half].decode(errors="ignore"), text[-half:].decode(errors="ignore")
    return f"{head} [... {len(text) - 2 * half} bytes left out ...] {tail}"


def _told(fault: str) -> str:
    """A fault of a policy's call as it reads it: a short text, whatever it wrote."""
    text = whole_characters(fault)
    return f"error: {text if len(text) <= _SHOWN else f'{text[:_SHOWN]}...'}"
