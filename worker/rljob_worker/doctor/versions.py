"""The compatibility table, and what is installed held against it.

Sources, named at each row:
  vllm-ascend   versioning_policy.md, requirements.txt and mkdocs.yml of the vllm-ascend 0.30.0rc2 sdist
  torch_npu     COMPATIBILITY.en.md of Ascend/pytorch at 9e73e708a, and the wheels' own Python files
  RLJob         the versions that RLJob is built and tested with (pyproject.toml, images/)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from rljob_api.spec import MemorySaverMode
from rljob_worker.doctor.facts import NodeFacts
from rljob_worker.doctor.findings import Finding, not_applicable, ok, problem, warning

IMAGE = "use the worker image that belongs to this RLJob (images/), or rebuild yours from it"


@dataclass(frozen=True, slots=True)
class Stack:
    """Versions for which one vllm-ascend was made."""

    vllm_ascend: str
    vllm: str
    cann: str
    torch: str
    torch_npu: str
    source: str


@dataclass(frozen=True, slots=True)
class TorchNpuLine:
    """A release line of torch_npu."""

    name: str
    cann: str
    versions: tuple[str, ...]
    preload: bool
    """Whether its ACL loader lets a preloaded library come first. Without, the memory saver's hook is never called."""
    both_allocator_variables: bool
    """Whether PYTORCH_ALLOC_CONF and PYTORCH_NPU_ALLOC_CONF may both be set."""
    source: str


_POLICY = "vllm-ascend: versioning_policy.md"
STACKS = (
    Stack("0.30.0rc2", "0.30.0", "9.2.0", "2.10.0", "2.10.0.post4", _POLICY),
    Stack("0.30.0rc1", "0.30.0", "9.2.0", "2.10.0", "2.10.0.post4", _POLICY),
    Stack("0.26.0rc1", "0.26.0", "9.1.0", "2.10.0", "2.10.0.post4", _POLICY),
    Stack("0.25.1rc1", "0.25.1rc1", "9.0.1", "2.10.0", "2.10.0.post2", _POLICY),
    Stack("0.24.0rc1", "0.24.0rc1", "9.0.1", "2.10.0", "2.10.0.post2", _POLICY),
    Stack("0.23.0.post1", "0.23.0", "9.1.0", "2.10.0", "2.10.0.post4", f"{_POLICY}; requirements.txt of its sdist"),
    Stack("0.23.0", "0.23.0", "9.1.0", "2.10.0", "2.10.0.post4", _POLICY),
    Stack("0.23.0rc1", "0.23.0", "9.0.1", "2.10.0", "2.10.0.post2", _POLICY),
    Stack("0.22.1rc1", "0.22.1rc1", "9.0.0", "2.10.0", "2.10.0", _POLICY),
    Stack("0.20.2rc1", "0.20.2", "9.0.0", "2.10.0", "2.10.0", f"{_POLICY}; vime issue 255"),
    Stack("0.18.0", "0.18.0", "8.5.1", "2.9.0", "2.9.0", _POLICY),
)
_LOADER = "torch_npu: COMPATIBILITY.en.md; the string `FunctionLoader prefers RTLD_DEFAULT` in the wheel"
LINES = (
    TorchNpuLine(
        "26.2", "9.2.0", ("2.10.0.post6", "2.10.0.post7", "2.12.0.post2", "2.12.0.post3", "2.13.0", "2.14.0"),
        True, False, f"{_LOADER}; use_mem_pool of torch_npu/npu/memory.py"),
    TorchNpuLine(
        "26.1", "9.1.0", ("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"), True, True, _LOADER),
    TorchNpuLine("26.0", "9.0.0", ("2.10.0", "2.10.0.post2", "2.9.0.post2", "2.8.0.post4"), False, True, _LOADER),
    TorchNpuLine("7.3", "8.5.0", ("2.9.0", "2.9.0.post1"), False, True, _LOADER),
)  # fmt: skip

