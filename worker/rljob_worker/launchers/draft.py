"""A manifest that is made from other settings, with an account of each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from rljob_api.how_many import how_many
from rljob_api.safe_text import visible_line

_SHOWN = 160
"""Characters of a value in the account."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a script or configuration."""

    name: str
    """Name as it is written there: `--num-rollout`, `data.train_batch_size`, `HCCL_DETERMINISTIC`."""
    value: object
    """Text or a list of texts of a script, a YAML value of a configuration."""
    unknown: tuple[str, ...] = ()
    """Expansions in it that only a run would resolve."""
    conditional: tuple[str, ...] = ()
    """Variables that it was made from and that a branch sets."""

    def __str__(self) -> str:
        value = " ".join(map(str, self.value)) if isinstance(self.value, list) else str(self.value)
        text = self.name if value == "" else f"{self.name} {value}"
        return visible_line(text if len(text) <= _SHOWN else text[:_SHOWN] + " ...")


@dataclass(frozen=True, slots=True)
class Line:
    """The account of one setting."""

    setting: str
    field: str
    """Field that it became, below `spec`; empty: none."""
    why: str = ""


@dataclass(slots=True)
class Draft:
    """The manifest so far."""

    spec: dict[str, object] = field(default_factory=dict)
    name: str | None = None
    """The job's name, where the settings have one."""
    lines: list[Line] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    """Fields that the other framework's defaults gave."""

    def put(self, setting: Setting, path: str, value: object, why: str = "") -> None:
        """Set a field below `spec`, and say what it follows from."""
        if setting.unknown:
            unknown = ", ".join(dict.fromkeys(setting.unknown))
            self.leave(setting, f"known only to a run: {unknown}; give --variable, or spec.{path}")
            return
        if setting.conditional:
            why = (
                f"{why}; " * bool(why) + f"{', '.join(setting.conditional)} is set within a branch: the last one counts"
            )
        self.assume(path, value)
        self.lines.append(Line(str(setting), path, why))

    def note(self, setting: Setting, path: str, why: str = "") -> None:
        """Say that a field, which is set already, follows from this setting too."""
        self.lines.append(Line(str(setting), path, why))

    def assume(self, path: str, value: object) -> None:
        """Set a field that follows from no single setting."""
        *folders, name = path.split(".")
        block = self.spec
        for folder in folders:
            inner = block.setdefault(folder, {})
            assert isinstance(inner, dict)
            block = inner
        block[name] = value

    def default(self, **values: object) -> None:
        """Set what nothing set, `__` for a point: defaults of the other framework."""
        for name, value in values.items():
            path = name.replace("__", ".")
            if value is not None and self.get(path) is None:
                self.assume(path, value)
                self.defaults.append(f"{path} {value}")

    def get(self, path: str) -> object:
        """A field's value; None where nothing set it."""
        found: object = self.spec
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def drop(self, path: str, why: str) -> None:
        """Take a block out again, and what was said of its fields."""
        outer, _, name = path.rpartition(".")
        block = self.get(outer) if outer else self.spec
        if isinstance(block, dict):
            block.pop(name, None)
        self.lines = [
            Line(line.setting, "", why) if f"{line.field}.".startswith(f"{path}.") else line for line in self.lines
        ]

    def leave(self, setting: Setting, why: str) -> None:
        """Take a setting over nowhere, and say why."""
        self.lines.append(Line(str(setting), "", why))


T = TypeVar("T")
Rule = Callable[[Draft, Setting], None]
"""Puts a setting into the draft, or leaves it with a reason; a ValueError says what is wrong with its value."""
Settings = Mapping[str, Setting]
"""The last setting of each name."""


def apply(draft: Draft, settings: Iterable[Setting], rules: Mapping[str, Rule], unknown: str) -> None:
    """Put all settings into the draft.

    Args:
        unknown: what is said of a setting without a rule.
    """
    for setting in settings:
        rule = rules.get(setting.name)
        if rule is None:
            draft.leave(setting, unknown)
            continue
        try:
            rule(draft, setting)
        except ValueError as error:
            draft.leave(setting, str(error))


@dataclass(frozen=True, slots=True)
class to:
    """The rule of a setting that has a field of its own."""

    path: str
    convert: Callable[[object], object]
    why: str = ""

    def __call__(self, draft: Draft, setting: Setting) -> None:
        """Put the converted value there."""
        draft.put(setting, self.path, setting.value if setting.unknown else self.convert(setting.value), self.why)


