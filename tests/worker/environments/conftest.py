from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from environment_hosts import MakeHosts, place_of
from support.children import children as children

from rljob_worker.environments.host_process import Deadlines
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.environments.load import Source


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[MakeHosts]:
    made: list[EnvironmentHosts] = []

    def make(source: Source, *, step: float = 60.0, reset: float = 60.0, **more: Any) -> EnvironmentHosts:
        made.append(EnvironmentHosts(source, place_of(source, tmp_path), deadlines=Deadlines(reset, step), **more))
        return made[-1]

    yield make
    for hosts in made:
        hosts.close()
