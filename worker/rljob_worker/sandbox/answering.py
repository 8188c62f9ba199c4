"""Calls of a program's functions, from another process: arguments come and results go as plain data.

A request is `{"on": NUMBER or null, "name": NAME, "args": [...], "kwargs": {...}}`, or without `args` to be given what
the name stands for. It is answered by `{"value": ...}` or `{"raised": [TYPE, TEXT]}`. What is no plain value stays
here, and goes as `{"object": [NUMBER, TYPE]}`.
"""

from __future__ import annotations

import builtins
import inspect
from types import ModuleType
from typing import Any

from rljob_worker.sandbox.channel import Channel, load
from rljob_worker.sandbox.plain import pack, unpack

_TEXT = 300


def answer(channel: Channel, source: str) -> None:
    """Load a program, say what it has, and answer calls until the other end is closed."""
    calls = _Calls()
    try:
        module = load(source, "solution")
        channel.send({"names": {name: calls.kind(value) for name, value in _public(module)}})
    except BaseException as error:
        channel.send(_raised(error))
        return
    while True:
        try:
            request = channel.receive()
        except EOFError:
            return
        try:
            message = {"value": calls.result(module, request)}
        except BaseException as error:
            message = _raised(error)
        channel.send(message)


class _Calls:
    def __init__(self) -> None:
        self._objects: dict[int, object] = {}

    def result(self, module: ModuleType, request: dict[str, Any]) -> Any:
        on = module if request["on"] is None else self._objects[request["on"]]
        name = request["name"]
        if name == "__bool__":
            # By the rules of Python: types need not have the method.
            return bool(on)
        if on is module and not hasattr(module, name) and isinstance(getattr(module, "Solution", None), type):
            # As LeetCode has it.
            on = module.Solution()
        value = getattr(on, name)
        if "args" in request:
            args, kwargs = unpack(request["args"], self._given), unpack(request["kwargs"], self._given)
            value = value(*args, **kwargs)
        if inspect.isgenerator(value):
            value = list(value)
        return pack(value, self._kept)

    def kind(self, value: object) -> object:
        """Form in which the other end is to show what a name of the program stands for."""
        if isinstance(value, type):
            return {"raises": _base(value)} if issubclass(value, Exception) else "call"
        return "call" if callable(value) else "get"

    def _kept(self, value: object) -> object:
        number = len(self._objects)
        self._objects[number] = value
        return {"object": [number, type(value).__name__]}

    def _given(self, name: str, content: Any) -> Any:
        if name != "object":
            raise ValueError(name)
        return self._objects[content]


def _public(module: ModuleType) -> list[tuple[str, object]]:
    return [(name, value) for name, value in vars(module).items() if not name.startswith("__")]


def _base(error: type) -> str:
    """The nearest of Python's own exceptions that it is."""
    return next(base.__name__ for base in error.__mro__ if getattr(builtins, base.__name__, None) is base)


def _raised(error: BaseException) -> dict[str, Any]:
    try:
        text = str(error)[:_TEXT]
    except BaseException:
        text = ""
    return {"raised": [type(error).__name__, _base(type(error)), text]}
