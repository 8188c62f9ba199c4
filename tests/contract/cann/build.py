"""torch_npu's own wheel, executed: CANN's libraries under it are stand-ins whose device memory is host memory."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from contracts import Source
from sources import CACHE, executable, made_once, root

HERE = Path(__file__).parent
WHEEL = "torch_npu==2.11.0.post3"
"""The release for the torch that the tests have; the pin of the image for Ascend is for the torch before it."""
SCIPY = "scipy==1.17.1"
"""vllm-ascend and MindSpeed import it, and the tests' environment lacks it."""
_SOURCES = ("runtime.c", "operators.cpp", "kernels.cpp", "hccl.cpp", "saver.c", "build.py")
_PACKAGES = HERE / "packages"
_SAVER = "torch_memory_saver_hook_mode_{}.abi3.so"
_EMPTY = (
    "acl_op_compiler", "acl_tdt_channel", "ascend_dump", "ascend_protobuf", "ascendalog", "atb", "c_sec",
    "error_manager", "fmk_parser", "ge_common_base", "ge_runner", "mmpa", "platform", "profapi", "register",
    "runtime", "unified_dlog",
)  # fmt: skip
"""Libraries of CANN's that somebody is linked to. All that is asked of them is in one, libascendcl."""
_LINKED = ("torch_npu/lib/*.so", "torch_npu/dynamo/torchair/core/*.so", "vllm_ascend/*.so")
_SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1")
_OTHERS = ("Py", "_Py", "_ITM", "__")
"""Names that are Python's and the linker's."""
_NOTHING = (
    "Msprof", "aclmdlInitDump", "aclmdlFinalizeDump", "aclmdlSetDump", "CheckLogLevel", "DlogRecord", "mmGetTid",
    "aclrtRegStreamStateCallback", "aclrtBinaryLoadFromData", "_ZN3atb13CreateContext",
)  # fmt: skip
"""Profiling, dumps, logs, kernels and a library's own state: called, and of no use."""


