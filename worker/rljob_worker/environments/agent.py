"""Agents: a program of the user's, which calls the policy as a model behind OpenAI's chat completions.

Runs in the environment hosts alone. An agent is an environment the other way round: what it asks is an observation, the
policy's answer to it an action. Each episode has a thread, a token, and streams: a call whose messages go on from an
answer continues that answer's stream, any other one opens a further stream.
"""

from __future__ import annotations

import asyncio
import inspect
import numbers
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rljob_worker.confined.loading import load_named
from rljob_worker.environments.agent_door import AgentDoor, Call, Entrance, Message, visible
from rljob_worker.environments.base import AgentCall, AgentSource, Asked, CutAnswer, GoneError, checked_examples
from rljob_worker.errors import UserError

_FIELD = "environment.agent.python"
_CALLED = "function(base_url=..., token=..., row=..., **args)"
_STACK_BYTES = 3 * 2**20
"""Stack of an agent's thread. 8 MiB is usual, and a process holds some hundred agents; with less than this, nesting
that Python's recursion limit or a parser in C allows ends the process, and a policy's answer may be nested."""
_MOST_LEFT = 64
"""Agents in a process that go on after their episodes; more of them, and it is replaced."""
_USER, _ASSISTANT = "user", "assistant"


class Agents:
    """Makes an environment for each episode, all of whose agents speak to one door.

    Args:
        source: of the agent.
        reach: as of `load_named`.

    Raises:
        UserError: it cannot be used.
    """

    def __init__(self, source: AgentSource, reach: str) -> None:
        function: object = load_named(source.python, _FIELD, "function", reach)
        self.function, self.args = _checked(function, source), source.args
        try:
            self.examples = checked_examples(getattr(function, "examples", None))
        except ValueError as error:
            raise UserError(f"{_FIELD}: {source.python!r}: {error}") from None
        """Texts that its calls have, for a tokenizer that is trained."""
        for name in ("NO_PROXY", "no_proxy"):
            # Its calls stay on this machine, whatever proxy there is for others.
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))
        # Their stacks count as memory of the process.
        threading.stack_size(_STACK_BYTES)
        self.door = AgentDoor(source.ignore)
        self._left: list[threading.Thread] = []

    def __call__(self) -> Agent:
        """An episode's agent."""
        return Agent(self)

    def started(self, run: Callable[[], None]) -> None:
        """Run an agent in a thread; GoneError where too many go on whose episodes have ended."""
        self._left = [one for one in self._left if one.is_alive()]
        if sum(one.name == _LEFT for one in self._left) > _MOST_LEFT:
            raise GoneError(f"{_MOST_LEFT} agents of a process go on after their episodes have ended")
        thread = threading.Thread(target=run, name=_RUNNING, daemon=True)
        self._left.append(thread)
        thread.start()

    def close(self) -> None:
        """Close the door, and forget the agents."""
        self.door.close()
        self._left.clear()


_RUNNING, _LEFT = "agent", "agent of an episode that has ended"


@dataclass(frozen=True, slots=True)
class _Returned:
    """End of an agent: its value, or what it raised."""

    value: object = None
    error: BaseException | None = None


