"""What a scoring process may use and see: it runs code that looks at what a model wrote, and may run that too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from rljob_api import safe_text
from rljob_api.wire.names import PRIVATE_VARIABLES
from rljob_worker.host.reaper_process import OWNER_VARIABLE
from rljob_worker.rewards import keeper

_PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy",
    "no_proxy", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "VIRTUAL_ENV", "COVERAGE_PROCESS_START",
    # By its mark, what a reward started is still found when its keeper was killed.
    OWNER_VARIABLE,
)  # fmt: skip
_PASSED_PREFIXES = ("LC_",)
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Several rewards run beside generation: a thread for each core would also take memory for each."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one scoring process and all that it starts may use."""

    memory: int
    """Bytes, of all its processes together, and of each one's data segment (RLIMIT_DATA)."""
    network: bool = True
    """Whether it sees the machine's network."""
    processes: int = 64
    open_files: int = 1024
    """In each process."""
    file_bytes: int = 2**30
    """Size of a file that it writes."""
    output_bytes: int = 2**20
    """Of what it prints, in all."""

    def command(self, command: Iterable[str], descriptors: Iterable[int]) -> list[str]:
        """The command that runs another within these bounds; it alone gets the descriptors."""
        bounds = json.dumps(asdict(self) | {"descriptors": list(descriptors), "safe_text": safe_text.__file__})
        return [sys.executable, "-I", "-S", keeper.__file__, bounds, *command]


def environment(given: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Variables of a scoring process: what programs need, those of the manifest, and others of the driver by name.

    Args:
        given: `spec.environment.variables`.
        names: `reward.environment`.
    """
    own = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED or name.startswith(_PASSED_PREFIXES) or name in set(names)
    }
    variables = dict.fromkeys(_ONE_THREAD, "1") | own | dict(given)
    return {name: value for name, value in variables.items() if name not in PRIVATE_VARIABLES}


def explain(code: int, bounds: Bounds) -> str:
    """What a keeper's exit code says."""
    if code == keeper.OVER_MEMORY:
        return (
            "the scoring process was ended: with all it started it used more than "
            f"{bounds.memory / 2**20:.0f} MiB (reward.memory)"
        )
    if code == keeper.OVER_PROCESSES:
        return f"the scoring process was ended: it had started more than {bounds.processes} processes"
    if code == keeper.NO_NETWORK_NAMESPACE:
        return "the scoring process did not start: the kernel gives it no network of its own (reward.network: false)"
    return f"the scoring process died with exit code {code if code <= 128 else 128 - code}"


def network_can_be_closed() -> bool:
    """Whether this kernel gives a process a network of its own."""
    program = f"import runpy, sys; sys.exit(not runpy.run_path({keeper.__file__!r})['leave_network']())"
    return subprocess.run([sys.executable, "-I", "-S", "-c", program], timeout=30).returncode == 0
