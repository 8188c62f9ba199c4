"""torch_npu's own wheel, executed: CANN's libraries under it are stand-ins whose device memory is host memory."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from sources import CACHE, executable

HERE = Path(__file__).parent
WHEEL = "torch_npu==2.11.0.post3"
"""The release for the torch that the tests have; the pin of the image for Ascend is for the torch before it."""
_SOURCES = ("runtime.c", "operators.cpp", "kernels.cpp", "saver.c", "build.py")
_SAVER = "torch_memory_saver_hook_mode_{}.abi3.so"
_EMPTY = ("hccl", "acl_op_compiler", "ge_runner", "acl_tdt_channel")
"""Libraries that torch_npu is linked to, and whose functions it does not call here."""
_LINKED = ("libtorch_npu.so", "libtensorpipe.so")
_NOTHING = ("Msprof", "aclmdlInitDump", "aclmdlFinalizeDump", "aclmdlSetDump")
"""Profiling and dumps: called, and of no use."""


@dataclass(frozen=True, slots=True)
class Cann:
    """What is built."""

    folder: Path
    wheel: Path

    def environment(self, mode: str) -> dict[str, str]:
        """What a process has on an NPU with that mode of the memory saver."""
        lib = self.folder / "lib"
        hook = {"TMS_HOOK_MODE": mode}
        if mode == "preload":
            library = str(lib / _SAVER.format("preload"))
            hook |= {"LD_PRELOAD": library, "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
        settings = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False", "ASCEND_RT_VISIBLE_DEVICES": "5"}
        return {"LD_LIBRARY_PATH": str(lib)} | settings | hook

    @property
    def path(self) -> list[str]:
        """For PYTHONPATH."""
        return [str(self.folder), str(self.wheel)]


def build() -> Cann:
    """The stand-ins for the wheel; compiled once and kept."""
    wheel = executable(WHEEL)
    content = [(HERE / name).read_bytes() for name in _SOURCES] + [torch.__version__.encode(), str(wheel).encode()]
    folder = CACHE / f"cann-{hashlib.sha256(b'|'.join(content)).hexdigest()[:16]}"
    if not folder.is_dir():
        if missing := [name for name in ("gcc", "g++", "nm") if shutil.which(name) is None]:
            raise RuntimeError(
                f"contracts: {', '.join(missing)} not found; install them: CANN's stand-ins are compiled"
            )
        place = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.rmtree(place, ignore_errors=True)
        (place / "lib").mkdir(parents=True)
        _compile(place / "lib", wheel / "torch_npu")
        _saver_package(place / "torch_memory_saver")
        place.rename(folder)
    return Cann(folder, wheel)


def _compile(lib: Path, package: Path) -> None:
    headers = ["-I", str(package / "include/third_party/acl/inc")]
    shared = ["gcc", "-shared", "-fPIC", "-O1", *headers, "-L", str(lib), "-Wl,--no-as-needed,-rpath,$ORIGIN"]
    runtime = lib / "runtime.o"
    _run(["gcc", "-c", "-fPIC", "-O1", "-Wall", "-Werror", *headers, str(HERE / "runtime.c"), "-o", str(runtime)])
    rest = lib / "rest.c"
    rest.write_text(_rest(_symbols(runtime, "--defined-only"), package / "lib"))
    _library(shared, lib, "ascendcl", [str(runtime), str(rest)])
    for name in _EMPTY:
        _library(shared, lib, name, ["-xc", os.devnull, "-lascendcl"])
    include, torch_lib = (Path(torch.__file__).parent / part for part in ("include", "lib"))
    compiler = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-w", *headers]
    compiler += ["-I", str(include), "-I", str(include / "torch/csrc/api/include"), "-L", str(torch_lib)]
    _run([*compiler, str(HERE / "operators.cpp"), "-o", str(lib / "libopapi.so"), "-lc10", "-ltorch_cpu"])
    npu = ["-L", str(package / "lib"), "-ltorch_npu", "-Wl,--allow-shlib-undefined"]
    _run([*compiler, str(HERE / "kernels.cpp"), "-o", str(lib / "libkernels.so"), "-lc10", "-ltorch_cpu", *npu])
    _library(shared, lib, "graph", ["-xc", os.devnull, "-lascendcl", "-lopapi"])
    saver = [str(HERE / "saver.c"), "-lascendcl"]
    _run([*shared, "-DPRELOAD", *saver, "-o", str(lib / _SAVER.format("preload"))])
    _run([*shared, *saver, "-o", str(lib / _SAVER.format("torch"))])
    runtime.unlink()
    rest.unlink()


def _library(shared: list[str], lib: Path, name: str, made_of: list[str]) -> None:
    file = f"lib{name}.so"
    _run([*shared, *made_of, "-o", str(lib / file), f"-Wl,-soname,{file}"])


def _symbols(file: Path, which: str) -> set[str]:
    done = subprocess.run(["nm", *which.split(), str(file)], capture_output=True, text=True, timeout=60, check=True)
    return {line.split()[-1] for line in done.stdout.splitlines()}


def _rest(defined: set[str], libraries: Path) -> str:
    """C of what torch_npu is linked to and `defined` lacks: each ends the process with its name."""
    prefixes = ("acl", "Hccl", "Msprof", "rt")
    wanted = set().union(*(_symbols(libraries / name, "-D --undefined-only") for name in _LINKED))
    lacking = sorted(name for name in wanted - defined if name.startswith(prefixes) and name.isidentifier())
    body = [
        f"int {name}(void) {{ return 0; }}"
        if name.startswith(_NOTHING)
        else f'int {name}(void) {{ fputs("stand-in for CANN: {name} is called\\n", stderr); abort(); }}'
        for name in lacking
    ]
    return "\n".join(["#include <stdio.h>", "#include <stdlib.h>", *body, ""])


def _saver_package(folder: Path) -> None:
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "utils.py").write_text(
        "from pathlib import Path\n\n\ndef get_binary_path_from_package(stem: str):\n"
        "    return next((Path(__file__).parents[1] / 'lib').glob(f'{stem}.*.so'))\n"
    )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(f"contracts: {' '.join(command)}\n{done.stderr}")