def drop_unused_critic(draft: Draft) -> None:
    """Leave the settings of a critic where the algorithm has none: configurations have them beside any algorithm."""
    if draft.get("algorithm.name") != "ppo":
        for block in ("critic", "algorithm.gae"):
            draft.drop(block, "the algorithm has no critic")


def count_rows_whole(draft: Draft) -> None:
    """Tokens of a micro-batch, which others count on each of the devices that divide one by context parallelism."""
    tokens, parts = draft.get("training.maxTokensPerMicroBatch"), draft.get("training.contextParallel")
    if isinstance(tokens, int) and isinstance(parts, int):
        draft.assume("training.maxTokensPerMicroBatch", tokens * parts)


def take(draft: Draft, setting: Setting | None, path: str, convert: Callable[[object], object], why: str = "") -> None:
    """Put one setting, if it is there, into the draft."""
    if setting is not None:
        apply(draft, [setting], {setting.name: to(path, convert, why)}, "")


def value_of(draft: Draft, setting: Setting | None, convert: Callable[[object], T], otherwise: T) -> T:
    """A setting's value; `otherwise` where it is not there, known only to a run, or none, of which the account then has
    the reason."""
    if setting is None or setting.unknown:
        return otherwise
    try:
        return convert(setting.value)
    except ValueError as error:
        draft.leave(setting, str(error))
        return otherwise


def account_for_all(draft: Draft, settings: Iterable[Setting]) -> None:
    """Leave the settings of which nothing was said: those that mean something only beside others."""
    said = {line.setting.partition(" ")[0] for line in draft.lines}
    for setting in settings:
        if visible_line(setting.name) not in said:
            draft.leave(setting, "without effect on what was taken over")


def nowhere(why: str) -> Rule:
    """The rule of a setting that has none."""
    return lambda draft, setting: draft.leave(setting, why)


def later(draft: Draft, setting: Setting) -> None:
    """The rule of a setting that means something only together with others."""


def text(value: object) -> str:
    """One text."""
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"has {how_many(len(value), 'value')}, one was expected")
        value = value[0]
    if value is None or isinstance(value, dict):
        raise ValueError("is no text")
    return str(value)


def number(value: object) -> int | float:
    """A number; text of one is read."""
    if isinstance(value, (bool, dict)):
        raise ValueError("is no number")
    said = value if isinstance(value, (int, float)) else text(value).replace("_", "")
    try:
        found = float(said)
    except ValueError:
        raise ValueError(f"{said!r} is no number") from None
    if not math.isfinite(found):
        raise ValueError(f"{said!r} is no finite number")
    return (
        int(found) if found == int(found) and not isinstance(value, float) and "e" not in str(said).lower() else found
    )


def memory(value: object) -> str:
    """Bytes as a quantity: 2147483648 is 2Gi."""
    count = whole(value)
    unit, name = next(((unit, name) for unit, name in ((2**30, "Gi"), (2**20, "Mi")) if count % unit == 0), (1, ""))
    return f"{count // unit}{name}"


def whole(value: object) -> int:
    """A whole number."""
    found = number(value)
    if found != int(found):
        raise ValueError(f"{found} is no whole number")
    return int(found)


def switch(value: object) -> bool:
    """True or false; a flag without a value is true."""
    if isinstance(value, bool):
        return value
    said = "" if value in ([], "") else text(value).lower()
    if said not in ("", "true", "false", "1", "0", "yes", "no"):
        raise ValueError(f"{said!r} is neither true nor false")
    return said in ("", "true", "1", "yes")


def one_of(names: Mapping[str, object], otherwise: str) -> Callable[[object], object]:
    """A value by name; another one is left, with `otherwise`."""

    def convert(value: object) -> object:
        said = text(value)
        if said not in names:
            raise ValueError(f"{said}: {otherwise}")
        return names[said]

    return convert


def listed(value: object) -> list[object]:
    """The values of a setting that has one or several."""
    return value if isinstance(value, list) else [value]


schedule = one_of({name: name for name in ("constant", "linear", "cosine")}, "constant, linear or cosine")
"""A learning-rate schedule, which all frameworks call alike."""
TRACKERS = ("wandb", "mlflow", "clearml", "swanlab", "trackio")
"""Experiment trackers of `spec.records.trackers`, which other frameworks call alike."""
