"""Real vLLM engines: after a sync they generate what a fresh engine on the target folder generates."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.samples import unless_drawn
from support.warm.protocol import ENGINE
from support.warm.scripts import run_script
from vllm_models import make_model

HERE = Path(__file__).parent
# On any CPU, vLLM packs float32 weights out of sight; bfloat16 ones only where there are instructions for them.
# vLLM extends a worker class once in the life of a process, so each extension has processes of its own.
RUNS = {
    "models": (1, ["tied_float32", "untied_padded", "qwen2", "moe_tied_float32"]),
    "devices": (1, ["untied_padded@devices"]),
    "in place": (1, ["tied_float32@place", "untied_padded@place"]),
    "tensor parallel": (2, ["untied_padded"]),
    "hybrid": (1, ["hybrid"]),
}
DRAWN = {
    "models": unless_drawn("vLLM's models"),
    "devices": unless_drawn("vLLM's models on devices"),
    "in place": unless_drawn("vLLM's models without slots"),
    "tensor parallel": unless_drawn("vLLM, tensor parallel"),
    "hybrid": unless_drawn("vLLM's hybrid models"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in {kind.partition("@")[0] for _, kinds in RUNS.values() for kind in kinds}:
        # 500 is no multiple of the engine's vocabulary padding.
        vocab_size = 500 if kind.endswith("padded") else 512
        for seed, role in enumerate(("start", "target")):
            dtype = torch.float32 if kind.endswith("float32") else torch.bfloat16
            architecture = kind.removesuffix("_padded").removesuffix("_float32")
            make_model(architecture, seed, folder / f"{kind}-{role}", vocab_size=vocab_size, dtype=dtype)
    return folder


def wrong_plans_are_refused(wrong: dict[str, str]) -> None:
    assert re.search(r"layers\.1\.self_attn\.qkv_proj got \d+ of its \d+ elements", wrong["part of a module"]), wrong
    assert "model.norm.weight was not loaded" in wrong["whole module"], wrong
    assert re.search(r"no parameter for model\.\S*layers\.0\.mlp\.extra_proj\.weight", wrong["unknown tensor"]), wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor_parallel", "kinds"),
    [pytest.param(*run, marks=DRAWN[name], id=name) for name, run in RUNS.items()],
)
def test_synced_engines_equal_fresh_ones(models: Path, tensor_parallel: int, kinds: list[str]) -> None:
    script = HERE / "vllm_sync_process.py"
    (output,) = run_script(ENGINE, script, [models, tensor_parallel, *kinds])
    # An unfinished line of a log may stand before it.
    results: list[dict[str, Any]] = [json.loads(line) for line in re.findall(r"RESULT (\{.*\})", output)]
    assert [result["kind"] for result in results] == kinds
    for result in results:
        assert result["buckets"] > 4, result
        assert "bucket 2" in result["failure"], result
        assert "checksum" in result["failure"], result
        if "@" not in result["kind"]:
            wrong_plans_are_refused(result["wrong_plans"])
        assert result["version_after_failure"] is None
        assert result["version"] == 2
        assert result["report"]["verified"] is True
        assert result["changed"], result
        assert result["same_tokens"], result
        assert result["log_prob_difference"] == 0.0, result