@dataclass(frozen=True, slots=True)
class Cann:
    """Stand-ins for CANN, built."""

    folder: Path
    wheel: Path
    engine: tuple[Path, ...]
    """Folders of what an engine has beside vLLM."""

    def environment(self, mode: str) -> dict[str, str]:
        """Environment of a process on an NPU with that mode of the memory saver."""
        lib = self.folder / "lib"
        hook = {"TMS_HOOK_MODE": mode}
        if mode == "preload":
            library = str(self.folder / _SAVER.format("preload"))
            hook |= {"LD_PRELOAD": library, "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
        settings = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False", "ASCEND_RT_VISIBLE_DEVICES": "5"}
        return {"LD_LIBRARY_PATH": str(lib)} | settings | hook

    def shell(self, folder: Path, devices: int = 1) -> dict[str, str]:
        """A shell's environment on a machine with that many NPUs after CANN's set_env.sh, and a path with all packages.

        Args:
            folder: where the machine counts what its devices' memory holds.
            devices: how many there are.
        """
        path = [*self.path, *filter(None, sys.path), str(HERE / "last")]
        return {
            "LD_LIBRARY_PATH": str(self.folder / "lib"),
            "ASCEND_TOOLKIT_HOME": str(self.folder),
            "ASCEND_HOME_PATH": str(self.folder),
            "ASCEND_OPP_PATH": str(self.folder),
            "PYTHONPATH": os.pathsep.join(path),
            "NPU_FOLDER": str(folder),
            "NPU_COUNT": str(devices),
        }

    @property
    def path(self) -> list[str]:
        """For PYTHONPATH."""
        return [str(folder) for folder in (self.folder, _PACKAGES, self.wheel, *self.engine)]


def build() -> Cann:
    """The stand-ins for the wheel; compiled once and kept."""
    wheel = executable(WHEEL)
    engine = (root(Source.VLLM_ASCEND), executable(SCIPY))
    made_of = "|".join([torch.__version__, *map(str, (wheel, *engine))])
    content = [*((HERE / name).read_bytes() for name in _SOURCES), made_of.encode()]
    folder = CACHE / f"cann-{hashlib.sha256(b'|'.join(content)).hexdigest()[:16]}"
    with made_once(folder) as missing:
        if missing:
            _build(folder, wheel, engine)
    return Cann(folder, wheel, engine)


def _build(folder: Path, wheel: Path, engine: tuple[Path, ...]) -> None:
    if missing := [name for name in ("gcc", "g++", "nm") if shutil.which(name) is None]:
        raise RuntimeError(f"contracts: {', '.join(missing)} not found; install them: CANN's stand-ins are compiled")
    place = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(place, ignore_errors=True)
    for part in ("lib", "runtime", "compiler"):
        (place / part).mkdir(parents=True)
    _compile(place / "lib", wheel / "torch_npu", [wheel, *engine])
    _saver_package(place / "torch_memory_saver")
    _describe(place, "stand-ins", "[vllm.general_plugins]\nstand_ins = stand_ins:install\n")
    _describe(place, "torch-memory-saver", "")
    (place / "version.cfg").write_text("version=9.1.0\n")
    place.rename(folder)


def _compile(lib: Path, package: Path, wheels: list[Path]) -> None:
    third_party = package / "include/third_party"
    headers = [part for name in ("acl/inc", "hccl/inc", "../") for part in ("-I", str(third_party / name))]
    shared = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O1",
        *headers,
        "-L",
        str(lib),
        "-Wl,--no-as-needed,-rpath,$ORIGIN:$ORIGIN/lib",
    ]
    include, torch_lib = (Path(torch.__file__).parent / part for part in ("include", "lib"))
    compiler = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", *headers, "-I", str(include)]
    compiler += ["-L", str(torch_lib), "-L", str(package / "lib"), "-Wl,--allow-shlib-undefined"]

    def on_torch(source: str, name: str, *libraries: str) -> Path:
        made = lib / f"lib{name}.so"
        _run([*compiler, str(HERE / f"{source}.cpp"), "-o", str(made), "-lc10", "-ltorch_cpu", *libraries])
        return made

    with ThreadPoolExecutor() as pool:
        runtime = lib / "runtime.o"
        flags = ["-c", "-fPIC", "-O1", "-Wall", "-Werror"]
        kernels = pool.submit(on_torch, "kernels", "kernels", "-ltorch_npu")
        hccl, opapi = pool.submit(on_torch, "hccl", "hccl"), pool.submit(on_torch, "operators", "opapi")
        _run(["gcc", *flags, *headers, str(HERE / "runtime.c"), "-o", str(runtime)])
        ours = _symbols(runtime, "--defined-only") | _symbols(hccl.result(), "-D --defined-only")
        rest = lib / "rest.c"
        rest.write_text(_rest(ours | _symbols(opapi.result(), "-D --defined-only"), wheels))
        _library(shared, lib, "ascendcl", [str(runtime), str(rest)])
        for name in _EMPTY:
            _library(shared, lib, name, ["-xc", os.devnull, "-lascendcl"])
        kernels.result()
    _library(shared, lib, "graph", ["-xc", os.devnull, "-lascendcl", "-lopapi"])
    saver = [str(HERE / "saver.c"), "-lascendcl"]
    _run([*shared, "-DPRELOAD", *saver, "-o", str(lib.parent / _SAVER.format("preload"))])
    _run([*shared, *saver, "-o", str(lib.parent / _SAVER.format("torch"))])
    runtime.unlink()
    rest.unlink()


def _library(shared: list[str], lib: Path, name: str, made_of: list[str]) -> None:
    file = f"lib{name}.so"
    _run([*shared, *made_of, "-o", str(lib / file), f"-Wl,-soname,{file}"])


def _symbols(file: Path, which: str) -> set[str]:
    done = subprocess.run(["nm", *which.split(), str(file)], capture_output=True, text=True, timeout=60, check=True)
    # What may be absent (`w`) stays so: whoever asks for it asks first whether it is there.
    return {line.split()[-1] for line in done.stdout.splitlines() if " w " not in line}


def _rest(defined: set[str], wheels: list[Path]) -> str:
    """C of what the wheels' libraries ask for and nobody defines: each function ends the process with its name."""
    linked = [file for wheel in wheels for pattern in _LINKED for file in wheel.glob(pattern)]
    system = [Path(_run(["gcc", f"-print-file-name={name}"]).strip()) for name in _SYSTEM]
    there = [*linked, *(Path(torch.__file__).parent / "lib").glob("*.so"), *system]
    defined = defined.union(*(_symbols(file, "-D --defined-only") for file in there))
    defined |= {name.partition("@")[0] for name in defined}
    wanted = set().union(*(_symbols(file, "-D --undefined-only") for file in linked))
    lacking = sorted(name for name in wanted - defined if name.isidentifier() and not name.startswith(_OTHERS))
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
        "    return next(Path(__file__).parents[1].glob(f'{stem}.*.so'))\n"
    )


def _describe(folder: Path, package: str, entry_points: str) -> None:
    place = folder / f"{package.replace('-', '_')}-1.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (place / "entry_points.txt").write_text(entry_points)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(f"contracts: {' '.join(command)}\n{done.stderr}")
    return done.stdout
