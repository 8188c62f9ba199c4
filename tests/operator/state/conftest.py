"""Fixtures of the reconciler's tests."""

from __future__ import annotations

from typing import Any

import pytest
from simulation import World, make_spec


@pytest.fixture
def world() -> World:
    return World(make_spec())


@pytest.fixture
def running() -> Any:
    """Make a world whose job is Running, with changes to its spec."""

    def make(**changes: Any) -> World:
        world = World(make_spec(**changes))
        for _ in range(60):
            world.pass_time(5)
            world.look()
            if world.status.phase == "Running":
                return world
        raise AssertionError(f"the job did not come up: {world.status}")

    return make
