"""Calls of tools out of what a policy wrote, by vLLM's parsers. Runs in the environment hosts alone."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rljob_worker.data.turns import Schema
from rljob_worker.errors import UserError

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike
    from vllm.tool_parsers.abstract_tool_parser import Tool

_LOGGER = "vllm"
_MARKERS = (
    "tool_calls_start_token", "tool_call_start_token", "function_start_token", "tool_call_prefix", "bot_token",
    "bot_string", "tc_start",
)  # fmt: skip
"""Attributes in which vLLM's parsers have the text with which a call begins."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as a policy wrote it, of which nothing has been checked."""

    name: str
    arguments: object


class UnreadableCallError(ValueError):
    """An answer begins a call that cannot be read; the text says why."""


class CallReader:
    """Reads calls by one of vLLM's parsers.

    Args:
        parser: its name.
        tokenizer: folder of the model's tokenizer, which some parsers look into.
        schemas: of the tools, as a chat template gets them.

    Raises:
        UserError: there is no such parser, or it needs tokens that the tokenizer does not have.
    """

    def __init__(self, parser: str, tokenizer: str, schemas: Sequence[Schema]) -> None:
        # What it prints at import and at each unreadable call is told otherwise.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        # Its import takes seconds: no other host needs it.
        from transformers import AutoTokenizer
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        try:
            kind = ToolParserManager.get_tool_parser(parser)
        except KeyError:
            known = ", ".join(sorted(ToolParserManager.list_registered()))
            raise UserError(
                f"spec.episodes.toolParser: this vLLM has no tool parser {parser!r}; it has {known}"
            ) from None
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)
        self._request = ChatCompletionRequest(
            model="policy",
            messages=[{"role": "user", "content": "-"}],
            tools=[dict(schema) for schema in schemas],
            tool_choice="auto",
        )
        try:
            self._parser = kind(cast("TokenizerLike", self.tokenizer), cast("list[Tool]", self._request.tools))
        except Exception as error:
            raise UserError(
                f"spec.episodes.toolParser: {parser!r} cannot be used with the model's tokenizer: {error}"
            ) from None
        self._markers = [text for name in _MARKERS if isinstance(text := getattr(self._parser, name, None), str)]
        self._said = _Said()
        logger = logging.getLogger(_LOGGER)
        logger.handlers, logger.propagate = [self._said], False

    def read(self, answer: str) -> list[ToolCall]:
        """The calls of an answer, none where it has none.

        Raises:
            UnreadableCallError: it begins one that cannot be read.
        """
        self._said.texts.clear()
        try:
            found = self._parser.extract_tool_calls(answer, self._request)
            calls = [ToolCall(call.function.name, _arguments(call.function.arguments)) for call in found.tool_calls]
        except Exception as error:
            raise UnreadableCallError(f"{type(error).__name__}: {error}") from None
        if calls and found.tools_called:
            return calls
        if self._said.texts:
            raise UnreadableCallError(self._said.texts[0])
        if any(marker and marker in answer for marker in self._markers):
            raise UnreadableCallError("it is not of the form that is read here")
        return []


def _arguments(text: str) -> object:
    """Arguments that are JSON: no tool is called with NaN, infinity or half a character (`\\ud83d`), which is none."""
    found: object = json.loads(text)
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    return found


class _Said(logging.Handler):
    """Keeps what parsers report of an answer: most of them raise nothing."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.texts.append(record.getMessage() if error is None else f"{type(error).__name__}: {error}")
