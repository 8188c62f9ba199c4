"""An environment: gymnasium's interface with text for observations and actions.

Imported by the environment hosts: keep it light.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from rljob_api.how_many import how_many

MAX_OBSERVATION_BYTES = 2**20
MAX_ACTION_BYTES = 2**20
MAX_VALUES = 32
MAX_STREAMS = 4096
MAX_EXAMPLES = 2**16
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of the messages of an agent's calls."""
_LARGEST = (2 - 2**-23) * 2.0**127
"""Largest number of fp32, in which rewards are trained on."""
_SHOWN = 80


class GoneError(Exception):
    """Something that an environment needs is gone, such as a server: its process ends, and is replaced."""


class Replies(str):
    """An observation of several messages; as a text, each is on lines of its own."""

    parts: tuple[str, ...]
    """The messages."""

    @classmethod
    def of(cls, parts: Sequence[str]) -> Replies:
        """These messages as one text."""
        text = cls("\n".join(parts))
        text.parts = tuple(parts)
        return text


@dataclass(frozen=True, slots=True)
class AgentSource:
    """An agent, and how it is called."""

    python: str
    """`FILE.py:function` or `package.module:function`."""
    ignore: tuple[str, ...] = ()
    """Fields of its requests that are left alone where they would be refused."""
    args: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of the function."""


@dataclass(frozen=True, slots=True)
class AgentCall:
    """Call of an agent to the policy.

    Attributes:
        stream: number of the sample's stream that the answer is in; one that is not there begins with this.
        messages: role and text of those that are appended to it.
    """

    stream: int
    messages: tuple[tuple[str, str], ...]


class Asked(str):
    """An observation that is an agent's call; as a text, it is for people."""

    call: AgentCall

    @classmethod
    def of(cls, text: str, call: AgentCall) -> Asked:
        """A call with its text."""
        asked = cls(text)
        asked.call = call
        return asked


class CutAnswer(str):
    """An action that was cut at the longest answer allowed."""


class TextEnvironment(Protocol):
    """One episode after the other; what is written as `FILE.py:Class`, a class whose objects do this.

    An object is used by one thread, and is given up after an exception.
    """

    def reset(self, *, seed: int, options: Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
        """Begin an episode.

        Args:
            seed: all that is drawn in the episode follows from it.
            options: empty, or what a row of the data has.

        Returns:
            The first observation, and `info`: numbers by name are recorded, what else is in it is left alone.
        """

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, object]]:
        """Answer what the policy wrote, whatever that is.

        Args:
            action: the policy's text, without the token that ended it.

        Returns:
            Observation, reward, whether the episode has ended (terminated), whether it was cut off (truncated), `info`.
        """

    def close(self) -> None:
        """Give back what it holds; called once, also after an exception. Optional."""


class Playable(Protocol):
    """An environment as hosts call it, of which nothing has been checked: code of a user may return anything."""

    def reset(self, *, seed: int, options: Mapping[str, object]) -> object:
        """See `TextEnvironment`."""

    def step(self, action: str) -> object:
        """See `TextEnvironment`."""


Settings = TypeVar("Settings")


@dataclass(frozen=True, slots=True)
class BuiltInEnvironment(Generic[Settings]):
    """`ENVIRONMENT` of the module of an environment that a manifest names.

    Attributes:
        settings: model of `environment.args`.
        make: makes an environment with these settings, for one episode after the other.
    """

    settings: type[Settings]
    make: Callable[[Settings], Playable]


@dataclass(frozen=True, slots=True)
class Began:
    """Result of `reset`."""

    observation: str
    values: Mapping[str, float] = field(default_factory=dict)
    """Numbers of `info`, by name."""
    call: AgentCall | None = field(default=None, compare=False)
    """Call of an agent, of which the observation is the text; None: it is none."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """Result of `step`."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    values: Mapping[str, float] = field(default_factory=dict)
    """Numbers of `info`, by name."""
    parts: tuple[str, ...] = field(default=(), compare=False)
    """The messages of the observation, where those are several."""
    call: AgentCall | None = field(default=None, compare=False)
    """Its call, as in `Began`; None also where it asks no more."""

    @property
    def done(self) -> bool:
        """Whether no further step is possible."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True)
class Reset:
    """Asks a host for a new environment's first observation."""

    seed: int
    options: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Step:
    """Asks it for the answer to an action."""

    action: str
    cut: bool = False
    """Whether the action was cut at the longest answer allowed."""

    def __reduce__(self) -> tuple[type[Step], tuple[str, bool]]:
        """Pickle by the constructor: a dataclass with slots looks for its fields each time, hundreds in a turn."""
        return Step, (self.action, self.cut)


@dataclass(frozen=True, slots=True)
class Close:
    """Asks it to close an environment."""


Call = Reset | Step | Close


