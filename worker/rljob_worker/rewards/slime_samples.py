"""Samples and arguments of reward functions that were written for slime. Imported by the scoring processes."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import ClassVar

from rljob_api.rewards import function_file
from rljob_worker.rewards.functions import Sample, is_score


class SlimeArgs:
    """`args` of a slime function: what `reward.args` has, and nothing else."""

    def __init__(self, given: Mapping[str, object]) -> None:
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> object:
        known = ", ".join(self.__dict__) or "nothing"
        raise AttributeError(f"args.{name} is not there: `args` has what reward.args has ({known}); put it there")


class Status(Enum):
    """State of a sample, by slime's names; one that is scored is completed or truncated."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True)
class SlimeSample:
    """Sample as slime has it, as far as a reward looks at it."""

    Status: ClassVar = Status

    index: int
    prompt: object
    response: str
    response_length: int
    tokens: list[int]
    """Ids of the prompt's tokens, then of the response's."""
    label: object
    status: Enum
    metadata: dict[str, object]
    reward: object = None
    group_index: int = 0
    loss_mask: object = None
    remove_sample: bool = False
    train_metadata: dict[str, object] = field(default_factory=dict)


def provide_slime(path: str) -> None:
    """Let `from slime.utils.types import Sample` find `SlimeSample` where slime itself is not installed.

    Args:
        path: of the function, whose file may itself be called `slime.py`.
    """
    file = os.path.abspath(next(iter(function_file(path) or ()), ""))
    found = importlib.machinery.PathFinder.find_spec("slime", [os.path.dirname(file), *sys.path])
    if "slime" in sys.modules or (found is not None and found.origin != file):
        return
    for name in ("slime", "slime.utils", "slime.utils.types"):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    sys.modules[name].Sample = SlimeSample  # type: ignore[attr-defined]


def _statuses() -> Callable[[str], Enum]:
    """The states that a function compares with: slime's own where it has imported them."""
    known = sys.modules.get("slime.utils.types")
    return Status if known is None else known.Sample.Status


def slime_sample(sample: Sample, index: int) -> SlimeSample:
    """Sample of a function of slime's; `index` is its place in the group."""
    row = sample["row"]
    metadata = row.get("metadata")
    return SlimeSample(
        index=index,
        prompt=sample["prompt"],
        response=sample["response"],
        response_length=sample["response_tokens"],
        tokens=[*sample["prompt_token_ids"], *sample["token_ids"]],
        label=sample["raw_label"],
        status=_statuses()("truncated" if sample["finish_reason"] == "length" else "completed"),
        metadata=dict(metadata) if isinstance(metadata, Mapping) else dict(sample["metadata"]),
    )


def by_reward_key(value: object, args: Mapping[str, object]) -> object:
    """slime's `--reward-key`, which says what of a dict is the score."""
    key = args.get("reward_key")
    if key is None or not isinstance(value, Mapping):
        return value
    if key not in value:
        raise ValueError(f"the returned dict has no {key!r} (reward.args.reward_key)")
    rest = {name: part for name, part in value.items() if name not in (key, "score") and is_score(part)}
    return rest | {"score": value[key]}
