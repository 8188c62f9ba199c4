"""Architectures that FSDP trains, handed over row by row into real vLLM engines, which compute as transformers does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.architectures import ARCHITECTURES
from support.samples import drawn, unless_drawn
from support.warm.protocol import ENGINE
from support.warm.scripts import run_script

HERE = Path(__file__).parent
FURTHEST = {"gemma2": 1e-4}
"""Bound for an architecture that caps its attention's logits, which two libraries round apart; for others 1e-5."""
DRAWN = drawn("architectures", sorted(ARCHITECTURES))


def result_of(program: str, *arguments: str) -> dict[str, Any]:
    """The findings of a process of its own, whose sync was verified."""
    (output,) = run_script(ENGINE, HERE / program, arguments)
    # An unfinished line of a log may stand before it.
    [found] = re.findall(r"RESULT (\{.*\})", output)
    result: dict[str, Any] = json.loads(found)
    print(f"{arguments}: {result}")
    assert result["failure"] == ""
    assert result["verified"]
    return result


@pytest.mark.slow
@unless_drawn("FSDP's rows into vLLM")
@pytest.mark.parametrize("name", DRAWN)
def test_an_engine_with_rows_of_three_ranks_computes_as_transformers(name: str) -> None:
    result = result_of("fsdp_vllm_process.py", name)
    assert result["from_new"] <= FURTHEST.get(name, 1e-5), result
    assert result["from_old"] > 0.5, result


@pytest.mark.slow
@unless_drawn("adapters into vLLM")
@pytest.mark.parametrize(
    ("name", "targets", "modules"),
    # Of a fused module of the engine all parts, and one.
    [("llama", [], 14), ("qwen2", ["q_proj", "down_proj"], 4)],
)
def test_adapters_of_three_ranks_land_beside_weights_that_stay(name: str, targets: list[str], modules: int) -> None:
    result = result_of("adapters_vllm_process.py", name, *targets)
    assert result["modules"] == modules
    assert result["bytes"] == result["expected"]
    assert result["before"] <= 1e-5, "adapters of zeros change nothing"
    assert result["first"] <= 1e-5, result
    assert result["old"] > 0.1, result
