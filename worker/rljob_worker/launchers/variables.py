"""Environment variables of launch scripts: the field that takes the place of each, or why there is none."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rljob_api.rules.variables import ALLOCATORS, OWNED, SAVER_VARIABLES
from rljob_worker.launchers.draft import Draft, Rule, Setting, nowhere, one_of, switch, text, to, whole

_SHELL = "of the shell or of a build; the image has its own"
_TUNING = "resources.tuning"
_SECRETS = re.compile(r"(?i)(TOKEN|API_?KEY|SECRET|PASSWORD|CREDENTIAL)")


def _allocator(draft: Draft, setting: Setting) -> None:
    if re.fullmatch(r"(?i)\s*expandable_segments\s*:\s*(true|false)\s*", text(setting.value)):
        draft.leave(setting, "always expandable_segments:False: with True memory is not given back")
    else:
        draft.put(setting, f"environment.trainer.{setting.name}", text(setting.value))


def _openmp(draft: Draft, setting: Setting) -> None:
    draft.put(setting, f"{_TUNING}.ompNumThreads", setting.value if setting.unknown else whole(setting.value))


RULES: dict[str, Rule] = {
    "HCCL_CONNECT_TIMEOUT": to("hccl.connectTimeoutSeconds", whole),
    "HCCL_EXEC_TIMEOUT": to("hccl.execTimeoutSeconds", whole),
    "HCCL_DETERMINISTIC": to("hccl.deterministic", switch),
    "HCCL_BUFFSIZE": to("hccl.bufferSizeMb", whole),
    "HCCL_OP_EXPANSION_MODE": to("hccl.opExpansionMode", text),
    "HCCL_SOCKET_IFNAME": to("hccl.interface", text),
    "GLOO_SOCKET_IFNAME": nowhere("follows from hccl.interface"),
    "HCCL_IF_IP": nowhere("each node's own address: hccl.useHostIp, with network.hostNetwork"),
    "HCCL_IF_BASE_PORT": nowhere("trainer and engine would bind the same ports: hccl.trainerPorts, hccl.rolloutPorts"),
    "TASK_QUEUE_ENABLE": to(f"{_TUNING}.taskQueueEnable", whole),
    "CPU_AFFINITY_CONF": nowhere("with several devices on a node torch_npu binds all processes to the same cores"),
    "MULTI_STREAM_MEMORY_REUSE": to(f"{_TUNING}.multiStreamMemoryReuse", whole),
    "COMBINED_ENABLE": to(f"{_TUNING}.combinedEnable", switch),
    "OMP_NUM_THREADS": _openmp,
    "ACL_OP_COMPILER_CACHE_MODE": nowhere("resources.tuning.compileCache is on"),
    "ACL_OP_COMPILER_CACHE_DIR": nowhere("resources.tuning.compileCachePath, a folder of the node"),
    "ASCEND_MAX_OP_CACHE_SIZE": to(f"{_TUNING}.compileCacheMib", whole),
    "ASCEND_GLOBAL_LOG_LEVEL": to(
        f"{_TUNING}.logLevel",
        one_of({"0": "DEBUG", "1": "INFO", "2": "WARNING", "3": "ERROR"}, "no level; 0 to 3"),
    ),
    **dict.fromkeys(("ASDOPS_LOG_LEVEL", "ATB_LOG_LEVEL"), nowhere("follows from resources.tuning.logLevel")),
    **dict.fromkeys(ALLOCATORS, _allocator),
    "TMS_HOOK_MODE": to("memorySaver.mode", one_of({"preload": "preload", "torch": "torch"}, "preload or torch")),
    "NPU_MEMORY_FRACTION": nowhere("two processes share a device: rollout.memoryFraction, and what remains"),
    "USE_MODELSCOPE": lambda draft, setting: (
        draft.put(setting, "model.hub", "ModelScope")
        if switch(setting.value)
        else draft.leave(setting, "HuggingFace is the default")
    ),
    "VLLM_ASCEND_ENABLE_NZ": nowhere("always 0: weights in that layout cannot be updated in place"),
    "VLLM_SERVER_DEV_MODE": nowhere("always 1"),
    "VLLM_USE_V1": nowhere("vLLM has no other engine"),
    **dict.fromkeys(
        (
            "VLLM_ASCEND_ENABLE_FLASHCOMM",
            "VLLM_ASCEND_ENABLE_DENSE_OPTIMIZE",
            "VLLM_ASCEND_ENABLE_PREFETCH_MLP",
        ),
        nowhere("vllm-ascend 0.23 does not read it"),
    ),
    "CUDA_DEVICE_MAX_CONNECTIONS": nowhere("the worker sets what its backend needs"),
    "NCCL_CUMEM_ENABLE": nowhere("the worker sets what its backend needs"),
    "PYTHONBUFFERED": nowhere("output is not buffered"),
    "PYTHONUNBUFFERED": nowhere("output is not buffered"),
    "WANDB_MODE": nowhere("records.trackers[].offline"),
    "HEAD_IP": nowhere("KubeRay starts Ray"),
    **dict.fromkeys(("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "SHELL", "USER"), nowhere(_SHELL)),
    **{
        name: nowhere("RLJob sets it" if name in SAVER_VARIABLES[2:] else f"not the user's: {why}")
        for name, why in {**OWNED, **dict.fromkeys(SAVER_VARIABLES, "memorySaver.mode decides")}.items()
        if name not in ("TMS_HOOK_MODE", "HCCL_IF_IP", "HCCL_SOCKET_IFNAME", "HCCL_IF_BASE_PORT", "PYTHONPATH")
    },
}


def apply_variables(draft: Draft, settings: Iterable[Setting], place: str = "environment.variables") -> None:
    """Put variables into the draft: into fields of their own, else into `place`.

    A value that may be a secret is not written down: the manifest is no place for it.
    """
    for setting in settings:
        rule = RULES.get(setting.name)
        try:
            if rule is not None:
                rule(draft, setting)
            elif _SECRETS.search(setting.name):
                hidden = Setting(setting.name, "(its value is left out)")
                draft.leave(hidden, "a secret: environment.secrets names the Kubernetes secret that has it")
            elif setting.name.startswith("RAY_"):
                draft.leave(setting, "Ray is started by KubeRay or by `rljob run`")
            else:
                draft.put(setting, f"{place}.{setting.name}", text(setting.value))
        except ValueError as error:
            draft.leave(setting, str(error))
    if draft.get("hccl.opExpansionMode") == "AIV" and draft.get("hccl.deterministic") is None:
        # HCCL's default, where the script sets none.
        draft.assume("hccl.deterministic", False)
