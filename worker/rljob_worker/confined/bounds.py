"""Bounds of a confined process, and what it sees: it runs code that looks at what a model wrote, or runs that too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rljob_api import safe_text
from rljob_api.how_many import how_many
from rljob_api.wire.names import PRIVATE_VARIABLES
from rljob_worker.confined import keeper
from rljob_worker.confined.beside import Beside
from rljob_worker.confined.files import Files
from rljob_worker.host.reaper_process import OWNER_VARIABLE
from rljob_worker.host.sweeps import is_private, left_behind

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


_ROOT = str(Path(__file__).parents[2])
_IMPORT = f"import sys; sys.path.insert(0, sys.argv[1]); from {keeper.__name__} import"
_PROGRAM = f"{_IMPORT} run; run(sys.argv[2:])"
_TRY_NETWORK = f"{_IMPORT} leave_network; sys.exit(not leave_network())"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one confined process and all that it starts."""

    memory: int
    """Bytes, of all its processes together, and of each one's data segment (RLIMIT_DATA)."""
    files: Files = field(default_factory=Files)
    """Files that it may read and write, where the kernel has Landlock."""
    network: bool = True
    """Whether it sees the machine's network."""
    processes: int = 64
    open_files: int = 1024
    """In each process."""
    file_bytes: int = 2**30
    """Size of a file that it writes."""
    scratch_bytes: int = 2**32
    """Bytes of its temporary folder, where that lies on a disk; in memory it counts as that."""
    files_made: int = 100_000
    """Files in its temporary folder."""
    output_bytes: int = 2**20
    """Bytes of its whole output."""
    source: str = "reward"
    """A word that stands before each line of it."""
    beside: Beside | None = None
    """Shares its bounds, but those of the confinement."""

    def command(self, command: Iterable[str], descriptors: Iterable[int]) -> list[str]:
        """The command that runs another within these bounds; it alone gets the descriptors."""
        more = {"descriptors": list(descriptors), "temporary": tempfile.gettempdir(), "safe_text": safe_text.__file__}
        return [sys.executable, "-I", "-S", "-c", _PROGRAM, _ROOT, json.dumps(asdict(self) | more), *command]


def environment(given: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Variables of a confined process: what programs need, those of the manifest, and others of the driver by name.

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


def explain(code: int, bounds: Bounds, what: str, block: str) -> str:
    """Explanation of a keeper's exit code.

    Args:
        code: the keeper's.
        bounds: the process's.
        what: the process in words.
        block: block of the manifest with its bounds.
    """
    ended = f"the {what} was ended: "
    said = {
        keeper.OVER_MEMORY: ended + "with all it started, and files that are memory, it used more than "
        f"{bounds.memory / 2**20:.0f} MiB ({block}.memory)",
        keeper.OVER_PROCESSES: f"{ended}it had started more than {how_many(bounds.processes, 'process', 'processes')}",
        keeper.OVER_FILES: f"{ended}it had put more than {bounds.scratch_bytes / 2**30:.0f} GiB or "
        f"{how_many(bounds.files_made, 'file')} into its temporary folder",
        keeper.HIDDEN: f"{ended}a program that it ran cannot be measured: it is executable and not readable",
        keeper.OF_ITS_OWN: f"the {what} died with an exit code of its own from {keeper.OVER_MEMORY} to "
        f"{keeper.OF_ITS_OWN}, such as Python's where its standard output was closed",
        keeper.NO_NETWORK_NAMESPACE: f"the {what} did not start: the kernel gives it no network of its own "
        f"({block}.network: false)",
    }
    return said.get(code, f"the {what} died with exit code {code if code <= 128 else 128 - code}")


def network_can_be_closed() -> bool:
    """Whether this kernel gives a process a network of its own."""
    return subprocess.run([sys.executable, "-I", "-S", "-c", _TRY_NETWORK, _ROOT], timeout=30).returncode == 0


def sweep() -> None:
    """Remove temporary folders whose keepers were killed."""
    for folder in left_behind(Path(tempfile.gettempdir()), keeper.SCRATCH):
        # What ran there may have changed its mode.
        if is_private(folder, others_may=0o777):
            keeper.remove(str(folder))
