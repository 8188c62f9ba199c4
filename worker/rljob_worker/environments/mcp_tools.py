"""Tools of an MCP server that is started beside them and spoken to over its standard input and output.

The server is a child of the environment host: it has the host's bounds and variables, and ends with it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rljob_worker.data.turns import Schema
from rljob_worker.environments.base import GoneError
from rljob_worker.environments.python_tools import ToolError
from rljob_worker.errors import UserError

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp.types import ListToolsResult, Tool

T = TypeVar("T")
START_SECONDS = 60.0
"""A server's first answer, and its list of tools."""
_CLIENT = "mcp.client.stdio"
"""Logger of the package."""
_MOST_PAGES = 100
"""Pages of a list of tools."""
_CONNECTION_CLOSED, _INVALID_PARAMS = -32000, -32602
"""Codes of JSON-RPC."""
_GONE = ("ClosedResourceError", "BrokenResourceError", "EndOfStream")
_SHOWN = 500


class McpTools:
    """The tools of one server, which all episodes of a host share.

    Args:
        command: starts the server.
        field: of the manifest, which begins a message.

    Raises:
        UserError: the package `mcp` is missing, or the server does not start, answer or have tools.
    """

    def __init__(self, command: Sequence[str], field: str) -> None:
        self._command, self._stack = " ".join(command), ExitStack()
        self.close = self._stack.close
        """Ends the server."""
        try:
            # Its import takes a second.
            from anyio.from_thread import start_blocking_portal
            from mcp import ClientSession, StdioServerParameters
            from mcp.client.stdio import stdio_client
        except ImportError as error:
            raise UserError(
                f"{field}: the package mcp is not installed ({error}), which vLLM brings: pip install mcp"
            ) from None
        logging.getLogger(_CLIENT).addFilter(_in_a_line)
        # `python` is the one that runs here, which has the package.
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        server = StdioServerParameters(command=command[0], args=list(command[1:]), env={**os.environ, "PATH": path})
        self._portal = self._stack.enter_context(start_blocking_portal())
        try:
            streams = self._stack.enter_context(self._portal.wrap_async_context_manager(stdio_client(server)))
            session = ClientSession(streams[0], streams[1])
            self._session = self._stack.enter_context(self._portal.wrap_async_context_manager(session))
            self._within(self._session.initialize)
            tools = self._listed(self._session)
        except TimeoutError:
            self.close()
            raise UserError(f"{field}: {self._command} gave no answer within {START_SECONDS:g} s") from None
        except Exception as error:
            self.close()
            raise UserError(f"{field}: {self._command} is no MCP server: {_short(error)}") from None
        if not tools:
            self.close()
            raise UserError(f"{field}: {self._command} has no tools")
        self.schemas: Mapping[str, Schema] = {tool.name: _schema(tool) for tool in tools}
        if len(self.schemas) < len(tools):
            self.close()
            names = [tool.name for tool in tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{field}: {self._command} has two tools {twice!r}: a call could not tell them apart")

    def make(self) -> None:
        """An episode has nothing of its own there."""

    def reset(self, held: object, row: Mapping[str, object]) -> None:
        """Do nothing: a server has no episodes."""

    def call(self, held: object, name: str, arguments: Mapping[str, object]) -> str:
        """Call a tool; its text.

        Raises:
            GoneError: the server is not there any more.
            ToolError: the tool says that it failed, or the server that it does not take the arguments.
            ValueError: it returned something else than text.
        """
        try:
            result = self._portal.call(self._session.call_tool, name, dict(arguments))
        except Exception as error:
            code = getattr(getattr(error, "error", error), "code", None)
            # The package's two versions say in different places that there is no connection any more.
            if code == _CONNECTION_CLOSED or type(error).__name__ in _GONE:
                raise GoneError(f"the MCP server {self._command} ended: {_short(error)}") from None
            if code == _INVALID_PARAMS:
                raise ToolError(_short(error)) from None
            raise
        texts = []
        for content in result.content:
            if content.type != "text":
                raise ValueError(f"tool {name} of {self._command} returned {content.type}, which is no text")
            texts.append(content.text)
        structured = getattr(result, "structured_content", None) or getattr(result, "structuredContent", None)
        # A server ought to say it as a text, too.
        said = "\n".join(texts) if texts or structured is None else json.dumps(structured, ensure_ascii=False)
        if getattr(result, "isError", False) or getattr(result, "is_error", False):
            raise ToolError(said)
        return said

    def _within(self, ask: Callable[[], Awaitable[T]]) -> T:
        import anyio

        async def bounded() -> T:
            with anyio.fail_after(START_SECONDS):
                return await ask()

        return self._portal.call(bounded)

    def _listed(self, session: ClientSession) -> list[Tool]:
        """The tools of all pages."""
        from mcp.types import PaginatedRequestParams

        page = self._within(session.list_tools)
        tools, seen = list(page.tools), set[str]()
        while cursor := _next(page):
            if cursor in seen or len(seen) == _MOST_PAGES:
                raise ValueError(f"its list of tools has no end: page {cursor!r:.80} comes again and again")
            seen.add(cursor)
            page = self._within(partial(session.list_tools, params=PaginatedRequestParams(cursor=cursor)))
            tools += page.tools
        return tools


def _schema(tool: Tool) -> Schema:
    whole = tool.model_dump(by_alias=True)
    parameters = whole["inputSchema"]
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _in_a_line(record: logging.LogRecord) -> bool:
    """Log without a traceback that a server writes what is no message: one that logs there does so at each call."""
    if record.exc_info and record.exc_info[1] is not None:
        said = " ".join(str(record.exc_info[1]).split())
        record.msg, record.args = f"{record.getMessage()}: {said[:_SHOWN]}", ()
        record.exc_info = record.exc_text = None
    return True


def _next(page: ListToolsResult) -> str | None:
    """Name of the page after this one, which the package's two versions spell differently."""
    found: str | None = getattr(page, "next_cursor", None) or getattr(page, "nextCursor", None)
    return found


def _short(error: BaseException) -> str:
    inner = error
    while isinstance(inner, BaseExceptionGroup) and inner.exceptions:
        inner = inner.exceptions[0]
    return f"{type(inner).__name__}: {inner}"[:_SHOWN]
