"""vLLM on npu and cuda: arguments, environment and turns, as far as they can be seen without a device."""

from __future__ import annotations

import json
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_models import spec_json
from support import qwen3_5

from rljob_api import RLJobSpec, roles
from rljob_worker.devices.kinds import COMPUTE_VARIABLE, device_kind
from rljob_worker.engine.arguments import engine_arguments
from rljob_worker.engine.device_extension import DeviceWorkerExtension
from rljob_worker.engine.environment import engine_environment
from rljob_worker.engine.graphs import capture_sizes
from rljob_worker.engine.kv_caches import kv_cache_storages
from rljob_worker.engine.platforms import engine_platform
from rljob_worker.engine.sleep_controller import DeviceSleepController
from rljob_worker.errors import UserError, WeightSyncError
from rljob_worker.models.config import ModelConfig
from rljob_worker.upstream.vllm_graphs import GraphMemory, model_of


def spec(model: Path, profile: str, **rollout: Any) -> RLJobSpec:
    value = spec_json(model, **rollout)
    del value["rollout"]["kvCacheBytes"]
    value["rollout"] |= rollout
    value["resources"]["profile"] = profile
    return RLJobSpec.model_validate(value)


@pytest.mark.parametrize("profile", ["ascend-a2", "ascend-a3", "cuda"])
def test_arguments_on_devices(profile: str, model: Path) -> None:
    arguments = engine_arguments(spec(model, profile, memoryFraction=0.35), str(model))
    assert arguments["enable_sleep_mode"] is True
    assert arguments["gpu_memory_utilization"] == 0.35
    assert "kv_cache_memory_bytes" not in arguments
    assert "ir_op_priority" not in arguments
    assert arguments["async_scheduling"] is False, "vLLM's default keeps one batch in flight, also across a sleep"
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments.get("additional_config") == (None if profile == "cuda" else {"weight_nz_mode": 0})
    sized = engine_arguments(spec(model, profile, memoryFraction=0.35, kvCacheBytes=2**30), str(model))
    assert sized["kv_cache_memory_bytes"] == 2**30
    assert sized["gpu_memory_utilization"] == 0.35


