"""A process with one role's environment, to see what the loader and the variables make of it.

The loader skips a library that it does not find with a line on stderr, and ends every process (127) whose library lacks
a dependency: only a process that was really started so can tell. It imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping

from rljob_worker.doctor.facts import ProcessFacts
from rljob_worker.doctor.programs import last_line

WATCHED = (
    "LD_PRELOAD", "TMS_HOOK_MODE", "TMS_INIT_ENABLE", "TMS_INIT_ENABLE_CPU_BACKUP",
    "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
    "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES",
    "HCCL_SOCKET_IFNAME", "HCCL_IF_IP", "HCCL_IF_BASE_PORT", "HCCL_HOST_SOCKET_PORT_RANGE",
    "HCCL_NPU_SOCKET_PORT_RANGE", "VLLM_ASCEND_ENABLE_NZ",
)  # fmt: skip
_SECONDS = 60.0
_LIBRARY = re.compile(r"/\S*(?:torch_memory_saver|jemalloc|tcmalloc)\S*\.so\S*")
_LOADER = re.compile(r"^ERROR: ld\.so: .*$", re.MULTILINE)


def look(environment: Mapping[str, str]) -> ProcessFacts:
    """Start a Python with these variables over this process's own, and read what it sees."""
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS, env={**os.environ, **environment}
        )
    except subprocess.TimeoutExpired:
        return ProcessFacts(problem=f"did not start within {_SECONDS:g} s")
    said = done.stderr.decode(errors="replace")
    if done.returncode:
        return ProcessFacts(problem=f"ended with exit code {done.returncode}: {last_line(said)}")
    seen = json.loads(done.stdout)
    ignored = _LOADER.search(said)
    return ProcessFacts(
        variables=seen["variables"],
        libraries=tuple(seen["libraries"]),
        saver_hooked=seen["hooked"],
        ignored=ignored[0] if ignored else "",
    )


def main() -> None:
    """Print what this process sees."""
    with open("/proc/self/maps") as maps:
        libraries = sorted({found[0] for line in maps if (found := _LIBRARY.search(line))})
    seen = {
        "variables": {name: os.environ[name] for name in WATCHED if name in os.environ},
        "libraries": libraries,
        "hooked": hasattr(ctypes.CDLL(None), "tms_pause"),
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
