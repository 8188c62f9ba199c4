"""Architectures that FSDP trains, handed over row by row into real vLLM engines, which compute as transformers does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.samples import unless_drawn

HERE = Path(__file__).parent


@pytest.mark.slow
@unless_drawn("FSDP's rows into vLLM")
@pytest.mark.parametrize("name", ["qwen3_moe"])
def test_an_engine_with_rows_of_three_ranks_computes_as_transformers(name: str) -> None:
    command = [sys.executable, str(HERE / "fsdp_vllm_process.py"), name]
    path = os.pathsep.join([str(HERE), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    [line] = [line.removeprefix("RESULT ") for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line)
    assert result["failure"] == ""
    assert result["verified"]
    assert result["from_new"] <= 1e-5, result
    assert result["from_old"] > 0.5, result
