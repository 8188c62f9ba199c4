"""vLLM on npu and cuda: arguments, environment and turns, as far as they can be seen without a device."""

from __future__ import annotations

import json
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
from rljob_worker.engine.kv_caches import kv_cache_storages
from rljob_worker.engine.platforms import engine_platform
from rljob_worker.engine.sleep_controller import DeviceSleepController
from rljob_worker.errors import UserError
from rljob_worker.models.config import ModelConfig


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
        self.model_executor = types.SimpleNamespace()
        self.engine_core = types.SimpleNamespace(reset_encoder_cache=lambda: self.calls.append("reset_encoder_cache"))

    def collective_rpc(self, method: str) -> list[Any]:
        if method == "rljob_device_memory":
            return [(self.free, 100)]
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


def test_no_method_of_a_worker_is_overridden() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    own = {name for name in dir(DeviceWorkerExtension) if not name.startswith("__")}
    assert not {name for name in own if hasattr(Worker, name)}


def test_every_kind_has_a_platform() -> None:
    for kind, controller in {"npu": DeviceSleepController, "cuda": DeviceSleepController}.items():
        assert engine_platform(kind).sleep_controller() is controller