class Agent:
    """One episode."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._told: queue.SimpleQueue[Call | _Returned] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False
        self._entrance: Entrance | None = None
        self._waiting: Call | None = None
        self._stream = 0
        """Number of the stream that the answer which it waits for is in."""
        self._ends: list[tuple[Message, ...]] = []
        """By stream: its conversation up to its newest answer."""
        self._thread: threading.Thread | None = None

    def reset(self, *, seed: int, options: Mapping[str, object]) -> tuple[Asked, dict[str, float]]:
        """Begin, and wait for the first call; `options` is the row.

        Raises:
            ValueError: it ended without a call.
            GoneError: as of `Agents.started`.
        """
        del seed
        row = dict(options)
        entrance = self._entrance = self._agents.door.open(self._called)
        self._agents.started(lambda: self._run(entrance, row))
        told = self._told.get()
        if isinstance(told, _Returned):
            self._raised(told)
            raise ValueError(f"the agent returned {told.value!r:.80} before it called the policy")
        return self._asked(told), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, float]]:
        """Give the answer to its call, and wait for the next one, or for its reward.

        Raises:
            ValueError: it has given the call up.
            Exception: what it raised.
        """
        assert self._waiting is not None
        call, self._waiting = self._waiting, None
        if call.given_up():
            # What it asks next, such as the same again, does not follow from this answer, which nobody reads.
            raise ValueError(
                "the agent gave up a call before it was answered, which takes as long as all of a turn's answers: its "
                "client needs timeout=None"
            )
        answered = (*call.messages, (_ASSISTANT, str(action)))
        if self._stream == len(self._ends):
            self._ends.append(answered)
        else:
            self._ends[self._stream] = answered
        call.answer(str(action), cut=isinstance(action, CutAnswer))
        told = self._told.get()
        if isinstance(told, _Returned):
            self._raised(told)
            reward, values = _reward(told.value)
            return "", reward, True, False, values
        return self._asked(told), 0.0, False, False, {}

    def close(self) -> None:
        """Answer none of its calls any more; idempotent."""
        if self._entrance is not None:
            self._agents.door.shut(self._entrance)
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._thread.name = _LEFT
        if self._waiting is not None:
            self._waiting.refuse()
        while not self._told.empty():
            told = self._told.get()
            if isinstance(told, Call):
                told.refuse()

    def _called(self, call: Call) -> None:
        with self._lock:
            if not self._closed:
                self._told.put(call)
                return
        # It came in before the token was shut.
        call.refuse()

    def _run(self, entrance: Entrance, row: Mapping[str, object]) -> None:
        self._thread = threading.current_thread()
        try:
            value = self._agents.function(
                base_url=entrance.base_url, token=entrance.token, row=row, **self._agents.args
            )
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
            self._told.put(_Returned(value))
        # Whatever it is: the thread ends, and the episode with it.
        except BaseException as error:
            self._told.put(_Returned(error=error))

    def _asked(self, call: Call) -> Asked:
        """A call as an observation: what is new of its messages where they go on from an answer, else all."""
        self._waiting = call
        fitting = [number for number, end in enumerate(self._ends) if _goes_on(end, call.messages)]
        self._stream = max(fitting, key=lambda number: len(self._ends[number]), default=len(self._ends))
        new = call.messages[len(self._ends[self._stream]) :] if fitting else call.messages
        return Asked.of(visible(new), AgentCall(self._stream, new))

    def _raised(self, told: _Returned) -> None:
        if isinstance(told.error, Exception | SystemExit):
            raise told.error
        if told.error is not None:
            raise RuntimeError(f"the agent ended by {type(told.error).__name__}: {told.error}") from told.error


def _goes_on(end: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Whether messages are a conversation up to an answer, with what a user says after it."""
    new = messages[len(end) :]
    return tuple(messages[: len(end)]) == tuple(end) and bool(new) and all(role == _USER for role, _ in new)


def _reward(value: object) -> tuple[float, Mapping[str, float]]:
    """Reward and numbers of what an agent returned; ValueError where it is neither a number nor a mapping with one."""
    given = value
    values: Mapping[str, object] = {}
    if isinstance(value, Mapping):
        if "reward" not in value:
            raise ValueError(f"the agent returned {value!r:.80}, in which there is no 'reward'")
        given, values = value["reward"], {name: one for name, one in value.items() if name != "reward"}
    if isinstance(given, bool) or not (isinstance(given, numbers.Real) or getattr(given, "shape", None) == ()):
        raise ValueError(
            f"the agent returned {value!r:.80}: a number, its reward, or a dict with 'reward' and other numbers is "
            "needed (0 where a reward of the job scores its last answer)"
        )
    return given, values  # type: ignore[return-value]


def _checked(function: object, source: AgentSource) -> Callable[..., object]:
    """The function; UserError where it cannot be called as an agent is."""
    if not callable(function) or inspect.isclass(function):
        raise UserError(f"{_FIELD}: {source.python!r} is not a function but {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function
    try:
        signature.bind(base_url="", token="", row={}, **source.args)
    except TypeError as error:
        raise UserError(f"{_FIELD}: {source.python!r} is called as {_CALLED}, which fails: {error}") from None
    return function
