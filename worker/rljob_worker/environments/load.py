"""From what names an environment to one: built in, of gymnasium, or a class of the user's.

Runs in the environment hosts alone: code of a user is imported nowhere else.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

from rljob_api.environments import BuiltIn
from rljob_worker.confined.loading import load_named
from rljob_worker.environments.base import AgentSource, BuiltInEnvironment, Playable
from rljob_worker.environments.tools import Toolbox, ToolSource
from rljob_worker.errors import UserError

if TYPE_CHECKING:
    from rljob_api.base import ApiModel

Make = Callable[[], Playable]
"""Makes an environment for an episode."""
Settings = TypeVar("Settings", bound="ApiModel")
REACH = (
    "an environment reads its own folder, the working directory and Python packages, and writes to its temporary "
    "folder (TMPDIR)"
)


@dataclass(frozen=True, slots=True)
class Source:
    """Names an environment: exactly one of the first six."""

    name: str | None = None
    """One that is built in."""
    python: str | None = None
    """`FILE.py:Class` or `package.module:Class`."""
    gymnasium: Mapping[str, object] | None = None
    """Settings of `GymnasiumSpec`."""
    openenv: Mapping[str, object] | None = None
    """Settings of `OpenEnvSpec`."""
    tools: ToolSource | None = None
    """Tools that a policy may call."""
    agent: AgentSource | None = None
    """A program that calls the policy."""
    args: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the environment that is built in, or of the class."""

    def title(self) -> str:
        """It in a few words."""
        if self.tools is not None:
            named = (one if isinstance(one, str) else " ".join(one) for one in self.tools.tools)
            return f"tools {', '.join(named)}"
        if self.agent is not None:
            return f"agent {self.agent.python}"
        return str(self.name or self.python or (self.gymnasium or {}).get("id") or (self.openenv or {}).get("url"))


def maker(source: Source) -> Make:
    """A function that makes a new environment, which nothing has used.

    Args:
        source: what it is.

    Raises:
        UserError: it cannot be used; the message begins with `environment`.
    """
    if source.name is not None:
        return _builtin(source.name, source.args)
    if source.tools is not None:
        return Toolbox(source.tools, REACH)
    if source.agent is not None:
        from rljob_worker.environments.agent import Agents

        return Agents(source.agent, REACH)
    if source.openenv is not None:
        from rljob_api.spec import OpenEnvSpec
        from rljob_worker.environments.openenv import OpenEnvServer

        return OpenEnvServer(_settings(OpenEnvSpec, source.openenv, "environment.openenv"))
    if source.gymnasium is not None:
        # Models take longer to import than all else that a host of the user's own class needs.
        from rljob_api.spec import GymnasiumSpec
        from rljob_worker.environments.gymnasium_adapter import GymnasiumEnvironment

        settings = _settings(GymnasiumSpec, source.gymnasium, "environment.gymnasium")
        return lambda: GymnasiumEnvironment(settings)
    assert source.python is not None
    return _class(source.python, source.args)


def _builtin(name: str, args: Mapping[str, object]) -> Make:
    if name not in [one.value for one in BuiltIn]:
        raise UserError(
            f"environment.name: there is no {name!r}; built in are {' and '.join(BuiltIn)}, and your own is named by "
            "FILE.py:Class"
        )
    module = importlib.import_module(f"{__package__}.{BuiltIn(name).name.lower()}")
    made: BuiltInEnvironment[ApiModel] = module.ENVIRONMENT
    settings = _settings(made.settings, args, "environment.args")
    return lambda: made.make(settings)


def _settings(model: type[Settings], given: Mapping[str, object], where: str) -> Settings:
    from pydantic import ValidationError

    try:
        # As a manifest's own fields are read: no number is taken from a text.
        return model.model_validate_json(json.dumps(dict(given)), strict=True)
    except ValidationError as error:
        found = []
        for one in error.errors():
            path = ".".join(map(str, (where, *one["loc"])))
            known = ", ".join(field.alias or name for name, field in model.model_fields.items())
            unknown = one["type"] == "extra_forbidden" and len(one["loc"]) == 1
            found.append(
                f"{path}: there is no such argument; there are {known}" if unknown else f"{path}: {one['msg']}"
            )
        raise UserError("; ".join(found)) from None


def _class(path: str, args: Mapping[str, object]) -> Make:
    kind: object = load_named(path, "environment.python", "Class", REACH)
    if not inspect.isclass(kind):
        raise UserError(f"environment.python: {path!r} is not a class but {type(kind).__name__}")
    _check_arguments(kind, path, args)
    called: tuple[tuple[str, str, Sequence[object], Mapping[str, object]], ...] = (
        ("reset", "reset(seed=..., options=...)", (), {"seed": 0, "options": {}}),
        ("step", "step(action)", ("text",), {}),
    )
    for method, shown, given, named in called:
        function = getattr(kind, method, None)
        if not callable(function):
            raise UserError(f"environment.python: {path!r} has no method {method}: it needs reset and step")
        if inspect.iscoroutinefunction(function):
            raise UserError(f"environment.python: {path!r}: {method} is async: it must be a plain method")
        # An object is what a plain method gets first.
        is_bound = isinstance(inspect.getattr_static(kind, method), staticmethod | classmethod)
        _check_method(function, path, shown, given if is_bound else (None, *given), named)
    made = cast(Callable[..., Playable], kind)
    return lambda: made(**args)


def _check_arguments(kind: type, path: str, args: Mapping[str, object]) -> None:
    try:
        signature = inspect.signature(kind)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        raise UserError(
            f"environment.args: {path!r} is made as {kind.__name__}(**args), which fails: {error}"
        ) from None


def _check_method(
    function: Callable[..., object], path: str, shown: str, given: Sequence[object], named: Mapping[str, object]
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        raise UserError(f"environment.python: {path!r} is called as {shown}, which fails: {error}") from None
