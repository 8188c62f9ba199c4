"""Place of the packages of trackers: beside vLLM and Megatron, or in an environment of their own inside this one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

_HAS_PACKAGE = (
    "import importlib.util, sys; found = importlib.util.find_spec(sys.argv[1]); sys.exit(not (found and found.origin))"
)
_SECONDS = 30.0


def own_environment() -> Path:
    """Folder of the environment that `make tracker-packages` makes; their pins are not those of vLLM."""
    return Path(sys.prefix) / "trackers"


def python_with(name: str) -> str | None:
    """The interpreter that has a tracker's package; None where neither environment has it."""
    package = importlib.util.find_spec(name)
    # A folder of that name (W&B and Trackio make one where they are started) is no package.
    if package is not None and package.origin is not None:
        return sys.executable
    other = own_environment() / "bin" / "python"
    if not other.is_file():
        return None
    asked = subprocess.run([other, "-P", "-c", _HAS_PACKAGE, name], timeout=_SECONDS, capture_output=True)
    return None if asked.returncode else str(other)
