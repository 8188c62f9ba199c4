"""The example for 8 x 910B1 against the published set-up (vime issue 255), variable by variable."""

from __future__ import annotations

import re

import pytest
from render_cases import EXAMPLE, SETTINGS, head_pod, variables, view, worker_pod

from rljob_api import derived
from rljob_operator.render import render_cluster, role_environment

PUBLISHED = """
# section "Environment variables (colocate)"
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:False
export TMS_HOOK_MODE=preload
export TMS_INIT_ENABLE=1
export TMS_INIT_ENABLE_CPU_BACKUP=1
export HCCL_DETERMINISTIC=true
export HCCL_CONNECT_TIMEOUT=7200
export VLLM_ASCEND_ENABLE_NZ=0
export VLLM_SERVER_DEV_MODE=1
export LD_PRELOAD=$(python3 -c "import torch_memory_saver, os; print(os.path.join(os.path.dirname(torch_memory_saver.__file__), 'torch_memory_saver_hook_mode_preload.abi3.so'))")
"""  # noqa: E501
# "Pass LD_PRELOAD and TMS variables through ray job submit --runtime-env-json"
IN_RUNTIME_ENV = {"LD_PRELOAD", "TMS_HOOK_MODE", "TMS_INIT_ENABLE", "TMS_INIT_ENABLE_CPU_BACKUP"}
# Who needs a variable that the document exports for everything.
READ_BY = {
    "PYTORCH_NPU_ALLOC_CONF": {"trainer", "rollout"},
    "HCCL_DETERMINISTIC": {"trainer", "rollout"},
    "HCCL_CONNECT_TIMEOUT": {"trainer", "rollout"},
    "VLLM_ASCEND_ENABLE_NZ": {"rollout"},
    "VLLM_SERVER_DEV_MODE": {"rollout"},
    **{name: {"trainer"} for name in IN_RUNTIME_ENV},
}
ASSIGNMENTS = re.findall(r"^export (\w+)=(.*)$", PUBLISHED, re.M)

JOB = view(EXAMPLE)
CLUSTER = render_cluster(JOB, SETTINGS)


def environment(role: str) -> dict[str, object]:
    """Environment of a process of this role: its pod's variables and its own over them."""
    assert JOB.spec is not None
    return variables(worker_pod(CLUSTER)) | role_environment(JOB.spec, role)  # type: ignore[arg-type]


def test_the_list_was_read_whole() -> None:
    assert [name for name, _ in ASSIGNMENTS] == [
        "PYTORCH_NPU_ALLOC_CONF",
        "TMS_HOOK_MODE",
        "TMS_INIT_ENABLE",
        "TMS_INIT_ENABLE_CPU_BACKUP",
        "HCCL_DETERMINISTIC",
        "HCCL_CONNECT_TIMEOUT",
        "VLLM_ASCEND_ENABLE_NZ",
        "VLLM_SERVER_DEV_MODE",
        "LD_PRELOAD",
    ]
    assert set(READ_BY) == {name for name, _ in ASSIGNMENTS}


@pytest.mark.parametrize(("name", "value"), ASSIGNMENTS)
def test_variable(name: str, value: str) -> None:
    for role in READ_BY[name]:
        found = environment(role)[name]
        if name == "LD_PRELOAD":
            library = re.search(r"'([^']+\.so)'", value)
            assert library is not None
            assert str(found).rpartition("/")[2] == library[1]
            assert ":" not in str(found)
            assert " " not in str(found)
        else:
            assert found == value


@pytest.mark.parametrize("name", sorted(IN_RUNTIME_ENV))
def test_memory_saver_reaches_trainers_alone(name: str) -> None:
    assert name in environment("trainer")
    assert name not in environment("rollout")
    for pod in (worker_pod(CLUSTER), head_pod(CLUSTER)):
        assert name not in variables(pod)
        assert name not in str(pod["containers"][0].get("command"))


def test_ray_start_line() -> None:
    # ray start --head --num-gpus 0 --resources '{"NPU": 8}' --disable-usage-stats
    head, group = CLUSTER["spec"]["headGroupSpec"], CLUSTER["spec"]["workerGroupSpecs"][0]
    assert head["rayStartParams"]["num-gpus"] == "0"
    assert group["resources"]["NPU"] == "8"
    for pod in (worker_pod(CLUSTER), head_pod(CLUSTER)):
        assert variables(pod)["RAY_USAGE_STATS_ENABLED"] == "0"


def test_training_command() -> None:
    spec = JOB.spec
    assert spec is not None
    assert (spec.mode, spec.training.backend, spec.algorithm.name) == ("Colocated", "Megatron", "grpo")
    assert (spec.resources.nodes, spec.resources.devices_per_node, derived.engines(spec)) == (1, 8, 4)
    assert spec.memory_saver.train_memory_margin == f"{2147483648 // 2**30}Gi"
    assert (spec.training.tensor_parallel, spec.rollout.tensor_parallel) == (2, 2)
    assert (spec.rollout.memory_fraction, spec.rollout.graph_mode) == (0.35, False)
    assert (spec.steps, spec.rollout.prompts_per_step, spec.rollout.samples_per_prompt) == (3000, 32, 8)
    assert spec.training.global_batch_size == 256


def test_engines_over_two_devices_get_their_devices_from_us() -> None:
    # Ray 2.60 reads this name; the one in Relax PR 52 has no RT and does nothing.
    assert environment("rollout")["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"] == "1"
    assert "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES" not in environment("trainer")