VLLM_ASCEND = "0.23.0.post1"
"""The one that RLJob is built for."""
PINS = {"vllm": "0.23.0", "megatron-core": "0.16.1", "transformers": "5.5.4", "ray": "2.60.0"}
"""RLJob: pyproject.toml."""
TORCH = {"cpu": "2.11.0", "cuda": "2.11.0"}
"""RLJob: the extra `cpu` of pyproject.toml; vLLM 0.23.0 asks for the same on CUDA."""
IPC_DRIVER = "25.3.rc1"
"""torch_npu: device memory is shared between processes from HDK 25.3.RC1 on (and CANN 8.3.RC1)."""
TESTED_DRIVER = "26.0.rc1"
"""vllm-ascend: mkdocs.yml, the HDK of the documented release."""


def check(facts: NodeFacts, saver: MemorySaverMode) -> list[Finding]:
    """All versions of a node."""
    found = [_python(facts.versions), *(_pin(name, wanted, facts.versions) for name, wanted in _pins(facts).items())]
    if facts.kind != "npu":
        names = ", ".join(("driver", "firmware", "CANN", "torch_npu", "vllm-ascend"))
        return [*found, not_applicable("Ascend versions", f"{names}: no NPU here")]
    return [*found, _driver(facts.versions), _firmware(facts), *_stack(facts.versions), _torch_npu(facts, saver)]


def parsed(text: str) -> Version | None:
    """A version as the vendors write it (`25.3.rc1`, `8.3.RC2`), without the local part; None for what is none."""
    try:
        return Version(Version(text).public)
    except InvalidVersion:
        return None


def line_of(torch_npu: str) -> TorchNpuLine | None:
    """The release line that a torch_npu belongs to."""
    version = parsed(torch_npu)
    return next((line for line in LINES if version in [Version(known) for known in line.versions]), None)


def _pins(facts: NodeFacts) -> dict[str, str]:
    return PINS if facts.kind == "npu" else {**PINS, "torch": TORCH[facts.kind]}


def _python(versions: Mapping[str, str]) -> Finding:
    wanted = "3.11 or 3.12"
    version = parsed(versions["python"])
    if version is not None and version.release[:2] in ((3, 11), (3, 12)):
        return ok("python", versions["python"], wanted)
    return problem("python", versions["python"], wanted, IMAGE)


def _pin(name: str, wanted: str, versions: Mapping[str, str]) -> Finding:
    found = versions.get(name)
    if found is None:
        return problem(name, "not installed", wanted, IMAGE)
    if parsed(found) == Version(wanted):
        return ok(name, found, wanted)
    return warning(name, found, wanted, f"RLJob is tested with {wanted}; {IMAGE}")


def _driver(versions: Mapping[str, str]) -> Finding:
    wanted = f"{TESTED_DRIVER} or later; {IPC_DRIVER} for device IPC"
    found = versions.get("driver")
    version = parsed(found) if found else None
    if found is None:
        fix = "mount /usr/local/Ascend/driver of the node (spec.resources.overrides.driverPath), or install the driver"
        return problem("driver", "no version.info of a driver", wanted, fix)
    if version is None:
        return warning("driver", found, wanted, "the doctor cannot read this version; compare it by hand")
    if version < Version(IPC_DRIVER):
        return problem("driver", found, wanted, "weights go over by device IPC, which it has not: upgrade the driver")
    if version < Version(TESTED_DRIVER):
        return warning("driver", found, wanted, f"vllm-ascend {VLLM_ASCEND} was released with {TESTED_DRIVER}: upgrade")
    return ok("driver", found, wanted)


def _firmware(facts: NodeFacts) -> Finding:
    name, found = "firmware", facts.versions.get("firmware")
    if found is None:
        return not_applicable(name, "npu-smi did not say it (`npu-smi info -t board -i 0` on the node does)")
    if facts.firmware_range is None:
        return not_applicable(name, f"{found}; the driver's version.info names no range to compare with")
    low, high = facts.firmware_range
    wanted = f"{low} to {high} (what the driver accepts)"
    bounds = parsed(low), parsed(found), parsed(high)
    if None in bounds:
        return warning(name, found, wanted, "the doctor cannot read this version; compare it by hand")
    lowest, version, highest = (bound.release for bound in bounds if bound is not None)
    if lowest <= version and version[: len(highest)] <= highest:
        return ok(name, found, wanted)
    return problem(name, found, wanted, "install the firmware that belongs to the driver, then restart the node")