class FailureKind(StrEnum):
    """Why an environment gave no answer."""

    INFRA = "infra"
    """Its process died, or was ended past a deadline or over a bound, more often than is tried again."""
    DATA = "data"
    """It raised, or returned what is no observation, reward or end."""
    REPLAY = "replay"
    """Made anew by its seed and actions it gave something else than before."""


@dataclass(frozen=True, slots=True)
class EnvironmentFailure:
    """Stands in the place of an answer."""

    kind: FailureKind
    text: str


Answer = Began | Stepped | EnvironmentFailure


def checked_began(value: object) -> Began:
    """Checked result of `reset`; ValueError says what is wrong with it."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"reset returned {_shown(value)}, not (observation, info)")
    call = value[0].call if isinstance(value[0], Asked) else None
    return Began(checked_observation(value[0], "reset"), checked_values(value[1], "reset"), call)


def checked_step(value: object) -> Stepped:
    """Checked result of `step`; ValueError says what is wrong with it."""
    if not isinstance(value, tuple | list) or len(value) != 5:
        raise ValueError(f"step returned {_shown(value)}, not (observation, reward, terminated, truncated, info)")
    observation, reward, terminated, truncated, info = value
    return Stepped(
        checked_observation(observation, "step"),
        _checked_number(reward, "the reward"),
        _checked_flag(terminated, "terminated"),
        _checked_flag(truncated, "truncated"),
        checked_values(info, "step"),
        observation.parts if isinstance(observation, Replies) else (),
        observation.call if isinstance(observation, Asked) else None,
    )


def checked_call(value: object) -> AgentCall | None:
    """An agent's call as its host sent it, `[stream, [[role, text], ...]]` or None; ValueError where it is none."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("a call of another form")
    stream, messages = value
    # The one behind the last may be called, though no turn is left for its answer.
    if not isinstance(stream, int) or isinstance(stream, bool) or not 0 <= stream <= MAX_STREAMS:
        raise ValueError(f"a call in the stream {_shown(stream)}")
    if not isinstance(messages, list) or not messages:
        raise ValueError("a call without messages")
    found = []
    for message in messages:
        if not isinstance(message, list) or len(message) != 2 or message[0] not in ROLES:
            raise ValueError(f"a call with the message {_shown(message)}")
        found.append((str(message[0]), checked_observation(message[1], "the agent")))
    return AgentCall(stream, tuple(found))


def checked_examples(value: object) -> list[str]:
    """Answers that an environment calls valid; ValueError where they are no texts, or too many."""
    if value is None:
        return []
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ValueError(f"examples is {_shown(value)}: a list of texts is needed")
    found = list(itertools.islice(value, MAX_EXAMPLES + 1))
    if len(found) > MAX_EXAMPLES:
        raise ValueError(f"examples has more than {MAX_EXAMPLES} texts")
    # Numbers are texts that a policy might write.
    return [checked_observation(one if isinstance(one, str) else str(one), "examples") for one in found]


def checked_observation(value: object, method: str) -> str:
    """An observation; ValueError where it is no text, or has no UTF-8, or more than 1 MiB of it."""
    if isinstance(value, str) and value.isascii() and len(value) <= MAX_OBSERVATION_BYTES:
        return value
    if not isinstance(value, str):
        raise ValueError(f"{method} returned the observation {_shown(value)}, which is no text: a str is needed")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{method} returned an observation that is no text: {error.reason}") from None
    if size > MAX_OBSERVATION_BYTES:
        raise ValueError(f"{method} returned an observation of {size} bytes: {MAX_OBSERVATION_BYTES} at most")
    return value


def checked_values(info: object, method: str) -> dict[str, float]:
    """The numbers of an `info`; ValueError where it is no mapping, or one of its numbers is not finite."""
    if not isinstance(info, Mapping):
        raise ValueError(f"{method} returned the info {_shown(info)}: a dict is needed")
    found: dict[str, float] = {}
    for name, value in info.items():
        if not isinstance(name, str) or not _is_number(value):
            continue
        found[name] = _checked_number(value, f"info[{name!r}]")
    if len(found) > MAX_VALUES:
        raise ValueError(f"{method} returned {how_many(len(found), 'number')} in its info: {MAX_VALUES} at most")
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) or getattr(value, "shape", None) == ()


def _checked_number(value: object, name: str) -> float:
    if type(value) is float and -_LARGEST <= value <= _LARGEST:
        return value
    # Scalars of numpy and torch.
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        value = item()
    if not isinstance(value, numbers.Real):
        raise ValueError(f"{name} is {_shown(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > _LARGEST:
        raise ValueError(f"{name} is {number:g}, which is not finite in fp32")
    return number


def _checked_flag(value: object, name: str) -> bool:
    # numpy has its own.
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise ValueError(f"{name} is {_shown(value)}: True or False is needed")


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= _SHOWN else text[: _SHOWN - 3] + '...'} ({type(value).__name__})"
