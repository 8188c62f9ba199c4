from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_process import RemoteEngine
from rollout_models import spec_json, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("rollout") / "model")


@pytest.fixture(scope="session")
def engines(model: Path) -> Iterator[list[RemoteEngine]]:
    """Two started engines of one device each; tests leave them ACTIVE."""
    pair = [RemoteEngine(spec_json(model), model, model.parent / f"engine-{i}.log", index=i) for i in range(2)]
    for engine in pair:
        engine.send("start")
    for engine in pair:
        engine.wait()
    yield pair
    for engine in pair:
        engine.close()


@pytest.fixture
def engine(engines: list[RemoteEngine]) -> RemoteEngine:
    return engines[0]