def test_vllm_has_the_arguments(model: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    names = EngineArgs.__dataclass_fields__
    for profile in ("ascend-a2", "cuda", "cpu"):
        assert not engine_arguments(spec(model, profile), str(model)).keys() - names.keys()


def test_a_model_that_sees_is_loaded_without_its_tower(model: Path, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    (tmp_path / "config.json").write_text(json.dumps(qwen3_5.config()))
    arguments = engine_arguments(spec(tmp_path, "ascend-a2"), str(tmp_path))
    assert (arguments["language_model_only"], arguments["mamba_ssm_cache_dtype"]) == (True, "float32")
    assert not arguments.keys() - EngineArgs.__dataclass_fields__.keys()
    assert "language_model_only" not in engine_arguments(spec(model, "ascend-a2"), str(model))


def test_linear_attention_on_cpu_is_refused_where_vllm_has_none(tmp_path: Path) -> None:
    cfg = ModelConfig.from_hf(qwen3_5.config())
    value = spec_json(tmp_path)
    check = engine_platform("cpu").check_model
    value["training"] = value.get("training", {}) | {"precision": "fp32"}
    with pytest.raises(UserError, match=r"spec\.training\.precision: .*bf16 alone"):
        check(RLJobSpec.model_validate(value), cfg)
    value["training"]["precision"] = "bf16"
    with pytest.raises(UserError, match=r"spec\.model: linear_key_head_dim 16 .* use a multiple of 32"):
        check(RLJobSpec.model_validate(value), cfg)
    engine_platform("npu").check_model(RLJobSpec.model_validate(value), cfg)
    blocks = {"linear_key_head_dim": 32, "linear_value_head_dim": 64}
    check(RLJobSpec.model_validate(value), ModelConfig.from_hf(qwen3_5.config(**blocks)))


def test_nz_stays_off(model: Path) -> None:
    given = {"ascend_compilation_config": {}, "weight_nz_mode": 0}
    merged = engine_arguments(spec(model, "ascend-a2", engineArgs={"additional_config": given}), str(model))
    assert merged["additional_config"] == given
    assert roles.engine_variables(spec(model, "ascend-a2"))["VLLM_ASCEND_ENABLE_NZ"] == "0"


def test_environment_on_devices(model: Path) -> None:
    for profile in ("ascend-a2", "cuda", "cpu"):
        environment = engine_environment(spec(model, profile))
        assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0", "the second one has no sampler to draw by request with"
        assert environment.get("VLLM_USE_FLASHINFER_SAMPLER") == ("0" if profile == "cuda" else None)
        if profile == "cpu":
            continue
        assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
        assert not {"VLLM_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE", "RLJOB_TORCH_LINEAR"} & environment.keys()


def test_kinds(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = device_kind(spec(model, "ascend-a3").resources)
    assert (kind.name, kind.ray_resource, kind.visible_variable) == ("npu", "NPU", "ASCEND_RT_VISIBLE_DEVICES")
    assert device_kind(spec(model, "cuda").resources).ray_resource == "GPU"
    assert device_kind(spec(model, "cpu").resources).ray_resource is None
    monkeypatch.setenv(COMPUTE_VARIABLE, "cpu")
    assert device_kind(spec(model, "ascend-a3").resources).name == "cpu"


class Vllm:
    """An engine with vLLM's sleep calls over memory of 100 bytes, 60 of them the engine's; notes the order of calls."""

    def __init__(self) -> None:
        self.free, self.calls = 40, []
        self.captured: list[int] = []
        self.model_executor = types.SimpleNamespace()
        self.engine_core = types.SimpleNamespace(reset_encoder_cache=lambda: self.calls.append("reset_encoder_cache"))

    def collective_rpc(self, method: str) -> list[Any]:
        if method == "rljob_device_memory":
            return [(self.free, 100)]
        if method == "rljob_captured_graphs":
            return self.captured
        self.calls.append(method)
        return [20 if method == "rljob_weight_bytes" else None]

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return True

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        self.free += 58

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake_up {tags}")
        self.free -= 20 if tags == ["weights"] else 38


def test_turns_report_the_bytes_that_moved_on_the_device() -> None:
    vllm = Vllm()
    controller = DeviceSleepController(vllm, lambda: vllm.calls.append("drain"))  # type: ignore[arg-type]
    report = controller.sleep()
    assert (report.released_bytes, report.released_weight_bytes) == (58, 20)
    assert (report.memory.device_free_bytes, report.memory.device_total_bytes) == (98, 100)
    assert controller.wake_weights().resumed_bytes == 20
    assert controller.wake_kv().resumed_bytes == 38
    assert vllm.calls == [
        "rljob_prepare",
        *("drain", "reset_encoder_cache", "reset_prefix_cache", "rljob_weight_bytes", "sleep 2"),
        *("rljob_note_parameters", "wake_up ['weights']", "rljob_restore_parameters"),
        *("wake_up ['kv_cache']", "drain", "reset_encoder_cache", "reset_prefix_cache"),
    ]


def test_llm_engine_has_the_sleep_calls() -> None:
    import inspect

    from vllm.v1.engine.llm_engine import LLMEngine

    assert "level" in inspect.signature(LLMEngine.sleep).parameters
    assert "tags" in inspect.signature(LLMEngine.wake_up).parameters


def extension(model: torch.nn.Module, **runner: Any) -> DeviceWorkerExtension:
    worker = DeviceWorkerExtension()
    worker.model_runner = types.SimpleNamespace(model=model, **runner)
    return worker


def test_parameters_that_waking_replaces_are_put_back() -> None:
    experts = torch.nn.Module()
    experts.w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 6), requires_grad=False)
    model = torch.nn.ModuleDict({"experts": experts, "dense": torch.nn.Linear(3, 3)})
    worker = extension(model)
    before = dict(model.named_parameters())
    worker.rljob_note_parameters()
    experts.w13_weight = torch.nn.Parameter(experts.w13_weight.transpose(1, 2), requires_grad=False)
    assert worker.rljob_restore_parameters() == 1
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    worker.rljob_note_parameters()
    assert worker.rljob_restore_parameters() == 0


def test_the_sampler_is_made_to_return_what_it_samples_from() -> None:
    from vllm.v1.sample.sampler import Sampler

    sampler = Sampler()
    assert sampler.logprobs_mode == "raw_logprobs"
    config = types.SimpleNamespace(logprobs_mode="processed_logprobs")
    extension(torch.nn.Linear(1, 1), sampler=sampler, model_config=config).rljob_prepare()
    assert sampler.logprobs_mode == sampler.topk_topp_sampler.logprobs_mode == "processed_logprobs"
    other = types.SimpleNamespace(topk_topp_sampler=None)
    with pytest.raises(RuntimeError, match="has no logprobs_mode"):
        extension(torch.nn.Linear(1, 1), sampler=other, model_config=config).rljob_prepare()


def test_sizes_count_each_storage_once() -> None:
    keys, values = torch.zeros(4, dtype=torch.uint8), torch.zeros(6, dtype=torch.uint8)
    assert sum(kv_cache_storages([(keys, values), keys, [values[:2]]]).values()) == 10
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3, bias=False), "b": torch.nn.Linear(2, 3, bias=False)})
    tied["b"].weight = tied["a"].weight
    assert extension(tied).rljob_weight_bytes() == 2 * 3 * 4


