"""Answer of `/v1/status`: the progress of the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rljob_api.base import INT32_MAX
from rljob_api.reward_parts import MOST_PARTS
from rljob_api.wire.values import WireError, block, number, seconds, text, whole


@dataclass(frozen=True, slots=True)
class EngineNodes:
    """Nodes with engines, where their number may change while the job runs."""

    wanted: int
    """Number that the driver was last asked for."""
    taking_part: int
    """Number with engines that take part."""
    in_use: Sequence[str]
    """Addresses of those where engines are, begin or end."""

    @classmethod
    def parse(cls, content: Any) -> Self:
        """Read the block; WireError as below."""
        given = block(content, "engine_nodes")
        addresses = given.get("in_use")
        if not isinstance(addresses, list):
            raise WireError("engine_nodes.in_use must be a list")
        return cls(
            whole(given.get("wanted"), "engine_nodes.wanted", INT32_MAX),
            whole(given.get("taking_part"), "engine_nodes.taking_part", INT32_MAX),
            [text(address, "engine_nodes.in_use") for address in addresses],
        )


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """A driver at one instant."""

    ready: bool
    """The first step can begin."""
    step: int
    """Completed steps."""
    steps: int | None
    """Steps that the job will run; drivers of other versions may not say it."""
    phase: str | None
    """Phase that runs now."""
    attempt: int
    """Attempt of the run folder."""
    weight_version: int | None
    last_checkpoint_step: int | None
    """None: it has saved none and loaded none."""
    stopping: bool
    """It was asked to stop."""
    phase_seconds: float | None = None
    """Seconds for which `phase` has run, or for which none has; drivers of other versions may not say it. A
    duration, so that it means the same to a reader whose clock is another."""
    lanes: Mapping[str, str] = field(default_factory=dict)
    """Phase that runs now in each lane beside the trainers', like `engine`; empty where all phases are in one lane."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Groups that are open now, by what they wait for (`growing`, `scoring`, `ready`); empty where none outlasts its
    step, and drivers of other versions may not say it."""
    engines: Mapping[str, int] = field(default_factory=dict)
    """By the engine's name: responses that it is asked for and has not returned; drivers of other versions may not say
    it."""
    engine_nodes: EngineNodes | None = None
    """None where their number stays as it is."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Means of the reward's named parts in the last recorded step; drivers of other versions may not say it."""
    write_failures: Mapping[str, int] = field(default_factory=dict)
    """Number of times that this attempt could not write what it can go on without, by name (`step records`,
    `trajectories`, ...); drivers of other versions may not say it."""
    write_messages: Mapping[str, str] = field(default_factory=dict)
    """Last failure of a write, by the same names; drivers of other versions may not say it."""
    checkpoint_warnings: Mapping[str, str] = field(default_factory=dict)
    """Faults found when this attempt continued from a checkpoint, a sentence each: one was `set_aside`, the one that
    is used is `unverified`; drivers of other versions may not say it."""

    @classmethod
    def parse(cls, content: Any) -> Self:
        """Read an answer.

        Raises:
            WireError: a field is missing, or holds what a status of Kubernetes cannot; names it.
        """
        answer = block(content, "the answer")
        phase, lasted = answer.get("phase"), answer.get("phase_seconds")
        return cls(
            ready=answer.get("ready") is True,
            step=whole(answer.get("step"), "step", INT32_MAX),
            steps=_optional(answer, "steps"),
            phase=None if phase is None else text(phase, "phase"),
            attempt=whole(answer.get("attempt"), "attempt", INT32_MAX),
            weight_version=_optional(answer, "weight_version"),
            last_checkpoint_step=_optional(answer, "last_checkpoint_step"),
            stopping=answer.get("stopping") is True,
            phase_seconds=None if lasted is None else seconds(lasted, "phase_seconds"),
            lanes={
                text(lane, "lanes"): text(running, "lanes")
                for lane, running in block(answer.get("lanes", {}), "lanes").items()
            },
            groups=_counts(answer, "groups"),
            engines=_counts(answer, "engines"),
            engine_nodes=None if answer.get("engine_nodes") is None else EngineNodes.parse(answer["engine_nodes"]),
            reward_parts=_parts(answer.get("reward_parts", {})),
            write_failures=_counts(answer, "write_failures"),
            write_messages={
                text(what, "write_messages"): text(message, "write_messages")
                for what, message in block(answer.get("write_messages", {}), "write_messages").items()
            },
            checkpoint_warnings={
                text(what, "checkpoint_warnings"): text(message, "checkpoint_warnings")
                for what, message in block(answer.get("checkpoint_warnings", {}), "checkpoint_warnings").items()
            },
        )

    def to_json(self) -> dict[str, Any]:
        """The answer, in the order of the fields."""
        return asdict(self)


def _counts(answer: Any, name: str) -> dict[str, int]:
    return {
        text(what, name): whole(count, name, INT32_MAX) for what, count in block(answer.get(name, {}), name).items()
    }


def _parts(value: Any) -> dict[str, float]:
    parts = block(value, "reward_parts")
    if len(parts) > MOST_PARTS:
        raise WireError(f"reward_parts must be at most {MOST_PARTS}, not {len(parts)}")
    return {name: number(mean, f"reward_parts.{name[:80]}") for name, mean in parts.items()}


def _optional(answer: Any, name: str) -> int | None:
    value = answer.get(name)
    return None if value is None else whole(value, name, INT32_MAX)
