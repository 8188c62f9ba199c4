"""The class of a model that is in no cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.warm.protocol import ENGINE
from support.warm.scripts import answer_in, run_text

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, sys
from pathlib import Path

os.environ["VLLM_CACHE_ROOT"] = sys.argv[1]
from rljob_worker.upstream.install import install
from rljob_worker.upstream.patch import Process
from vllm.model_executor.models.registry import ModelRegistry

install(Process.ENGINE, "cpu")
started = []
sys.addaudithook(lambda event, arguments: started.append(event) if event == "subprocess.Popen" else None)
information = ModelRegistry.models["Qwen3MoeForCausalLM"].inspect_model_cls()
cached = [path.name for path in Path(sys.argv[1]).rglob("*.json")]
print(json.dumps([information.architecture, information.is_text_generation_model, started, cached]))
"""


def test_a_models_class_is_looked_at_without_a_process(tmp_path: Path) -> None:
    architecture, generates, started, cached = answer_in(run_text(ENGINE, SCRIPT, tmp_path, tmp_path / "cache"))
    assert (architecture, generates) == ("Qwen3MoeForCausalLM", True)
    assert started == []
    assert cached == ["vllm-model_executor-models-qwen3_moe-Qwen3MoeForCausalLM.json"]
