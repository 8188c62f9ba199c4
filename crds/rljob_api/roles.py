"""Environment of the processes of one role: what must not be set for a whole pod.

Trainer and engine share pods and devices and need different variables: the memory saver is preloaded into trainers
alone, and two HCCL processes on one device must not bind the same ports. The driver hands these variables to Ray in
each actor's `runtime_env`, in a pod and on a machine alike; the operator only prints them. What depends on the pod's
network, or must be set before `ray start`, is rendered into the pod by the operator.
"""

from __future__ import annotations

from rljob_api.profiles import PROFILES, HardwareProfile
from rljob_api.spec import HcclPorts, HcclSpec, MemorySaverMode, PortRange, Profile, RLJobSpec
from rljob_api.tuning import capture_variables

COMPUTE_VARIABLE = "RLJOB_COMPUTE_DEVICE"
"""Variable (`cpu`, nothing else) that has a job of any profile compute on the CPU: to try out a manifest, its pods and
its environment without the devices that it names. The driver says so in its log."""

MEMORY_SAVER_LIBRARY = "/opt/rljob/lib/torch_memory_saver_hook_mode_preload.abi3.so"
"""Link of the worker images to the preload hook of torch_memory_saver. It is a link, and outside of the package's
folder, because the package refuses to start when it finds two of its libraries there. A wrong path is ignored by the
loader in silence, so trainers check at their start that the hook is in."""

MEMORY_SAVER_DIGESTS = "/opt/rljob/memory-saver.sha256"
"""File of the worker images with the SHA-256 of the memory saver's libraries, one a line as `sha256sum` prints them."""

_NO_EXPANDABLE_SEGMENTS = "expandable_segments:False"
"""Neither the memory saver nor vLLM's sleep works on expandable segments, and images set True (vime PR 285): removing
the variable or setting it to nothing does not help, it has to say False."""


def trainer_variables(spec: RLJobSpec) -> dict[str, str]:
    """Variables of a trainer process, for its `runtime_env`; the user's own come over them.

    Sources: vime issue 255 (TMS_*, LD_PRELOAD, allocator), vime PR 285 (torch mode sets the mode alone).
    """
    hardware = PROFILES[spec.resources.profile]
    if not hardware.has_devices:
        return {}
    memory = device_memory_variables(spec.resources.profile, spec.memory_saver.mode)
    return memory | _hccl(hardware, spec.hccl, spec.hccl.trainer_ports)


def engine_variables(spec: RLJobSpec) -> dict[str, str]:
    """Variables of an engine process, for its `runtime_env`; the user's own come over them.

    Source: vime issue 255 (VLLM_*).
    """
    hardware = PROFILES[spec.resources.profile]
    if not hardware.has_devices:
        return {}
    # Endpoints for sleeping and weight updates; nothing here calls them over HTTP, tools that users attach do.
    memory = device_memory_variables(spec.resources.profile, MemorySaverMode.OFF)
    variables = memory | {"VLLM_SERVER_DEV_MODE": "1", **hardware.engine_environment} | capture_variables(spec)
    if spec.rollout.tensor_parallel > 1 and hardware.explicit_devices_variable is not None:
        # Ray would show the actor the one device of its own bundle.
        variables[hardware.explicit_devices_variable] = "1"
    return variables | _hccl(hardware, spec.hccl, spec.hccl.rollout_ports)


def device_memory_variables(profile: Profile, mode: MemorySaverMode) -> dict[str, str]:
    """Variables with which a process's device memory can sleep: they are read when it starts."""
    name = PROFILES[profile].allocator_variable
    allocator = {} if name is None else {name: _NO_EXPANDABLE_SEGMENTS}
    match mode:
        case MemorySaverMode.PRELOAD:
            return allocator | {
                # The one library, and not added to what is there: the hook takes the whole value for its own path.
                "LD_PRELOAD": MEMORY_SAVER_LIBRARY,
                "TMS_HOOK_MODE": "preload",
                "TMS_INIT_ENABLE": "1",
                "TMS_INIT_ENABLE_CPU_BACKUP": "1",
            }
        case MemorySaverMode.TORCH:
            return allocator | {"TMS_HOOK_MODE": "torch"}
        case MemorySaverMode.OFF:
            return allocator


def interface_variables(interface: str) -> dict[str, str]:
    """Variables of a network interface in HCCL's notation (`eth`, `=eth0`, `^eth`)."""
    variables = {"HCCL_SOCKET_IFNAME": interface}
    exact = interface.removeprefix("=")
    if interface.startswith("=") and "," not in exact:
        # Gloo and torch's TensorPipe take exact names alone, no prefixes and no exclusions.
        variables |= {"GLOO_SOCKET_IFNAME": exact, "TP_SOCKET_IFNAME": exact}
    return variables


def _hccl(hardware: HardwareProfile, hccl: HcclSpec, ports: HcclPorts) -> dict[str, str]:
    """Sources: CANN environment variable reference (8.5, 9.0)."""
    if not hardware.uses_hccl:
        return {}
    given = {
        "HCCL_CONNECT_TIMEOUT": hccl.connect_timeout_seconds,
        "HCCL_EXEC_TIMEOUT": hccl.exec_timeout_seconds,
        "HCCL_DETERMINISTIC": str(hccl.deterministic).lower(),
        "HCCL_BUFFSIZE": hccl.buffer_size_mb,
        "HCCL_OP_EXPANSION_MODE": hccl.op_expansion_mode,
        "HCCL_HOST_SOCKET_PORT_RANGE": _range(ports.host),
        "HCCL_NPU_SOCKET_PORT_RANGE": _range(ports.device),
    }
    variables = {name: str(value) for name, value in given.items() if value is not None}
    return variables | (interface_variables(hccl.interface) if hccl.interface is not None else {})


def _range(ports: PortRange | None) -> str:
    return "auto" if ports is None else f"{ports.first}-{ports.last}"
