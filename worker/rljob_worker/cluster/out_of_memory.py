"""Ray's message about a machine whose memory ran out, in short: the original has some 4,000 characters."""

from __future__ import annotations

import re

_IN_USE = re.compile(r"Memory on the node .*? was (\d+(?:\.\d+)?)GB used / (\d+(?:\.\d+)?)GB limit")
_USERS = re.compile(r"Top \d+ memory users: PID\tMEM\(GB\)\tCOMMAND\n(.*?)\nRefer to", re.DOTALL)
_USER = re.compile(r"(\d+)\s+(\d+(?:\.\d+)?)\s+(.+)")
_SHOWN = 5
_WIDTH = 60


def in_short(message: str) -> str:
    """Use of the memory, its largest users and the remedy; the message itself where it is not as in Ray 2.60.

    Ray writes GB for 2^30 bytes (`MemoryMonitor` and `WorkerKillingPolicy` of its raylet).
    """
    use, users = _IN_USE.search(message), _USERS.search(message)
    if use is None or users is None:
        return message
    found = [match.groups() for entry in users[1].splitlines() if (match := _USER.match(entry.strip()))]
    most = ", ".join(f"{command[:_WIDTH].strip()} {size} (pid {pid})" for pid, size, command in found[:_SHOWN])
    return (
        f"the machine's memory ran out: {use[1]} of {use[2]} GiB were in use, and Ray ends a process then. "
        f"Most of it, in GiB: {most}. End what else needs memory, or make the job smaller "
        "(`rljob plan` says what it needs)"
    )