SIZES = [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(("profile", "compilation"), [("ascend-a2", 3), ("cuda", 0)])
def test_graphs_of_decoding_steps(profile: str, compilation: int, model: Path) -> None:
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs

    arguments = engine_arguments(spec(model, profile, graphMode=True), str(model))
    assert arguments["enforce_eager"] is False
    taken = EngineArgs(**arguments).compilation_config  # type: ignore[arg-type]
    assert (taken.mode, taken.cudagraph_mode) == (CompilationMode(compilation), CUDAGraphMode.FULL_DECODE_ONLY)
    assert taken.cudagraph_capture_sizes == SIZES
    extra: Any = arguments.get("additional_config")
    assert (extra is None) == (profile == "cuda")
    assert extra is None or not any([extra["weight_nz_mode"], *extra["ascend_compilation_config"].values()])
    eager = engine_arguments(spec(model, profile), str(model))
    assert "compilation_config" not in eager
    assert eager["enforce_eager"] is True
    assert "compilation_config" not in engine_arguments(spec(model, "cpu", graphMode=True), str(model))


@pytest.mark.parametrize(
    ("rollout", "sizes"),
    [
        ({"maxNumSeqs": 1}, [1]),
        ({"maxNumSeqs": 24}, [1, 2, 4, 8, 16, 24]),
        ({"speculative": {"draftTokens": 3}}, [4 * size for size in SIZES]),
        ({"engineArgs": {"max_cudagraph_capture_size": 12}}, [1, 2, 4, 8, 12]),
        ({"engineArgs": {"compilation_config": {"cudagraph_capture_sizes": [3, 1]}}}, [1, 3]),
        ({"engineArgs": {"cudagraph_capture_sizes": [8, 2]}}, [2, 8]),
    ],
)
def test_sizes_that_are_captured(rollout: dict[str, Any], sizes: list[int], model: Path) -> None:
    job = spec(model, "cuda", graphMode=True, **rollout)
    assert capture_sizes(job) == sizes
    given = engine_arguments(job, str(model))
    assert ("cudagraph_capture_sizes" in given) != ("cudagraph_capture_sizes" in given["compilation_config"])  # type: ignore[operator]


def test_the_users_settings_of_graphs_come_over_ours(model: Path) -> None:
    own = {
        "compilation_config": {"cudagraph_mode": "FULL"},
        "additional_config": {"ascend_compilation_config": {"enable_npugraph_ex": True}},
    }
    arguments = engine_arguments(spec(model, "ascend-a2", graphMode=True, engineArgs=own), str(model))
    assert arguments["compilation_config"] == {"mode": 3, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": SIZES}
    additional: Any = arguments["additional_config"]
    assert additional["weight_nz_mode"] == 0
    assert [name for name, on in additional["ascend_compilation_config"].items() if on] == ["enable_npugraph_ex"]


def test_experts_are_not_captured_on_npus(model: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = json.loads((model / "config.json").read_text())
    mixture = ModelConfig.from_hf(
        folder | experts | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    )
    for profile, kind, graphs in (("ascend-a2", "npu", False), ("cuda", "cuda", True)):
        engine_platform(kind).check_model(spec(model, profile, graphMode=graphs), mixture)
    engine_platform("npu").check_model(spec(model, "ascend-a2", graphMode=True), ModelConfig.from_hf(folder))
    with pytest.raises(UserError, match=r"spec\.rollout\.graphMode: vllm-ascend keeps experts in a layout of its own"):
        engine_platform("npu").check_model(spec(model, "ascend-a2", graphMode=True), mixture)


def test_an_engine_that_went_on_without_graphs_is_refused() -> None:
    vllm = Vllm()
    vllm.captured = [6, 6]
    controller = DeviceSleepController(vllm, lambda: None)  # type: ignore[arg-type]
    controller.check_graphs()
    vllm.captured = [6, 0]
    with pytest.raises(UserError, match=r"spec\.rollout\.graphMode: .* no graph of a decoding step in 1 of 2 workers"):
        controller.check_graphs()


class Wrapper:
    """vLLM's `CUDAGraphWrapper`, as far as the model inside is asked for."""

    def __init__(self, runnable: torch.nn.Module, graphs: list[object]) -> None:
        self.runnable = runnable
        self.concrete_cudagraph_entries = {i: types.SimpleNamespace(cudagraph=graph) for i, graph in enumerate(graphs)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runnable, name)

    def unwrap(self) -> torch.nn.Module:
        return self.runnable


def test_the_model_is_the_one_that_is_captured() -> None:
    model = torch.nn.Linear(2, 2)
    worker = extension(Wrapper(model, [object(), None, object()]))  # type: ignore[arg-type]
    assert model_of(worker.model_runner) is model
    assert worker.rljob_captured_graphs() == 2
    assert extension(model).rljob_captured_graphs() == 0
    assert worker.rljob_weight_bytes() == 6 * 4


def layer_that_derives() -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    layer.register_buffer("scale", torch.ones(1))
    layer.impl = types.SimpleNamespace(absorbed=torch.ones(2))
    layer.plain = torch.ones(3)
    return layer


def put_elsewhere(layer: Any) -> None:
    layer.weight.data = layer.weight.data.clone()


def another_parameter(layer: Any) -> None:
    layer.bias = torch.nn.Parameter(layer.bias.data.clone())


def another_buffer(layer: Any) -> None:
    layer.scale = layer.scale.clone()


def another_shape(layer: Any) -> None:
    layer.plain = layer.plain.new_zeros(layer.plain.numel() + 1)


MOVES = {
    "layers.0.weight": put_elsewhere,
    "layers.0.bias": another_parameter,
    "layers.0.scale": another_buffer,
    "layers.0.plain": another_shape,
}


@pytest.mark.parametrize("name", MOVES)
def test_what_graphs_hold_on_to_must_stay(name: str) -> None:
    model: Any = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer_that_derives()])})
    caches = {7: 64}
    memory = GraphMemory(model, lambda: caches)
    memory.begin(iter(()))
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    model.layers[0].impl.absorbed.add_(1.0)
    memory.check()
    MOVES[name](model.layers[0])
    wrong = r"(lies elsewhere|is another tensor) .*rollout\.graphMode to false"
    with pytest.raises(WeightSyncError, match=rf"^{re.escape(name)} {wrong}"):
        memory.check()


