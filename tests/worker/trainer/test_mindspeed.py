"""Our trainer on the real MindSpeed, held to the same trainer on plain Megatron.

MindSpeed is in no package index. With a checkout of core_r0.16.0 (the register says which commit was run):

    PYTHONPATH=MindSpeed .venv/bin/pytest tests/worker/trainer/test_mindspeed.py
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mindspeed_names import JUDGED
from test_trainer import ROOT, launch, write_model

HERE = Path(__file__).parent
FOUND = importlib.util.find_spec("mindspeed")
TOGETHER = ["tp", "dp", "tp_terms", "ep_moe", "dp_moe", "tp_bias", "released_dp", "released_tp", "released_ep"]
ALONE = (["one", "recompute", "offload_moved"], ["one_moe", "one_bias", "one_terms"])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        FOUND is None, reason="mindspeed is not importable: it is in no package index (docs/ascend-status.md)"
    ),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of what the trainers on MindSpeed and on Megatron alone saw."""
    assert FOUND is not None
    assert FOUND.submodule_search_locations
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("plain", "mindspeed")}
    for kind, folder in folders.items():
        write_model(folder / "dense")
        write_model(folder / "moe", "qwen3_moe")
        write_model(folder / "bias", "qwen2")
        script = HERE / "on_mindspeed" / "mindspeed_ranks.py"
        packages = (HERE, Path(FOUND.submodule_search_locations[0]).parent)
        launch(folder, kind, TOGETHER, ALONE, (script, kind), packages)
    return folders


@pytest.mark.parametrize("case", [*TOGETHER, *ALONE[0], *ALONE[1]])
def test_losses_norms_metrics_and_weights_are_megatrons(case: str, results: dict[str, Path]) -> None:
    for rank in range(2 if case in TOGETHER else 1):
        got, want = (
            torch.load(results[kind] / f"{case}.rank-{rank}.pt", weights_only=False) for kind in ("mindspeed", "plain")
        )
        assert got["applied"] == want["applied"] == [True] * 3
        for mine, theirs in zip(got["metrics"], want["metrics"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-6), rank
        for mine, theirs in zip(got["scores"], want["scores"], strict=True):
            torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(theirs), atol=1e-6, rtol=0)
        assert [piece[:4] for piece in got["pieces"]] == [piece[:4] for piece in want["pieces"]]
        for mine, theirs in zip(got["pieces"], want["pieces"], strict=True):
            torch.testing.assert_close(mine[4], theirs[4], atol=1e-6, rtol=0, equal_nan=True, msg=f"{rank} {mine[0]}")


def test_each_name_that_mindspeed_replaces_and_we_use_was_judged(results: dict[str, Path]) -> None:
    """Names that an update of MindSpeed replaces beside these, and names of it that we begin to use, are to be read
    first."""
    replaced = json.loads((results["mindspeed"] / "names.json").read_text())
    assert len(replaced) > 50
    ours = set(used_names())
    met = {name for name in replaced if any(name == own or name.startswith(f"{own}.") for own in ours)}
    assert met == set(JUDGED)


def used_names() -> Iterator[str]:
    """Dotted names of torch and Megatron in the trainer's code, as they are imported and as they are defined."""
    worker = ROOT / "worker" / "rljob_worker"
    for folder in ("trainer", "models", "upstream", "memory", "devices", "weightsync"):
        for file in sorted((worker / folder).rglob("*.py")):
            yield from _names_in(ast.parse(file.read_text()))


def _names_in(tree: ast.Module) -> Iterator[str]:
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                known[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    ours = {short: name for short, name in known.items() if name.partition(".")[0] in ("torch", "megatron")}
    for name in ours.values():
        yield from _spellings(name)
    for node in ast.walk(tree):
        dotted = _dotted(node)
        first, _, rest = dotted.partition(".")
        if rest and first in ours:
            yield from _spellings(f"{ours[first]}.{rest}")


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        outer = _dotted(node.value)
        return f"{outer}.{node.attr}" if outer else ""
    return ""


def _spellings(name: str) -> Iterator[str]:
    """A name, and where what it names was defined; a module names nothing that could be replaced."""
    module, _, attribute = name.rpartition(".")
    try:
        value: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        return
    if isinstance(value, type(ast)):
        return
    yield name
    if isinstance(getattr(value, "__qualname__", None), str) and isinstance(value.__module__, str):
        yield f"{value.__module__}.{value.__qualname__}"
