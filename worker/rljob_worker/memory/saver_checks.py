"""Whether torch_memory_saver will really work in this process, found out before the model is built."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rljob_api.roles import MEMORY_SAVER_LIBRARY
from rljob_api.spec import MemorySaverMode
from rljob_worker.devices.base import AcceleratorMemory
from rljob_worker.errors import UserError
from rljob_worker.host.memory import HostMemory
from rljob_worker.memory.saver_library import SaverLibrary, defined_in, open_saver_library, package_library
from rljob_worker.memory.states import MemorySaver
from rljob_worker.memory.torch_saver import TorchMemorySaver

PROBE_BYTES = 256 * 1024**2
"""Device memory that the functional check lets sleep."""
_ALLOCATOR_VARIABLES = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SHARED_ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
_STEM = "torch_memory_saver"
_TRUE = ("1", "true", "TRUE", "yes", "YES")
"""Values that the library takes for true."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    passed: bool
    found: str
    wanted: str
    fix: str
    """Remedy when it failed."""

    def sentence(self) -> str:
        """For an error message."""
        return f"{self.name}: found {self.found}, wanted {self.wanted}; {self.fix}"


@dataclass(frozen=True, slots=True)
class SaverFacts:
    """Inputs of the checks, read from the process once."""

    environment: Mapping[str, str] = field(repr=False)
    mapped: tuple[str, ...]
    """Files of torch_memory_saver in the process's address space."""
    pause_in: str | None
    """File that defines `tms_pause`."""
    hook_in: str | None
    """File that defines the function with which torch allocates device memory."""
    tracking: bool | None
    """Whether the main thread's allocations are hooked; None where the library cannot be asked."""


def read_facts(device: AcceleratorMemory) -> SaverFacts:
    """Look at this process; call it on the thread that will train."""
    pause_in = defined_in("tms_pause")
    return SaverFacts(
        environment=dict(os.environ),
        mapped=mapped_libraries(Path("/proc/self/maps").read_text()),
        pause_in=pause_in,
        hook_in=defined_in(device.hooked_function),
        tracking=open_saver_library(MemorySaverMode.PRELOAD).tracking if pause_in else None,
    )


def mapped_libraries(maps: str) -> tuple[str, ...]:
    """Paths of torch_memory_saver's libraries in the text of /proc/<pid>/maps, in order, each once."""
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count(" ") and "/" in line)
    return tuple(dict.fromkeys(path for path in paths if _STEM in Path(path).name and ".so" in Path(path).name))


def preload_checks(facts: SaverFacts, device: AcceleratorMemory) -> list[Check]:
    """Whether the hook of preload mode is in: facts, not intentions; the loader ignores a wrong path in silence."""
    environment = facts.environment
    entries = [entry for entry in environment.get("LD_PRELOAD", "").replace(":", " ").split() if entry]
    restart = "the driver sets it for each trainer; a user's own value goes to spec.environment.trainer"
    mapped = facts.mapped[0] if len(facts.mapped) == 1 else None
    return [
        Check(
            "LD_PRELOAD",
            len(entries) == 1 and _STEM in entries[0],
            repr(environment.get("LD_PRELOAD", "")),
            f"one entry, torch_memory_saver's preload library ({MEMORY_SAVER_LIBRARY})",
            f"{restart}, and an image's jemalloc must not be in it",
        ),
        Check(
            "memory saver library",
            mapped is not None,
            ", ".join(facts.mapped) or "none in /proc/self/maps",
            "exactly one library of torch_memory_saver in the process",
            "LD_PRELOAD must name an existing file whose own libraries are found (LD_LIBRARY_PATH): the loader ignores "
            "any other",
        ),
        Check(
            "tms_pause",
            facts.pause_in is not None and _same(facts.pause_in, mapped),
            f"defined in {facts.pause_in}" if facts.pause_in else "not defined in the process",
            "defined in the preloaded library",
            "build the library for preload mode (TMS_HOOK_MODE_PRELOAD), for this Python's architecture",
        ),
        Check(
            "allocation hook",
            facts.hook_in is not None and _same(facts.hook_in, mapped),
            f"{device.hooked_function} is {facts.hook_in or 'not defined in the process'}",
            f"{device.hooked_function} of the preloaded library",
            "preload the build for this kind of device, first and alone; torch_npu must be 2.10.0.post4 or newer of "
            "its line, older ones look the function up past LD_PRELOAD",
        ),
        _flag("TMS_INIT_ENABLE_CPU_BACKUP", environment, "without it small tensors are lost at the first sleep"),
        Check(
            "tracking",
            facts.tracking is True and environment.get("TMS_INIT_ENABLE") in _TRUE,
            f"TMS_INIT_ENABLE={environment.get('TMS_INIT_ENABLE', '')!r}, main thread "
            f"{'tracked' if facts.tracking else 'not tracked'}",
            "TMS_INIT_ENABLE=1, and the main thread tracked",
            f"the variable must be there before the process starts; {restart}",
        ),
        _hook_mode(MemorySaverMode.PRELOAD, environment),
        allocator_check(environment, device),
    ]