def _stack(versions: Mapping[str, str]) -> list[Finding]:
    found = versions.get("vllm-ascend")
    stack = next((row for row in STACKS if parsed(found or VLLM_ASCEND) == Version(row.vllm_ascend)), None)
    if found is None:
        findings = [problem("vllm-ascend", "not installed", VLLM_ASCEND, IMAGE)]
    elif parsed(found) == Version(VLLM_ASCEND):
        findings = [ok("vllm-ascend", found, VLLM_ASCEND)]
    else:
        known = "" if stack else "; it is not in the doctor's table, so what it was made for is not known"
        text = f"RLJob's weight sync is written for {VLLM_ASCEND}{known}; {IMAGE}"
        findings = [warning("vllm-ascend", found, VLLM_ASCEND, text)]
    if stack is not None:
        findings += _held_against(stack, versions)
    return findings


def _held_against(stack: Stack, versions: Mapping[str, str]) -> list[Finding]:
    """CANN and torch held against what the installed vllm-ascend was made for."""
    return [_cann(stack, versions.get("cann")), _torch(stack, versions.get("torch"))]


def _cann(stack: Stack, found: str | None) -> Finding:
    wanted = f"{stack.cann} (vllm-ascend {stack.vllm_ascend})"
    if found is None:
        fix = f"source CANN's set_env.sh before the worker starts; {IMAGE}"
        return problem("cann", "no toolkit", wanted, fix)
    version, right = parsed(found), Version(stack.cann)
    if version is None:
        return warning("cann", found, wanted, "the doctor cannot read this version; compare it by hand")
    if version.release[:2] == right.release[:2]:
        return ok("cann", found, wanted)
    if version < right:
        return problem("cann", found, wanted, f"torch_npu {stack.torch_npu} needs the newer one; {IMAGE}")
    return warning("cann", found, wanted, f"the combination is in nobody's table; {IMAGE}")


def _torch(stack: Stack, found: str | None) -> Finding:
    wanted = f"{stack.torch} (vllm-ascend {stack.vllm_ascend})"
    if found is None:
        return problem("torch", "not installed", wanted, IMAGE)
    if parsed(found) == Version(stack.torch):
        return ok("torch", found, wanted)
    return problem("torch", found, wanted, f"vllm-ascend's kernels are built for torch {stack.torch}; {IMAGE}")


def _torch_npu(facts: NodeFacts, saver: MemorySaverMode) -> Finding:
    name, found, torch = "torch_npu", facts.versions.get("torch_npu"), facts.versions.get("torch")
    right = next(row.torch_npu for row in STACKS if row.vllm_ascend == VLLM_ASCEND)
    if found is None:
        return problem(name, "not installed", right, IMAGE)
    version, host = parsed(found), parsed(torch or "")
    if version is not None and host is not None and version.release != host.release:
        return problem(name, found, right, f"it was built for torch {version.base_version}, here is {torch}; {IMAGE}")
    line = line_of(found)
    if line is None:
        return warning(name, found, right, "it is not in the doctor's table; `rljob doctor --deep` tries what it can")
    if not line.preload and saver is MemorySaverMode.PRELOAD:
        text = f"the {line.name} line ignores LD_PRELOAD, so the memory saver's hook is never called; install {right}"
        return problem(name, found, right, f"{text}, or take spec.memorySaver.mode: torch")
    if not line.both_allocator_variables:
        text = f"the {line.name} line releases memory pools itself, which the memory saver does too; install {right}"
        return warning(name, found, right, text)
    if version == Version(right):
        return ok(name, found, right)
    return warning(name, found, right, f"RLJob is written for {right}; {IMAGE}")
