"""Builds the stand-in for an NPU: runtime, memory saver, torch device and the packages torch_npu, torch_memory_saver.

Everything in it that RLJob uses has its name and its parameters from the register: what the register lacks, it lacks.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from contracts import Contract, Source
from of_devices import REBUILD_PARAMETERS
from register import CONTRACTS
from sources import CACHE

HERE = Path(__file__).parent
_SOURCES = ("runtime.c", "saver.c", "device.cpp", "behaviour.py")
_PRELOAD = "torch_memory_saver_hook_mode_preload.abi3.so"
_TORCH = "torch_memory_saver_hook_mode_torch.abi3.so"
_COMPILERS = ("gcc", "g++")
_IMITATED = (Source.TORCH_NPU, Source.UPSTREAM_SAVER, Source.ASCEND_SAVER)


@dataclass(frozen=True, slots=True)
class Stub:
    """A built stand-in."""

    folder: Path

    @property
    def preload_library(self) -> str:
        return str(self.folder / "lib" / _PRELOAD)

    def environment(self, mode: str) -> dict[str, str]:
        """What a trainer's process has on an NPU, in that mode of the memory saver."""
        hook = {"TMS_HOOK_MODE": mode}
        if mode == "preload":
            hook |= {"LD_PRELOAD": self.preload_library, "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
        return {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False", "ASCEND_RT_VISIBLE_DEVICES": "5", **hook}


def build(without: Collection[str] = ()) -> Stub:
    """The stand-in for the register less the names `without`; compiled once (half a minute) and kept."""
    contracts = [contract for contract in CONTRACTS if contract.plain not in without]
    names = sorted({contract.plain for contract in contracts if contract.source in _IMITATED})
    content = [(HERE / name).read_bytes() for name in _SOURCES] + [torch.__version__.encode(), *map(str.encode, names)]
    folder = CACHE / f"stub-{hashlib.sha256(b'|'.join(content)).hexdigest()[:16]}"
    if not folder.is_dir():
        if missing := [compiler for compiler in _COMPILERS if shutil.which(compiler) is None]:
            raise RuntimeError(
                f"contracts: {' and '.join(missing)} not found; install them: the NPU stand-in is compiled"
            )
        place = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.rmtree(place, ignore_errors=True)
        (place / "lib").mkdir(parents=True)
        _compile(place / "lib", names)
        _packages(place, contracts)
        place.rename(folder)
    return Stub(folder)


def _compile(lib: Path, names: list[str]) -> None:
    have = [f"-DHAVE_{name}" for name in names if name.isidentifier()]
    common = ["gcc", "-shared", "-fPIC", "-O1", "-w", *have]
    runtime = ["-L", str(lib), "-lstub", "-Wl,-rpath,$ORIGIN"]
    _run([*common, str(HERE / "runtime.c"), "-o", str(lib / "libstub.so")])
    _run([*common, "-DSTUB_PRELOAD", str(HERE / "saver.c"), "-o", str(lib / _PRELOAD), *runtime])
    _run([*common, str(HERE / "saver.c"), "-o", str(lib / _TORCH), *runtime])
    include = Path(torch.__file__).parent / "include"
    # One device for all registers: it has none of the names.
    device = hashlib.sha256((HERE / "device.cpp").read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    kept = CACHE / f"device-{device}.so"
    if not kept.exists():
        place = kept.with_name(f"{kept.name}.{os.getpid()}")
        headers = ["-I", str(include), "-I", str(include / "torch/csrc/api/include")]
        libraries = ["-L", str(include.with_name("lib")), "-lc10", "-ltorch_cpu"]
        compiler = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-w"]
        _run([*compiler, *headers, str(HERE / "device.cpp"), "-o", str(place), *libraries])
        place.rename(kept)
    shutil.copy(kept, lib / "device.so")


def _packages(place: Path, contracts: list[Contract]) -> None:
    npu = {
        contract.plain: contract.parameters
        for contract in contracts
        if contract.source is Source.TORCH_NPU and contract.name.startswith("npu.")
    }
    of_extension = [contract.plain for contract in contracts if contract.plain.startswith("_npu_")]
    rebuild = any(contract.plain == "rebuild_npu_tensor" for contract in contracts)
    package = place / "torch_npu"
    (package / "multiprocessing").mkdir(parents=True)
    (package / "multiprocessing" / "__init__.py").touch()
    shutil.copy(HERE / "behaviour.py", package / "behaviour.py")
    (package / "__init__.py").write_text(
        f"from torch_npu import behaviour\n\nbehaviour.install({npu!r}, {of_extension!r})\n"
    )
    if rebuild:
        (package / "multiprocessing" / "reductions.py").write_text(
            "from torch_npu import behaviour\n\n"
            f"rebuild_npu_tensor = behaviour.rebuild_function({REBUILD_PARAMETERS!r})\n"
        )
    saver = place / "torch_memory_saver"
    saver.mkdir()
    (saver / "__init__.py").touch()
    if any(contract.plain == "get_binary_path_from_package" for contract in contracts):
        (saver / "utils.py").write_text(
            "from pathlib import Path\n\n\ndef get_binary_path_from_package(stem: str):\n"
            "    return next((Path(__file__).parents[1] / 'lib').glob(f'{stem}.*.so'))\n"
        )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(f"contracts: {' '.join(command)}\n{done.stderr}")
