"""vllm-ascend's own wheel on torch_npu's, over the stand-ins for CANN, beside vLLM on CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cann.build import Cann
from contracts import Kind, Source
from register import CONTRACTS
from rollout_models import MAX_RESPONSE, spec_json, write_model
from support.samples import ALL, unless_drawn

from rljob_api import RLJobSpec
from rljob_worker.engine.environment import engine_environment

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("npu_engine.py")
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "on CPU": ("cpu", ()),
    "one batch ahead": ("npu", ("async", "record")),
    # As jobs have it, which run in `make test`.
    **({"no batch ahead": ("npu", ())} if ALL else {}),
}
KV_CACHE = 2**26
ROUNDING = 2e-5
"""Between kernels of two libraries, in fp32."""


def generated(cann: Cann, folder: Path, kind: str, options: tuple[str, ...]) -> list[Any]:
    """The lines that the program prints."""
    model = folder / "model"
    spec = spec_json(model, maxNumSeqs=32)
    environment = dict(os.environ)
    if "graphs" in options:
        spec["rollout"]["graphMode"] = True
        environment["VLLM_CACHE_ROOT"] = str(folder / "vllm")
        # The tests' processes compile nothing else.
        environment.pop("TORCHDYNAMO_DISABLE", None)
    if kind == "npu":
        spec["resources"] = {"profile": "ascend-a2", "devicesPerNode": 1}
        environment |= cann.shell(folder) | {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False"}
    else:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment |= engine_environment(RLJobSpec.model_validate(spec)) | {"PYTHONPATH": environment["PYTHONPATH"]}
    device = "npu" if kind == "npu" else "host:cpu:0"
    command = [sys.executable, str(PROGRAM), json.dumps(spec), str(model), device, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


@unless_drawn("NPUs: an engine with graphs")
def test_captured_graphs_generate_as_without_them_and_see_new_weights(cann: Cann, tmp_path: Path) -> None:
    """At both levels of sleep, and with a weight that is written where it lies; one that is elsewhere is refused."""
    write_model(tmp_path / "model")
    with ThreadPoolExecutor() as pool:
        on_cpu = pool.submit(generated, cann, tmp_path, "cpu", ())
        captured, _, _, (first, kept, loaded, less, restored) = generated(cann, tmp_path, "npu", ("graphs",))
        ((expected,),) = on_cpu.result()
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in expected]
    for (_, ours), (_, theirs) in zip(first, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=ROUNDING)
    assert kept == loaded == restored == first, "bit for bit"
    assert less != first, "what was written in place"
    assert captured["graphs"] == 6, "1 to 32 sequences, by powers of two"
    assert captured["replays"] >= 5 * (MAX_RESPONSE - 1)
    packed, moved = captured["refused"]
    assert "model.layers.0.mlp.experts packs its weights anew" in packed
    assert "norm.weight lies elsewhere than when graphs were captured" in moved


def called_by_the_register() -> set[str]:
    """Functions of vllm-ascend that the register calls executed."""
    of_it = [c for c in CONTRACTS if c.executed and c.source is Source.VLLM_ASCEND]
    return {c.name for c in of_it if c.kind is Kind.FUNCTION}


@unless_drawn("NPUs: an engine alone")
def test_an_engine_generates_sleeps_and_wakes_as_on_cpu(cann: Cann, tmp_path: Path) -> None:
    """At both levels of sleep, with one batch scheduled ahead and without."""
    write_model(tmp_path / "model")
    with ThreadPoolExecutor() as pool:
        runs = {name: pool.submit(generated, cann, tmp_path, *run) for name, run in RUNS.items()}
    ((expected,),) = runs.pop("on CPU").result()
    for name, run in runs.items():
        bytes_given_back, called, (first, *later) = run.result()
        assert [tokens for tokens, _ in first] == [tokens for tokens, _ in expected], name
        for (_, ours), (_, theirs) in zip(first, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=ROUNDING)
        assert later == [first, first], f"{name}: bit for bit after a sleep"
        assert min(bytes_given_back.values()) > KV_CACHE, "the KV cache and the weights"
        assert not called or called_by_the_register() <= {*called}
