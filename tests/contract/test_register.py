"""The register against the real sources, and against the code that relies on it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import document
import pytest
import sources
from contracts import Contract, Kind, Source
from register import CONTRACTS

ROOT = Path(__file__).resolve().parents[2]
WORKER, API = ROOT / "worker" / "rljob_worker", ROOT / "crds" / "rljob_api"
DEVICE_CODE = [
    *(WORKER / "devices").glob("*.py"),
    *(WORKER / "memory").glob("*.py"),
    WORKER / "trainer" / "megatron" / "models" / "megatron_npu.py",
    WORKER / "trainer" / "packed_attention.py",
    *(WORKER / "engine" / name for name in ("sleep_controller.py", "device_extension.py", "worker_extension.py")),
    WORKER / "upstream" / "vllm_device.py",
    WORKER / "upstream" / "vllm_graphs.py",
]
CHECKED = [contract for contract in CONTRACTS if contract.kind is not Kind.RECORDED]


@pytest.mark.parametrize("contract", CHECKED, ids=lambda c: f"{c.source.split()[0]}:{c.short}"[:60])
def test_the_source_has_it(contract: Contract) -> None:
    path = sources.root(contract.source) / contract.file
    assert path.is_file(), f"{contract.source} has no {contract.file} any more"
    match contract.kind:
        case Kind.FUNCTION:
            found = sources.parameters_of(path, contract.name)
            assert found is not None, f"{contract.file} does not define {contract.name}"
            assert not sources.missing_parameters(contract.parameters, found), f"{contract.name} takes {found}"
            assert set(contract.keywords) <= set(found), f"{contract.name} takes {found}"
        case Kind.ATTRIBUTE:
            assert sources.has_attribute(path, contract.name), f"{contract.file} does not set {contract.name}"
        case Kind.SYMBOL:
            assert sources.has_symbol(path, contract.name)
        case Kind.TEXT:
            assert sources.has_text(path, contract.name)


def test_exported_names_of_torch_npu_are_in_its_module() -> None:
    module = (sources.root(Source.TORCH_NPU) / "torch_npu/npu/__init__.py").read_text()
    for contract in CONTRACTS:
        if contract.source is Source.TORCH_NPU and contract.name.startswith("npu."):
            assert re.search(rf"\b{contract.short}\b", module), contract.name


def test_the_rebuild_functions_take_the_same_values_in_the_same_places() -> None:
    by_name = {contract.short: contract.parameters for contract in CONTRACTS}
    assert by_name["rebuild_npu_tensor"] == by_name["rebuild_cuda_tensor"]
    assert len(by_name["rebuild_npu_tensor"]) == 15
    assert by_name["rebuild_npu_tensor"][6] == "storage_device"


def test_an_older_source_would_be_noticed() -> None:
    """The checks can fail: names that no release has."""
    npu = sources.root(Source.TORCH_NPU)
    assert not sources.has_text(npu / "torch_npu/lib/libtorch_npu.so", "FunctionLoader prefers RTLD_NEXT")
    assert not sources.has_symbol(
        sources.root(Source.UPSTREAM_SAVER) / "torch_memory_saver_hook_mode_preload_cu12.abi3.so", "tms_disable"
    )
    assert sources.parameters_of(npu / "torch_npu/npu/memory.py", "empty_pool") is None
    assert sources.missing_parameters(["pool", "stream"], ["pool", "device"]) == ["stream"]
    worker = sources.root(Source.VLLM_ASCEND) / "vllm_ascend/worker/worker.py"
    assert sources.parameters_of(worker, "NPUWorker.doze") is None
    assert not sources.has_attribute(worker, "NPUWorker.logprobs_mode")


def _ours(contract: Contract) -> Path:
    return (API if (API / contract.used_in).is_file() else WORKER) / contract.used_in


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: f"{c.source.split()[0]}:{c.short}"[:60])
def test_our_code_uses_it_where_the_register_says(contract: Contract) -> None:
    assert contract.short in _ours(contract).read_text()


_TAKEN_FROM = (
    *("self._module", "self._module.memory", "module", "reductions", "library", "self._library", "torch_npu"),
    *("self._engine", "self.model_runner", "self.model_runner.sampler", "sampler"),
)


def _module_names(path: Path) -> set[str]:
    """Names taken from torch's device module, vLLM's engine and worker, and those of the memory saver's library."""
    tree = ast.parse(path.read_text())
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in _TAKEN_FROM
    }
    found = {name for name in found if not name.startswith("_")}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return found | {text for text in strings if re.fullmatch(r"(tms_|TMS_|aclrt)\w+", text)}


OWN = {"allocator", "build", "configure", "mode", "pause", "resume", "tracking", "memory"}
"""Attributes of our own SaverLibrary, and of torch."""
ON_CPU_TOO = {"collective_rpc", "engine_core", "model_executor", "reset_prefix_cache", "named_parameters"}
"""Called by jobs on CPU, and of torch's modules."""


def test_every_name_that_the_device_code_takes_is_registered() -> None:
    registered = {contract.short for contract in CONTRACTS}
    used = set().union(*(_module_names(path) for path in DEVICE_CODE))
    assert {"mem_get_info", "tms_pause", "TMS_INIT_ENABLE", "aclrtMallocAlign32"} <= used
    assert {"npu_fusion_attention", "sleep", "wake_up", "kv_caches", "topk_topp_sampler"} <= used
    assert used - registered - OWN - ON_CPU_TOO == set()


_POOLS = ("use_memory_pool", "_maybe_get_memory_pool_context")


@pytest.mark.parametrize(
    ("source", "file"),
    [(Source.VLLM, "vllm/v1/worker/gpu_worker.py"), (Source.VLLM_ASCEND, "vllm_ascend/worker/worker.py")],
)
def test_graphs_are_captured_outside_of_the_memory_that_sleeps(source: Source, file: str) -> None:
    tree = ast.parse((sources.root(source) / file).read_text())
    functions = {node.name: ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert any(pool in functions["load_model"] for pool in _POOLS)
    captures = functions["compile_or_warm_up_model"]
    assert "self.model_runner.capture_model()" in captures
    assert not any(pool in captures for pool in _POOLS)


@pytest.mark.parametrize(
    ("source", "file"),
    [
        (Source.VLLM, "vllm/v1/worker/gpu_model_runner.py"),
        (Source.VLLM_ASCEND, "vllm_ascend/worker/model_runner_v1.py"),
    ],
)
def test_tokens_are_drawn_outside_of_the_model_that_is_captured(source: Source, file: str) -> None:
    tree = ast.parse((sources.root(source) / file).read_text())
    functions = {node.name: ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert "self.model" in functions["_model_forward"]
    assert "sample" not in functions["_model_forward"]


def test_the_document_is_up_to_date() -> None:
    assert document.PATH.read_text() == document.document(), "run python tests/contract/document.py"
