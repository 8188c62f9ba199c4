"""An environment tried before anything starts: does it answer, does it repeat itself, does it stand alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rljob_api.how_many import how_many
from rljob_worker.environments.base import Answer, EnvironmentFailure, FailureKind, Stepped
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.errors import AwayError, UserError

NO_ACTION = "rljob-42-answer"
"""Text that a policy might write, and that is no action of anything."""
_STEPS = 6
_PATIENCE_SECONDS = 0.5
_FIRST_SEED = 3


@dataclass(frozen=True, slots=True)
class Checked:
    """Findings of the check."""

    repeats: bool
    """Whether the same seed and actions give the same answers."""
    examples: tuple[str, ...]
    """Answers that it calls valid."""
    answers: tuple[Answer, ...] = field(default=(), compare=False)
    """Answers of the first seed: its reset, and steps of which the first is no action."""


def check_environment(
    make_hosts: Callable[[], EnvironmentHosts], seeds: tuple[int, int] = (_FIRST_SEED, _FIRST_SEED + 1)
) -> Checked:
    """Reset and step an environment, alone and beside another episode.

    Args:
        make_hosts: hosts of one process, which try nothing again.
        seeds: of the two episodes.

    Raises:
        UserError: it cannot be used, fails, or has two episodes disturb each other; AwayError where its process or
            server is lost.
    """
    with make_hosts() as hosts:
        hosts.start()
        actions = _actions(hosts.examples)
        alone = _play(hosts, [0], seeds, actions)[0]
        _check_examples(hosts, seeds[0])
    with make_hosts() as hosts:
        again = _play(hosts, [0], seeds, actions)[0]
        # After one that ended, and beside one with another seed.
        beside = _play(hosts, [1, 2], seeds, actions)[0]
    if alone == again != beside:
        raise UserError(
            f"environment: two episodes disturb each other: with seed {seeds[0]} and the same actions, "
            f"{_first(alone, beside)} It shares what it changes between its objects, like the module `random`, a "
            "global or an attribute of the class: give each object its own (`random.Random(seed)`)"
        )
    return Checked(alone == again, tuple(hosts.examples), tuple(alone))


def failure_error(failure: EnvironmentFailure, text: str | None = None) -> UserError:
    """The error of an environment that failed when it was tried: AwayError where its process or server was lost."""
    kind = AwayError if failure.kind is FailureKind.INFRA else UserError
    return kind(failure.text if text is None else text)


def _actions(examples: Sequence[str]) -> list[str]:
    """No action at first, which a policy will write soon enough, then valid ones in turn."""
    return [NO_ACTION, *(examples[step % len(examples)] if examples else NO_ACTION for step in range(_STEPS - 1))]


def _play(
    hosts: EnvironmentHosts, keys: Sequence[int], seeds: Sequence[int], actions: Sequence[str]
) -> list[list[Answer]]:
    """The answers of episodes that take turns, each with its seed; UserError where one fails."""
    for key, seed in zip(keys, seeds):
        hosts.begin(key, seed)
    found: dict[int, list[Answer]] = {key: [] for key in keys}
    live = set(keys)
    for action in [None, *actions]:
        for key in keys:
            if action is not None and key in live:
                hosts.step(key, action)
        while hosts.outstanding:
            for key, answer in hosts.take(_PATIENCE_SECONDS):
                if isinstance(answer, EnvironmentFailure):
                    raise failure_error(answer)
                found[key].append(answer)
                if isinstance(answer, Stepped) and answer.done:
                    live.discard(key)
    for key in keys:
        hosts.end(key)
    return [found[key] for key in keys]


def _check_examples(hosts: EnvironmentHosts, seed: int) -> None:
    """Refuse an environment that does not take what it calls valid, where it says what it takes."""
    for key, example in enumerate(hosts.examples):
        hosts.begin(key, seed)
        answers: list[Answer] = []
        for action in (None, example):
            if action is not None:
                hosts.step(key, action)
            while hosts.outstanding:
                answers += [answer for _, answer in hosts.take(_PATIENCE_SECONDS)]
        hosts.end(key)
        last = answers[-1]
        if isinstance(last, EnvironmentFailure):
            raise failure_error(last)
        if isinstance(last, Stepped) and last.values.get("valid") == 0.0:
            raise UserError(
                f"environment: the pattern of its actions never matches: it does not take {example!r}, which it calls "
                "an answer (`examples`)"
            )


def _first(alone: Sequence[Answer], beside: Sequence[Answer]) -> str:
    for number, (one, other) in enumerate(zip(alone, beside)):
        if one != other:
            what = "the reset" if number == 0 else f"step {number}"
            return f"{what} gives {_text(one)} alone and {_text(other)} beside another episode."
    return f"an episode has {how_many(len(alone) - 1, 'step')} alone and {len(beside) - 1} beside another one."


def _text(answer: Answer) -> str:
    value = repr(answer)
    return value if len(value) <= 200 else f"{value[:197]}..."
