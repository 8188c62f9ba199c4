"""Architectures that FSDP trains, handed over row by row into real vLLM engines, which compute as transformers does."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.architectures import ARCHITECTURES
from support.samples import NONE_SKIPPED, SEED, unless_drawn

HERE = Path(__file__).parent
FURTHEST = {"gemma2": 1e-4}
"""Of an architecture that caps its attention's logits, which two libraries round apart; of others 1e-5."""
_names = sorted(ARCHITECTURES)
DRAWN = _names if NONE_SKIPPED else [random.Random(f"{SEED} architectures").choice(_names)]


@pytest.mark.slow
@unless_drawn("FSDP's rows into vLLM")
@pytest.mark.parametrize("name", DRAWN)
def test_an_engine_with_rows_of_three_ranks_computes_as_transformers(name: str) -> None:
    command = [sys.executable, str(HERE / "fsdp_vllm_process.py"), name]
    path = os.pathsep.join([str(HERE), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    [line] = [line.removeprefix("RESULT ") for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line)
    print(f"{name}: {result}")
    assert result["failure"] == ""
    assert result["verified"]
    assert result["from_new"] <= FURTHEST.get(name, 1e-5), result
    assert result["from_old"] > 0.5, result
