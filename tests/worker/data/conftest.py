from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rljob_api.spec import RLJobSpec


@pytest.fixture
def make_spec() -> Callable[..., RLJobSpec]:
    def make(data: dict[str, Any], **blocks: Any) -> RLJobSpec:
        manifest: dict[str, Any] = {
            "steps": 1,
            "model": {"random": {"config": {"model_type": "qwen3"}}},
            "data": data,
            "reward": {"name": "match"},
            "rollout": {"promptsPerStep": 4, "samplesPerPrompt": 2, "maxResponseTokens": 8},
        }
        return RLJobSpec.model_validate(manifest | blocks)

    return make


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(rows: list[Any], name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
