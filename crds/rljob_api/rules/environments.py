"""Environments of rows: what may be given to one, whatever kind it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rljob_api.quantities import to_number
from rljob_api.rules.findings import (
    FUNCTION,
    LEAST_MEMORY,
    Check,
    Finding,
    address_fault,
    argument_name,
    named_object,
    one_line,
)
from rljob_api.rules.variables import NEVER_GIVEN
from rljob_api.spec import GymnasiumSpec, OpenEnvSpec, TextEnvironmentSpec
from rljob_api.spec.episodes import PYTHON_OBJECT

_AGENT_ARGUMENTS = ("base_url", "token", "row")
_MOST_AGENTS = 400
_GYMNASIUM_ID = re.compile(r"([A-Za-z_][\w.]*:)?([\w-]+/)?[\w.-]+")


def _text_environment(environment: Any) -> Iterator[Finding]:
    if to_number(environment.memory) < LEAST_MEMORY:
        yield Finding(("memory",), "is too little for a process that imports Python", "at least 64Mi")
    for i, name in enumerate(environment.environment):
        if name in NEVER_GIVEN:
            yield Finding(("environment", i), f"{name} is never given to an environment", "another variable")
    if environment.gymnasium is not None and environment.args:
        yield Finding(("args",), "has no effect beside gymnasium", "gymnasium.kwargs")
    yield from named_object(("python",), environment.python, "package.module:Class, or ./file.py:Class")
    if environment.tools is not None and environment.args:
        yield Finding(("args",), "has no effect beside tools", "no args")
    if environment.openenv is not None:
        yield from _openenv(environment)
    if environment.agent is not None:
        yield from _agent(environment)
    for i, tool in enumerate(environment.tools or []):
        yield from named_object(("tools", i, "python"), tool.python, FUNCTION)
        for k, part in enumerate([] if tool.mcp is None else tool.mcp.command):
            if k == 0 and "/" not in part and (not part.strip() or len(part.split()) > 1):
                wrong = "is no program: each of its arguments is an item of the list"
                yield Finding(("tools", i, "mcp", "command", k), wrong, '["python", "server.py"]')
            if "\0" in part:
                yield Finding(("tools", i, "mcp", "command", k), "holds a NUL character", "a program, or an argument")
    for name in environment.args if environment.python is not None or environment.agent is not None else ():
        if name == "self" and environment.python is not None:
            yield Finding(("args", name), "is what Python calls the object itself", "another name")
        else:
            yield from argument_name("args", name)


def _agent(environment: Any) -> Iterator[Finding]:
    if re.fullmatch(PYTHON_OBJECT, environment.agent.python):
        yield from named_object(("agent", "python"), environment.agent.python, FUNCTION)
    else:
        yield Finding(("agent", "python"), "names no function", FUNCTION)
    for name in environment.args:
        if name in _AGENT_ARGUMENTS:
            yield Finding(("args", name), "is given to every agent already", "another name")
    if not environment.network:
        wrong = "false leaves it no loopback address, on which it calls the policy"
        yield Finding(("network",), wrong, "true (a NetworkPolicy closes the pod's network)")
    if environment.deterministic:
        wrong = "an agent that was lost is not made anew by what was answered"
        yield Finding(("deterministic",), wrong, "false with agent")
    if environment.per_process > _MOST_AGENTS:
        wrong = "is more than a process has files for: each call of an agent holds two of 1,024"
        yield Finding(("perProcess",), wrong, f"{_MOST_AGENTS} at most, and more processes")
    for i, field in enumerate(environment.agent.ignore):
        if field in environment.agent.ignore[:i]:
            yield Finding(("agent", "ignore", i), "is there already", "each field once")


def _openenv(environment: Any) -> Iterator[Finding]:
    if environment.args:
        yield Finding(("args",), "has no effect beside openenv", "no args")
    if not environment.network:
        yield Finding(("network",), "false keeps its server from being reached", "true")
    if environment.openenv.wait_seconds >= environment.reset_seconds:
        wrong = "is not over when a reset has to be"
        yield Finding(("openenv", "waitSeconds"), wrong, f"less than resetSeconds, {environment.reset_seconds:g}")


def _gymnasium(gymnasium: Any) -> Iterator[Finding]:
    if not _GYMNASIUM_ID.fullmatch(gymnasium.id):
        yield Finding(("id",), "is no id of gymnasium", "like FrozenLake-v1, or package.module:Name-v0")
    for name in gymnasium.made_with:
        if name == "id":
            yield Finding(("kwargs", name), "is given to gymnasium.make already", "another name")
        elif name == "render_mode" and gymnasium.made_with[name] == "human":
            yield Finding(("kwargs", name), "opens a window, and returns no text", "ansi, or leave it out")
        else:
            yield from argument_name("kwargs", name)


def _openenv_address(openenv: Any) -> Iterator[Finding]:
    if wrong := address_fault(openenv.url):
        yield Finding(("url",), wrong, "like http://server:8000")
    elif openenv.url.rstrip("/").endswith("/ws"):
        yield Finding(("url",), "ends with /ws, which is added to it", "the address before it")


ENVIRONMENT_CHECKS: dict[type, tuple[Check, ...]] = {
    GymnasiumSpec: (_gymnasium,),
    OpenEnvSpec: (one_line("action", "observation"), _openenv_address),
    TextEnvironmentSpec: (_text_environment,),
}
