"""CANN in the environment of a container."""

from __future__ import annotations

from rljob_api.profiles.ascend_a2 import DRIVER

_TOOLKITS = ("/usr/local/Ascend/ascend-toolkit/set_env.sh", "/usr/local/Ascend/cann/set_env.sh")
_ATB = "/usr/local/Ascend/nnal/atb/set_env.sh"


def cann_environment() -> str:
    """Command of the shell before `ray start`, so that CANN is found.

    Ascend images set it up in ~/.bashrc, which KubeRay's shell does not read: it is no login shell (KubeRay 1.4 and
    later). KubeRay goes on after a failed command, hence the `exit`.
    """
    libraries = f"{DRIVER}/lib64/common:{DRIVER}/lib64/driver"
    toolkits = " ".join(_TOOLKITS)
    return (
        f"export LD_LIBRARY_PATH={libraries}:${{LD_LIBRARY_PATH:-}}; "
        # Newer torch_npu refuses to start with both this and PYTORCH_NPU_ALLOC_CONF, which the roles set.
        "unset PYTORCH_ALLOC_CONF; "
        'if [ -z "${ASCEND_TOOLKIT_HOME:-}" ]; then '
        f'for f in {toolkits}; do if [ -r "$f" ]; then . "$f"; break; fi; done; '
        'if [ -z "${ASCEND_TOOLKIT_HOME:-}" ]; then '
        f'echo "rljob: the image has no CANN: none of {toolkits}" >&2; exit 1; fi; '
        f"if [ -r {_ATB} ]; then . {_ATB}; fi; fi; true"
    )
