"""Tests of a program, in a process that has none of it: `solution` is a module whose calls are answered in another.

What comes back are plain values, and objects that stay where they are: comparing one with `==` asks whether it is the
same, and nothing of the program.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rljob_worker.sandbox.channel import Channel
from rljob_worker.sandbox.plain import pack, unpack

TESTS = "test_solution.py"
_OPTIONS = (
    "-q", "-c", os.devnull, "--rootdir=.", "--confcutdir=.", "--noconftest", "-p", "no:cacheprovider", "--tb=no",
    "--import-mode=importlib", "--capture=sys",
)  # fmt: skip


def warm() -> None:
    """Have pytest load what it loads with its first run, in an empty folder."""
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        pytest.main([*_OPTIONS])


def test(channel: Channel, what: dict[str, Any]) -> None:
    """Run the tests, and report `{"tests": [collected, passed, skipped], "raised": TEXT or null}`."""
    import pytest

    # What is collected is told by the file's text, whatever the calls answer.
    Path(TESTS).write_text(what["source"], encoding="utf-8", errors="surrogateescape")
    sys.modules["solution"] = _Solution(channel, what["names"]).module()
    report = _Report()
    pytest.main([*_OPTIONS, TESTS], plugins=[report])
    channel.send({"tests": [report.collected, report.passed, report.skipped], "raised": report.raised})


class _Report:
    """A plugin that counts."""

    def __init__(self) -> None:
        self.collected = self.passed = self.skipped = 0
        self.raised: str | None = None
        self._failed: set[str] = set()
        self._called: set[str] = set()

    def pytest_collection_finish(self, session: Any) -> None:
        """All tests are known."""
        self.collected = len(session.items)

    def pytest_collectreport(self, report: Any) -> None:
        """The file's import failed, or not."""
        if report.failed:
            self.raised = str(report.longrepr)[-500:]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One of a test's three phases ended; it has passed when all have, and is called once."""
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
            self._called.add(report.nodeid)
        if report.skipped and report.when == "setup" and not hasattr(report, "wasxfail"):
            self.skipped += 1
        if report.when == "teardown" and report.nodeid in self._called - self._failed:
            self.passed += 1


class _Solution:
    """The program, as its tests import it."""

    def __init__(self, channel: Channel, names: dict[str, object]) -> None:
        self._channel, self._kinds = channel, names
        self._errors = {name: self._error(name, kind) for name, kind in names.items() if isinstance(kind, dict)}

    def module(self) -> ModuleType:
        """A module without names of its own."""
        module = ModuleType("solution")
        module.__dict__["__getattr__"] = self._name
        module.__dict__["__all__"] = [name for name in self._kinds if name.isidentifier() and name[0] != "_"]
        return module

    def _name(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._errors:
            return self._errors[name]
        # A method of a class `Solution` is a function too.
        return self.ask(None, name) if self._kinds.get(name) == "get" else _Function(self, None, name)

    def ask(self, on: int | None, name: str, *call: object) -> object:
        """The value of a name, or what a call of it with (args, kwargs) returns; raises what that raises."""
        request: dict[str, object] = {"on": on, "name": name}
        if call:
            request |= {"args": pack(call[0], _number), "kwargs": pack(call[1], _number)}
        self._channel.send(request)
        answer = self._channel.receive()
        if "raised" in answer:
            own, base, text = map(str, answer["raised"])
            raise self._errors.get(own, _exception(base))(text)
        return unpack(answer["value"], self._object)

    def _error(self, name: str, kind: dict[str, object]) -> type[Exception]:
        return type(str(name), (_exception(str(kind["raises"])),), {})

    def _object(self, name: str, content: Any) -> object:
        number, kind = content
        if name != "object" or type(number) is not int:
            raise ValueError("no packed value")
        return _Object(self, number, str(kind))


def _exception(name: str) -> type[Exception]:
    found = getattr(builtins, name, None)
    # An exit, or what ends pytest, is not the program's to raise here.
    return found if isinstance(found, type) and issubclass(found, Exception) else RuntimeError


def _number(value: object) -> object:
    if isinstance(value, _Object):
        return {"object": value._number}
    raise TypeError(f"a {type(value).__name__} cannot be given to the solution, which runs in another process")


class _Function:
    def __init__(self, solution: _Solution, on: int | None, name: str) -> None:
        self._solution, self._on, self._name = solution, on, name

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._solution.ask(self._on, self._name, args, kwargs)


class _Object:
    """One that the program made and keeps."""

    def __init__(self, solution: _Solution, number: int, kind: str) -> None:
        self._solution, self._number, self._kind = solution, number, kind

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._solution.ask(self._number, name)
        # A method: it is called where its object is.
        return _Function(self._solution, self._number, name) if _is_method(value) else value

    def __len__(self) -> int:
        return int(str(self._solution.ask(self._number, "__len__", (), {})))

    def __bool__(self) -> bool:
        return self._solution.ask(self._number, "__bool__", (), {}) is True

    def __getitem__(self, key: object) -> object:
        return self._solution.ask(self._number, "__getitem__", (key,), {})

    def __setitem__(self, key: object, value: object) -> None:
        self._solution.ask(self._number, "__setitem__", (key, value), {})

    def __contains__(self, value: object) -> bool:
        return bool(self._solution.ask(self._number, "__contains__", (value,), {}))

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._solution.ask(self._number, "__call__", args, kwargs)

    def __repr__(self) -> str:
        return f"<{self._kind} of the solution>"


def _is_method(value: object) -> bool:
    return isinstance(value, _Object) and value._kind in ("method", "builtin_function_or_method", "function")
