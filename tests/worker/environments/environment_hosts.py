"""Places of the tests' hosts, and their contents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rljob_worker.confined.process import Place
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.environments.load import Source
from rljob_worker.environments.place import environment_place

CASES = Path(__file__).with_name("environment_cases.py")
MakeHosts = Callable[..., EnvironmentHosts]


def case(name: str, **args: Any) -> Source:
    """A class of `environment_cases`."""
    return Source(python=f"{CASES}:{name}", args=args)


def place_of(source: Source, folder: Path) -> Place:
    """Place of the environment; it may write to the folder, to leave notes of tests there."""
    place = environment_place(source, memory=2**30, network=True, workdir=folder)
    bounds = place.bounds
    files = bounds.files._replace(write=(str(folder),))
    return Place(place.workdir, place.variables, type(bounds)(bounds.memory, files, source=bounds.source))
