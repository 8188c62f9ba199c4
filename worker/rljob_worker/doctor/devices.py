"""The devices of a node: how many a process sees, how they are, and how much of their memory is free."""

from __future__ import annotations

from rljob_api.wanted import Wanted
from rljob_worker.doctor.facts import NodeFacts
from rljob_worker.doctor.findings import Finding, not_applicable, ok, problem, warning
from rljob_worker.doctor.parsers import Chip
from rljob_worker.doctor.units import mebibytes

VISIBLE_VARIABLES = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
"""Kind of device -> variable that shows a process some of them."""
_TOOL = {"npu": "npu-smi", "cuda": "nvidia-smi"}
_IDLE_SHARE = 0.1
"""Share of a device's memory that the driver takes itself: 3.4 of 64 GiB on an idle 910B (vllm-ascend issues)."""


class NoDeviceList(ValueError):
    """The variable is none; the message says where."""


def visible_devices(value: str) -> tuple[int, ...]:
    """The devices that a process sees, as CANN reads the list: numbers, ascending, commas, no spaces.

    Raises:
        NoDeviceList: CANN (or CUDA) would read something else than what was meant.
    """
    if value in ("", "NoDevFiles"):
        return ()
    if any(c.isspace() for c in value):
        raise NoDeviceList("a space ends the list")
    parts = value.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise NoDeviceList("numbers with commas between them are read, nothing else")
    numbers = tuple(int(part) for part in parts)
    if list(numbers) != sorted(set(numbers)):
        raise NoDeviceList("the numbers must ascend, each once")
    return numbers


def check(facts: NodeFacts, wanted: Wanted | None) -> list[Finding]:
    """Visible devices, health and free memory."""
    if facts.kind == "cpu":
        return [not_applicable("devices", "profile cpu: processes compute on the CPU")]
    if wanted is not None and wanted.devices is None:
        return [not_applicable("devices", "this container is given none to look at")]
    findings = [_count(facts, wanted)]
    if facts.devices is None:
        tool = _TOOL[facts.kind]
        fix = f"mount {tool} and the driver into the pod (the profile's hostMounts), or restart a driver that hangs"
        return [*findings, problem("device health", facts.devices_problem, f"an answer of {tool}", fix)]
    chips = [chip for chip in facts.devices.chips if not facts.device_files or chip.index in facts.device_files]
    return [*findings, _health(chips), _memory(chips, wanted)]


def _count(facts: NodeFacts, wanted: Wanted | None) -> Finding:
    name, variable = "visible devices", VISIBLE_VARIABLES[facts.kind]
    value = facts.trainer.variables.get(variable)
    number = wanted.devices if wanted is not None else None
    right = "at least 1" if number is None else f"{number} (spec.resources.devicesPerNode)"
    numbers, source = facts.device_files, "device files"
    if value is not None:
        try:
            numbers = visible_devices(value)
        except NoDeviceList as error:
            fix = f"write it like 0,1,2,3, or unset it; {error}"
            return problem(name, f"{variable}={value!r}", "numbers, ascending, without spaces", fix)
        source = f"{variable}={value}"
        if facts.device_files and max(numbers, default=-1) > len(facts.device_files) - 1:
            fix = f"this container has {len(facts.device_files)} device files: unset {variable}, Ray sets it"
            return problem(name, source, f"numbers below {len(facts.device_files)}", fix)
    found = f"{len(numbers)} ({source})"
    if len(numbers) < (number or 1):
        fix = "ask for the devices in the pod (the profile's resource), and see that the device plugin gives them"
        return problem(name, found, right, fix)
    if number is not None and len(numbers) > number:
        return warning(name, found, right, "Ray would use more than the job asks for; the rest idles")
    return ok(name, found, right)


def _health(chips: list[Chip]) -> Finding:
    name, wanted = "device health", "OK"
    sick = [f"{chip.index}: {chip.health}" for chip in chips if chip.health != "OK"]
    if sick:
        return problem(name, ", ".join(sick), wanted, "`npu-smi info -t health -i N` says more; drain the node")
    if not chips:
        return problem(name, "no device is listed", wanted, "the driver sees none: look at dmesg on the node")
    return ok(name, f"{len(chips)} x {chips[0].name}", wanted)


def _memory(chips: list[Chip], wanted: Wanted | None) -> Finding:
    name = "device memory free"
    if not chips:
        return not_applicable(name, "no device is listed")
    least = min(chips, key=lambda chip: chip.total_mib - chip.used_mib)
    free = least.total_mib - least.used_mib
    share = wanted.memory_fraction if wanted is not None else None
    need = int((1 - _IDLE_SHARE) * least.total_mib)
    found = f"{mebibytes(free)} of {mebibytes(least.total_mib)} on device {least.index}, the fullest"
    users = f" ({', '.join(least.processes)})" if least.processes else ""
    if share is not None and free < share * least.total_mib:
        fix = f"somebody else uses the device{users}: end it, or lower spec.rollout.memoryFraction"
        right = f"{mebibytes(int(share * least.total_mib))} (spec.rollout.memoryFraction)"
        return problem(name, found, right, fix)
    if free < need:
        fix = f"somebody else uses the device{users}; a job of this pod does too while it runs"
        return warning(name, found, f"{mebibytes(need)}, as an idle device has", fix)
    return ok(name, found, mebibytes(need))
