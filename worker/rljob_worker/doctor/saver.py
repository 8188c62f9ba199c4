"""The memory saver's library: where it is, what it hooks, and what hooking shows in a trainer.

What the library does on a device is tried by `device_checks`; here nothing is loaded into this process.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

from rljob_api.roles import MEMORY_SAVER_DIGESTS, MEMORY_SAVER_LIBRARY
from rljob_api.spec import MemorySaverMode
from rljob_worker.doctor.facts import NodeFacts, SaverFile
from rljob_worker.doctor.findings import Finding, not_applicable, ok, problem, warning

_HOOKS = {b"aclrtMallocAlign32": "Ascend", b"cudaMalloc": "CUDA"}
"""A function that each build replaces -> the build (torch_memory_saver's core.cpp and sgl-kernel-npu's)."""
_BUILD = {"npu": "Ascend", "cuda": "CUDA"}
_STEM = "torch_memory_saver_hook_mode_preload"
_OTHER_ALLOCATORS = ("jemalloc", "tcmalloc")
_WRONG_IMAGE = "use the worker image of this profile (images/), or build torch_memory_saver for this kind of device"


def library(preloaded: str) -> SaverFile | None:
    """The library that LD_PRELOAD names, else the one that the image has."""
    first = preloaded.replace(":", " ").split()
    path = Path(first[0]) if first else Path(MEMORY_SAVER_LIBRARY)
    try:
        content = path.read_bytes()
    except OSError:
        return None
    build = next((name for symbol, name in _HOOKS.items() if symbol in content), "unknown")
    return SaverFile(
        str(path), build, hashlib.sha256(content).hexdigest(), recorded_digest(path, Path(MEMORY_SAVER_DIGESTS))
    )


def copies() -> tuple[str, ...]:
    """Files that the package takes for its preload hook: in its folder and in the one above."""
    spec = importlib.util.find_spec("torch_memory_saver")
    if spec is None or not spec.submodule_search_locations:
        return ()
    folder = Path(next(iter(spec.submodule_search_locations)))
    return tuple(str(path) for place in (folder, folder.parent) for path in sorted(place.glob(f"{_STEM}*.so")))


def recorded_digest(library: Path, file: Path) -> str | None:
    """The digest that the image recorded for a library, by its path or by that of the file it is a link to."""
    try:
        lines = [line.split(maxsplit=1) for line in file.read_text().splitlines()]
    except OSError:
        return None
    recorded = {line[1].strip().lstrip("*"): line[0].lower() for line in lines if len(line) == 2}
    return recorded.get(str(library)) or recorded.get(str(library.resolve()))


def check(facts: NodeFacts, mode: MemorySaverMode) -> list[Finding]:
    """Library, digest, package and hook."""
    name = "memory saver"
    if facts.kind == "cpu":
        return [not_applicable(name, "the cpu device has an arena of its own")]
    if mode is MemorySaverMode.OFF:
        return [not_applicable(name, "spec.memorySaver.mode is off")]
    if mode is MemorySaverMode.TORCH:
        return [_package(facts)]
    return [_library(facts), _digest(facts.saver), _package(facts), *check_preload(facts)]


def _library(facts: NodeFacts) -> Finding:
    name, wanted = "memory saver library", f"torch_memory_saver's preload hook for {facts.kind}"
    if facts.saver is None:
        path = facts.trainer.variables.get("LD_PRELOAD") or MEMORY_SAVER_LIBRARY
        return problem(name, f"{path} is not there", wanted, f"{_WRONG_IMAGE}, and link it to {MEMORY_SAVER_LIBRARY}")
    if facts.saver.build != _BUILD[facts.kind]:
        found = f"{facts.saver.path}: build for {facts.saver.build}"
        return problem(name, found, wanted, _WRONG_IMAGE)
    return ok(name, f"{facts.saver.path}: build for {facts.saver.build}", wanted)


def _digest(found: SaverFile | None) -> Finding:
    name = "memory saver digest"
    if found is None:
        return not_applicable(name, "there is no library")
    if found.recorded is None:
        text = f"nobody knows which build this is; `sha256sum {found.path} > {MEMORY_SAVER_DIGESTS}` records it"
        return warning(name, found.sha256[:12], f"the one in {MEMORY_SAVER_DIGESTS}", text)
    if found.recorded != found.sha256:
        fix = "the library is not the one that the image was built with: take the image's own"
        return problem(name, found.sha256[:12], found.recorded[:12], fix)
    return ok(name, found.sha256[:12], found.recorded[:12])


def _package(facts: NodeFacts) -> Finding:
    name, wanted = "memory saver package", "torch_memory_saver with one preload library"
    version = facts.versions.get("torch_memory_saver")
    if version is None:
        return problem(name, "not installed", wanted, _WRONG_IMAGE)
    # The CUDA build has a library for each major version of CUDA.
    if not facts.saver_copies or (facts.kind == "npu" and len(facts.saver_copies) > 1):
        fix = "it refuses to start unless it finds exactly one: remove the others, and link it from elsewhere"
        return problem(name, f"{version}, {len(facts.saver_copies)} libraries", wanted, fix)
    return ok(name, version, wanted)


def check_preload(facts: NodeFacts) -> list[Finding]:
    """Check the effect of LD_PRELOAD on a trainer."""
    name, wanted = "LD_PRELOAD of trainers", "the memory saver alone"
    process = facts.trainer
    entries = process.variables.get("LD_PRELOAD", "").replace(":", " ").split()
    if process.problem:
        fix = "a library that is preloaded lacks a dependency (LD_LIBRARY_PATH must have CANN's) or is broken"
        return [problem(name, f"a process with a trainer's environment {process.problem}", wanted, fix)]
    others = [lib for lib in process.libraries if any(allocator in lib for allocator in _OTHER_ALLOCATORS)]
    if others or len(entries) > 1:
        found = ", ".join([os.path.basename(path) for path in entries] or others)
        fix = "the hook takes the whole value for its own path: LD_PRELOAD must have one entry, and no jemalloc"
        return [problem(name, found, wanted, f"{fix}; the image's ~/.bashrc adds one, start Ray without it")]
    if process.ignored:
        return [problem(name, process.ignored, wanted, f"the loader goes on without it; {_WRONG_IMAGE}")]
    if not entries:
        return [problem(name, "empty", wanted, "spec.memorySaver.mode: preload sets it; do not unset it for trainers")]
    if not process.saver_hooked:
        return [problem(name, f"{entries[0]} has no tms_pause", wanted, f"this is no memory saver; {_WRONG_IMAGE}")]
    hook = process.variables.get("TMS_HOOK_MODE")
    if hook != "preload" or process.variables.get("TMS_INIT_ENABLE") != "1":
        found = f"TMS_HOOK_MODE={hook}, TMS_INIT_ENABLE={process.variables.get('TMS_INIT_ENABLE')}"
        return [problem("memory saver hook", found, "preload and 1", "leave these to spec.memorySaver.mode: preload")]
    return [ok(name, os.path.basename(entries[0]), wanted), ok("memory saver hook", "preload", "preload")]


def check_installed(facts: NodeFacts) -> list[Finding]:
    """Check the library, and the variables that a shell hands on, where no job names a mode."""
    if facts.kind == "cpu":
        return check(facts, MemorySaverMode.OFF)
    name = "LD_PRELOAD of this shell"
    entries = facts.trainer.variables.get("LD_PRELOAD", "").replace(":", " ").split()
    handed = [os.path.basename(entry) for entry in entries if any(one in entry for one in _OTHER_ALLOCATORS)]
    if handed:
        fix = "a Ray that is started from this shell hands it to its processes; unset LD_PRELOAD before `ray start`"
        shell = warning(name, ", ".join(handed), "no allocator", fix)
    else:
        shell = ok(name, " ".join(entries) or "empty", "no allocator")
    return [_library(facts), _digest(facts.saver), _package(facts), shell]
