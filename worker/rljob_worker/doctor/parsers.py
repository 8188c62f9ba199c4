"""Reading what npu-smi, hccn_tool and the driver's files say. Pure; what cannot be read is None or left out.

The shapes were taken from recorded outputs (the tests name where each was published): npu-smi 23.0 to 26.1 on 910B and
on A3 (two chips a card, with a column `Phy-ID`), hccn_tool of the same drivers, version.info of 24.1 to 26.0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CARD = re.compile(r"^\|\s*(?P<npu>\d+)\s+(?P<name>\S+)\s*\|\s*(?P<health>[A-Za-z]+)\s*\|")
_CHIP = re.compile(
    r"^\|\s*(?P<chip>\d+)(?:\s+(?P<physical>\d+))?\s*\|\s*[0-9A-Fa-fx]{4}:[0-9A-Fa-fx]{2}:\S+\s*\|"
    r"\s*\S+\s+\d+\s*/\s*\d+\s+(?P<used>\d+)\s*/\s*(?P<total>\d+)\s*\|"
)
_PROCESS = re.compile(
    r"^\|\s*(?P<npu>\d+)\s+(?P<chip>\d+)\s*\|\s*(?P<pid>\d+)\s*\|\s*(?P<name>\S*)\s*\|\s*(?P<used>\d+)\s*\|"
)
_VERSION = re.compile(r"npu-smi\s+\S+\s+Version:\s*(?P<version>\S+)")
_TLS = re.compile(r"tls switch\s*\[(?P<state>[01])\]")
_LOSS = re.compile(r"(?P<sent>\d+) packets transmitted, (?P<received>\d+) received")


@dataclass(frozen=True, slots=True)
class Chip:
    """One NPU as npu-smi lists it."""

    index: int
    """Number of the device file /dev/davinciN."""
    name: str
    health: str
    used_mib: int
    total_mib: int
    processes: tuple[str, ...] = ()
    """`name (pid)` of those that hold memory on it."""


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """Table of `npu-smi info`."""

    version: str | None
    chips: tuple[Chip, ...]


def npu_smi_info(text: str) -> DeviceTable:
    """Read the tables of `npu-smi info`.

    A device is two lines: card (name, health) and chip (bus, memory). Cards with two chips give `Phy-ID`, the device's
    number; without that column a card has one chip, and the card's number is the device's.
    """
    version = _VERSION.search(text)
    chips: dict[tuple[int, int], Chip] = {}
    card: re.Match[str] | None = None
    for line in text.splitlines():
        if (found := _PROCESS.match(line)) is not None:
            key = int(found["npu"]), int(found["chip"])
            if key in chips:
                chips[key] = _with_process(chips[key], f"{found['name'] or 'unnamed'} ({found['pid']})")
        elif (found := _CHIP.match(line)) is not None and card is not None:
            npu, chip = int(card["npu"]), int(found["chip"])
            index = npu if found["physical"] is None else int(found["physical"])
            chips[npu, chip] = Chip(index, card["name"], card["health"], int(found["used"]), int(found["total"]))
            card = None
        elif (found := _CARD.match(line)) is not None:
            card = found
    return DeviceTable(version["version"] if version else None, tuple(sorted(chips.values(), key=lambda c: c.index)))


def _with_process(chip: Chip, process: str) -> Chip:
    return Chip(chip.index, chip.name, chip.health, chip.used_mib, chip.total_mib, (*chip.processes, process))


def properties(text: str) -> dict[str, str]:
    """`key=value` and `key : value` lines (version.info, ascend_install.info, hccn.conf, `npu-smi info -t board`)."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition("=")
        if not separator:
            key, separator, value = line.partition(":")
        if separator and key.strip() and not key.lstrip().startswith("#"):
            found.setdefault(key.strip(), value.strip())
    return found


def hccn_link(text: str) -> str | None:
    """`UP` or `DOWN` of `hccn_tool -i N -link -g`."""
    state = properties(text).get("link status", "").upper()
    return state if state in ("UP", "DOWN") else None


def hccn_tls(text: str) -> bool | None:
    """Whether TLS is on, from `hccn_tool -i N -tls -g`; without a certificate it is off (CANN's HCCL guide, EI0006)."""
    found = _TLS.search(text)
    if found is not None:
        return found["state"] == "1"
    return False if "no certificate" in text.lower() else None


def hccn_address(text: str) -> str | None:
    """Address of `hccn_tool -i N -ip -g`."""
    return properties(text).get("ipaddr") or None


def hccn_ping(text: str) -> tuple[int, int] | None:
    """Packets (sent, received) of `hccn_tool -i N -ping -g address A`."""
    found = _LOSS.search(text)
    return None if found is None else (int(found["sent"]), int(found["received"]))


def firmware_range(text: str) -> tuple[str, str] | None:
    """Firmware versions that a driver accepts: `compatible_version_fw=[lowest,highest]` of its version.info."""
    bounds = [part.strip() for part in properties(text).get("compatible_version_fw", "").strip("[]").split(",")]
    return (bounds[0], bounds[1]) if len(bounds) == 2 and all(bounds) else None


def nvidia_smi(text: str) -> DeviceTable:
    """Read `nvidia-smi --query-gpu=index,name,memory.used,memory.total --format=csv,noheader,nounits`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 3]
    chips = [
        Chip(int(i), name, "OK", int(used), int(total))
        for i, name, used, total in rows
        if i.isdecimal() and used.isdecimal() and total.isdecimal()
    ]
    return DeviceTable(None, tuple(chips))