def torch_checks(facts: SaverFacts, device: AcceleratorMemory, library: str) -> list[Check]:
    """Whether torch mode can work: its library is there, and no other is hooked in beside it."""
    preloaded = [entry for entry in facts.environment.get("LD_PRELOAD", "").replace(":", " ").split() if _STEM in entry]
    return [
        Check(
            "memory saver library",
            Path(library).is_file(),
            library,
            "torch_memory_saver's library for torch mode",
            "install the torch_memory_saver that was built for this kind of device",
        ),
        Check(
            "LD_PRELOAD",
            not preloaded and facts.pause_in is None,
            repr(facts.environment.get("LD_PRELOAD", "")),
            "no library of torch_memory_saver",
            "take it out, or set spec.memorySaver.mode to preload: two of them would both hold the memory",
        ),
        _hook_mode(MemorySaverMode.TORCH, facts.environment),
        allocator_check(facts.environment, device),
    ]


def allocator_check(environment: Mapping[str, str], device: AcceleratorMemory) -> Check:
    """Expandable segments are mapped by torch itself, past every hook."""
    values = {name: environment[name] for name in _ALLOCATOR_VARIABLES if environment.get(name)}
    expandable = [
        name for name, value in values.items() if "expandable_segments:true" in value.replace(" ", "").lower()
    ]
    # Newer torch_npu refuses to start with both.
    both = device.allocator_variable in values and _SHARED_ALLOCATOR_VARIABLE in values
    return Check(
        "allocator settings",
        not expandable and not both,
        ", ".join(f"{name}={value}" for name, value in values.items()) or "none set",
        f"expandable_segments:True in none of {', '.join(_ALLOCATOR_VARIABLES)}, and one of them at most",
        f"set {device.allocator_variable}=expandable_segments:False (images set True) and unset the others",
    )


def probe(saver: TorchMemorySaver, device: AcceleratorMemory, nbytes: int = PROBE_BYTES) -> Check:
    """Let memory sleep and wake for real: all of it is given back meanwhile, and contents return."""
    mode = saver.mode
    half = nbytes // 2
    with saver.region("backup"):
        kept = torch.empty(half, dtype=torch.uint8, device=device.torch_device).fill_(165)
    # Outside of regions: in preload mode this sleeps too and the library itself keeps it.
    plain = torch.empty(half, dtype=torch.uint8, device=device.torch_device).fill_(90)
    sums = device.checksum(kept), device.checksum(plain)
    wanted = nbytes if mode is MemorySaverMode.PRELOAD else half
    machine = MemorySaver(saver, device)
    device.empty_cache()
    before = device.memory_info().free
    machine.pause()
    freed = device.memory_info().free - before
    machine.resume()
    intact = (device.checksum(kept), device.checksum(plain)) == sums
    return Check(
        "sleep and wake",
        freed >= wanted and intact,
        f"{freed} bytes given back, contents {'intact' if intact else 'lost'}",
        f"{wanted} bytes given back, contents intact",
        "the hook is loaded but torch allocates past it: compare torch_npu, CANN and torch_memory_saver with "
        "docs/ascend-contracts.md; no other process may allocate on the device meanwhile",
    )


def verified_torch_saver(
    mode: MemorySaverMode,
    device: AcceleratorMemory,
    *,
    host: HostMemory | None = None,
    probe_bytes: int = PROBE_BYTES,
) -> TorchMemorySaver:
    """The memory saver, after all checks; `probe_bytes` of device memory sleep and wake in the last one.

    Raises:
        UserError: with a sentence for each check that failed.
    """
    device.set_current()
    facts = read_facts(device)
    path = "" if mode is MemorySaverMode.PRELOAD else package_library(mode)
    checks = preload_checks(facts, device) if mode is MemorySaverMode.PRELOAD else torch_checks(facts, device, path)
    refuse_failed(checks)
    library: SaverLibrary = open_saver_library(mode)
    saver = TorchMemorySaver(library, device, host=host)
    refuse_failed([probe(saver, device, probe_bytes)])
    device.empty_cache()
    return saver


def refuse_failed(checks: list[Check]) -> None:
    """UserError that names every failed check."""
    if failed := [check.sentence() for check in checks if not check.passed]:
        raise UserError("the memory saver would not work (spec.memorySaver): " + "; ".join(failed))


def _flag(name: str, environment: Mapping[str, str], why: str) -> Check:
    value = environment.get(name, "")
    return Check(name, value in _TRUE, repr(value), "'1'", f"set it before the trainer starts; {why}")


def _hook_mode(mode: MemorySaverMode, environment: Mapping[str, str]) -> Check:
    value = environment.get("TMS_HOOK_MODE")
    return Check("TMS_HOOK_MODE", value == mode.value, repr(value), repr(mode.value), "the driver sets it for trainers")


def _same(path: str, other: str | None) -> bool:
    return other is not None and os.path.realpath(path) == os.path.realpath(other)
