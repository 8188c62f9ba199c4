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
    sync_folder = model.parent / "sync"
    sync_folder.mkdir()
    logs = [model.parent / f"engine-{i}.log" for i in range(2)]
    spec = spec_json(model, engines=2, maxNumSeqs=32)
    pair = [RemoteEngine(spec, model, log, index=i, sync_folder=sync_folder) for i, log in enumerate(logs)]
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