def test_what_layers_make_of_new_weights_goes_where_graphs_read_it() -> None:
    model: Any = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer_that_derives()])})
    memory = GraphMemory(model, lambda: ())
    layer = model.layers[0]
    captured = layer.impl.absorbed, layer.plain
    memory.begin(iter(()))
    layer.impl.absorbed, layer.plain = (tensor + 1 for tensor in captured)
    expected = layer.impl.absorbed.clone(), layer.plain.clone()
    memory.check()
    for now, before, wanted in zip((layer.impl.absorbed, layer.plain), captured, expected, strict=True):
        assert now is before
        assert torch.equal(now, wanted)


def test_modules_that_are_packed_and_caches_that_moved_are_refused() -> None:
    caches = {7: 64}
    memory = GraphMemory(torch.nn.Linear(1, 1), lambda: caches)  # type: ignore[arg-type]
    with pytest.raises(WeightSyncError, match=r"model\.experts packs its weights anew .*rollout\.graphMode to false"):
        memory.begin(iter(["model.experts", "model.other"]))
    memory.begin(iter(()))
    caches = {8: 64}
    with pytest.raises(WeightSyncError, match="the KV cache lies elsewhere"):
        memory.check()


def test_no_method_of_a_worker_is_overridden() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    own = {name for name in dir(DeviceWorkerExtension) if not name.startswith("__")}
    assert not {name for name in own if hasattr(Worker, name)}


def test_every_kind_has_a_platform() -> None:
    for kind, controller in {"npu": DeviceSleepController, "cuda": DeviceSleepController}.items():
        assert engine_platform(kind).sleep_controller() is controller
