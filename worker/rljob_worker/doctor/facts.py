"""Facts that were collected on one node; the checks read nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rljob_worker.confined import landlock
from rljob_worker.confined.kernel import Kernel
from rljob_worker.doctor.parsers import DeviceTable

_WHOLE = Kernel(landlock.SIGNALS_SINCE, True)
Kind = Literal["npu", "cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of this network namespace."""

    name: str
    up: bool


@dataclass(frozen=True, slots=True)
class NpuPort:
    """Output of hccn_tool about the network port of one NPU; None where there was none."""

    index: int
    link: str | None = None
    tls: bool | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """View of a process that was started with one role's environment."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of `process.WATCHED`."""
    libraries: tuple[str, ...] = ()
    """Memory savers and allocators that are mapped into it."""
    saver_hooked: bool = False
    """Whether `tms_pause` is found among the symbols of the whole process."""
    ignored: str = ""
    """Message of the loader about a library that it could not preload; it goes on without it."""
    problem: str = ""
    """Why it did not run; all else is empty then."""


@dataclass(frozen=True, slots=True)
class SaverFile:
    """A library of torch_memory_saver."""

    path: str
    build: str
    """`Ascend`, `CUDA` or `unknown`, by the functions it hooks."""
    sha256: str
    recorded: str | None = None
    """SHA-256 that the image recorded; None: it recorded none."""


@dataclass(frozen=True, slots=True)
class StoragePath:
    """A folder that a job names."""

    path: str
    exists: bool
    base: str
    """The folder itself, or the nearest above it that exists."""
    writable: bool
    """Whether this user may write into `base`."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node. Bytes, unless a name says otherwise."""

    host: str
    kind: Kind
    versions: Mapping[str, str]
    """Component -> version; what is not installed is missing."""
    packages: str
    """Digest over the names and versions of all Python packages and the recorded build: equal in equal images."""
    built_for: str | None = None
    """Generation of NPUs that vllm-ascend was built for (`built_for`); None where it does not say."""
    device_files: tuple[int, ...] = ()
    """Numbers of /dev/davinciN or /dev/nvidiaN."""
    devices: DeviceTable | None = None
    devices_problem: str = ""
    """Why npu-smi (nvidia-smi) said nothing."""
    firmware_range: tuple[str, str] | None = None
    ports: tuple[NpuPort, ...] = ()
    ports_problem: str = ""
    interfaces: tuple[Interface, ...] = ()
    busy_ports: tuple[int, ...] = ()
    """Ports of HCCL that another process holds."""
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """`host:port` of the head -> why it cannot be reached; empty: it can."""
    shared_memory_total: int = 0
    shared_memory_free: int = 0
    host_total: int = 0
    host_free: int = 0
    trainer: ProcessFacts = field(default_factory=ProcessFacts)
    rollout: ProcessFacts = field(default_factory=ProcessFacts)
    saver: SaverFile | None = None
    saver_copies: tuple[str, ...] = ()
    """Libraries of the preload hook that the package would find; it insists on exactly one."""
    shared_memory_ipc: str = ""
    """Why two processes cannot share memory; empty: they can."""
    kernel: Kernel = _WHOLE
    """Features that confine rewards."""
    no_namespaces: str = ""
    """Why programs get no namespaces of their own; empty: they can."""
    model: StoragePath | None = None
    runs: StoragePath | None = None
