"""A job that has this machine's devices to itself: what pods have from their profile, and what has to be here."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from rljob_api import RLJobSpec
from rljob_api.profiles import PROFILES
from rljob_api.profiles.base import BACKEND_AUTOLOAD_VARIABLE
from rljob_api.roles import MEMORY_SAVER_LIBRARY
from rljob_api.spec import MemorySaverMode
from rljob_api.tuning import resolved_tuning, tuning_variables
from rljob_worker.devices.kinds import device_kind
from rljob_worker.errors import UserError
from rljob_worker.host.sweeps import is_private
from rljob_worker.memory.saver_library import package_library

logger = logging.getLogger(__name__)
_CANN_VARIABLE = "ASCEND_TOOLKIT_HOME"
"""Variable that CANN's set_env.sh sets; torch_npu finds its libraries by it."""
_COMPILER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def check_machine(spec: RLJobSpec) -> None:
    """Refuse what the first process that uses a device would find out.

    Raises:
        UserError: CANN is not set up in this shell, or the memory saver is not installed.
    """
    if device_kind(spec.resources).ray_resource is None:
        return
    profile = PROFILES[spec.resources.profile]
    if profile.needs_cann and not os.environ.get(_CANN_VARIABLE):
        raise UserError(
            f"spec.resources.profile: {profile.name} needs CANN, and {_CANN_VARIABLE} is not set in this shell; run "
            "`source /usr/local/Ascend/ascend-toolkit/set_env.sh` (or cann/set_env.sh there) first"
        )
    _saver_variables(spec)


def machine_variables(spec: RLJobSpec, *, trainer: bool) -> dict[str, str]:
    """Variables of trainers or engines that are not in pods, over those of their role: tuning, overrides, and where
    the memory saver is; empty where the CPU stands for devices.

    Raises:
        UserError: the memory saver is not installed.
    """
    if device_kind(spec.resources).ray_resource is None:
        return {}
    # This process has it off (`rljob run`), and those that it starts take after it.
    variables = tuning_variables(resolved_tuning(spec), str(_compile_cache())) | {BACKEND_AUTOLOAD_VARIABLE: "1"}
    if spec.resources.threads_per_device is not None:
        variables.pop("OMP_NUM_THREADS", None)
    return variables | (_saver_variables(spec) if trainer else {}) | spec.resources.overrides.environment


def _saver_variables(spec: RLJobSpec) -> dict[str, str]:
    # Images link the library to a place of their own.
    if spec.memory_saver.mode is not MemorySaverMode.PRELOAD or Path(MEMORY_SAVER_LIBRARY).exists():
        return {}
    return {"LD_PRELOAD": package_library(MemorySaverMode.PRELOAD)}


def _compile_cache() -> Path:
    return _cache() / "operators"


def compiler_variables() -> dict[str, str]:
    """Variables of all processes on this machine: the folder of what torch compiles."""
    # By default torch loads compiled code from a folder of the temporary one, which whoever is first there can own.
    given = os.environ.get(_COMPILER_VARIABLE)
    return {} if given else {_COMPILER_VARIABLE: str(_cache() / "inductor")}


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")) / "rljob"


def shared_cache(folder: Path) -> str | None:
    """A folder beside run folders on which pods keep what they compiled; None where this user has none to itself.

    A user that can write to it could make engines run code.
    """
    cache = folder / f".cache-{os.getuid()}"
    with suppress(OSError):
        cache.mkdir(mode=0o700, parents=True)
    if not is_private(cache, others_may=0o055):
        logger.warning("%s: not this user's own folder: what engines compile is not kept there", cache)
        return None
    return str(cache)
