"""An environment that begins with nothing has no prompt: it is named before a run, and where a run finds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rljob_worker.environments.base import Began, Stepped
from rljob_worker.errors import JobError, UserError
from rljob_worker.flow.turns import Budget
from rljob_worker.rollouts.observations import check_room
from rljob_worker.rollouts.world import World


class Silent:
    """A plain template: nothing around an observation."""

    def first(self, observation: str) -> tuple[int, ...]:
        return tuple(map(ord, observation))


NOTHING: Any = Silent()


def test_it_is_refused_when_it_is_tried() -> None:
    answers = (Began(""), Stepped("on", 0.0, False, False))
    with pytest.raises(UserError, match=r"^spec.data.environment: its reset returned '', .*a prompt, which needs one"):
        check_room("spec.data", NOTHING, Budget(3, 4, 200), answers)


def test_it_ends_a_run_by_its_seed() -> None:
    prompt: Any = SimpleNamespace(environment="spec.data", token_ids=(), seed=7)
    world = World(SimpleNamespace(), NOTHING, Budget(3, 4, 200))  # type: ignore[arg-type]
    with pytest.raises(JobError, match=r"^spec.data.environment: the reset with seed 7 returned '', .*some text"):
        world.first(prompt, Began(""))
    assert world.first(prompt, Began("a")) == (97,)
