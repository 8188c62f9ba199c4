"""HCCL's errors in a driver's last lines: what its codes mean, and what would help.

Codes: HCCL's fault guide of CANN 9 (EI0001 to EI0019), CANN's error messages (EJ0001 to EJ0004). torch_npu appends them
to the exception of the collective that failed (`HcclAllreduce, error code is 6`), which the driver repeats.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rljob_api.spec import FailureReason
from rljob_operator.state.causes import Cause, cut, sentence

_FIRST = "look for a rank with another error first, in `logs/` of the run folder: the others only wait for it"
_LINK = (
    "then at the NPUs' network: `hccn_tool -i N -tls -g` must say the same on all, `hccn_tool -i N -ping -g address "
    "IP` must answer, and spec.hccl.interface must name an interface by which the nodes reach each other"
)
_PORTS = (
    "leave spec.hccl.trainerPorts and rolloutPorts out (the system then picks free ports), or give ranges that nothing "
    "else on the nodes uses"
)
_MEANINGS: dict[str, tuple[str, str]] = {
    "EI0019": ("a port of HCCL is taken", _PORTS),
    "EJ0003": ("a port of HCCL is taken", f"{_PORTS}; processes of an ended job may hold it too: `npu-smi info`"),
    "EJ0001": (
        "HCCL's process on the NPU is one of another job, or of one that did not end",
        "see `npu-smi info` on the node for processes that should be gone",
    ),
    "EJ0004": ("HCCL's address is none of the node's", "correct spec.hccl.interface, or spec.hccl.useHostIp"),
    "EI0001": ("a variable of HCCL has a bad value", "correct HCCL_ variables in spec.environment and the image"),
    "EI0004": ("HCCL cannot read its rank table", "unset RANK_TABLE_FILE in the image: none is needed"),
    "EI0008": ("the nodes have different versions of CANN", "give all nodes one image and one driver"),
    "EI0014": ("the ranks do not agree who takes part", _FIRST),
    "EI0005": ("the ranks called different collectives", _FIRST),
    "EI0003": ("a collective was called with a bad argument", _FIRST),
    "EI0007": ("HCCL could not get memory or another resource", "lower spec.hccl.bufferSizeMb, or the memory in use"),
    "EI0011": ("HCCL could not get memory for its links", "lower spec.hccl.bufferSizeMb, or the memory in use"),
    "EI0012": (
        "copying between NPUs failed in hardware",
        "examine the node: `kubectl rljob doctor`, `npu-smi info -t health`",
    ),
    "EI0013": ("a link between NPUs failed", "examine the NPUs' network: `hccn_tool -i N -link -g`, `-stat -g`"),
    "EI0015": (
        "not all ranks met within the connect time-out",
        f"{_FIRST}; {_LINK}; spec.hccl.connectTimeoutSeconds",
    ),
    "EI0006": (
        "a connection between ranks did not come within the connect time-out",
        f"{_FIRST}; {_LINK}; spec.hccl.connectTimeoutSeconds",
    ),
    "EI0002": (
        "a collective did not end within the execution time-out",
        f"{_FIRST}; spec.hccl.execTimeoutSeconds where a rank is only slow",
    ),
}
"""By code, causes before what follows from them: of several the first one here is reported."""
_CODE = re.compile(r"\b(E[IJ]00\d\d)\b")
_WATCHDOG = re.compile(r"collective operation timeout: WorkHCCL")
_CALL = re.compile(
    r"\bHccl[A-Z]\w*\b.{0,200}error code is \d+|DIST call hccl api failed|HCCL function error", re.IGNORECASE
)


def hccl_error(lines: Sequence[str]) -> Cause | None:
    """Cause of a driver's end by its last lines; None: they hold no error of HCCL."""
    codes = {code: line for line in reversed(lines) for code in _CODE.findall(line)}
    code = next((code for code in _MEANINGS if code in codes), next(iter(codes), None))
    if code is not None:
        meaning, helps = _MEANINGS.get(code, ("HCCL failed", _FIRST))
        return _cause(f"{meaning} ({code})", helps, codes[code])
    line = next((line for line in lines if _WATCHDOG.search(line)), None)
    if line is not None:
        return _cause(*_MEANINGS["EI0002"], line)
    line = next((line for line in lines if _CALL.search(line)), None)
    return None if line is None else _cause("a call of HCCL failed", _FIRST, line)


def _cause(meaning: str, helps: str, line: str) -> Cause:
    return Cause(FailureReason.HCCL_FAILED, sentence(f"HCCL: {meaning}", helps, f"it says: {cut(line, 300)}"))
