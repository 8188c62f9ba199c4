"""Variables that show a process only some of the host's devices: ASCEND_RT_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from rljob_worker.errors import UserError

_NONE = ("", "NoDevFiles")
"""Values of Ray and the container runtimes for no device at all."""


def parse_visible_devices(variable: str, value: str | None, *, names_allowed: bool) -> tuple[str, ...] | None:
    """Physical devices that are visible, in the order of their logical numbers; None when all are.

    Args:
        variable: its name, for messages.
        value: its value; None where it is not set.
        names_allowed: whether devices may be given by name (`GPU-<uuid>`, `MIG-<uuid>`), as CUDA allows.

    Raises:
        UserError: an entry that is no device, or one that is there twice.
    """
    if value is None:
        return None
    if value.strip() in _NONE:
        return ()
    entries = tuple(entry.strip() for entry in value.split(","))
    for entry in entries:
        if not (entry.isdecimal() or (names_allowed and entry.startswith(("GPU-", "MIG-")))):
            allowed = "numbers, GPU-<uuid> or MIG-<uuid>" if names_allowed else "numbers"
            raise UserError(
                f"{variable}: {value!r} has {entry!r}, which is no device; it takes {allowed}, comma-separated"
            )
    plain = tuple(str(int(entry)) if entry.isdecimal() else entry for entry in entries)
    if len(set(plain)) != len(plain):
        raise UserError(f"{variable}: {value!r} names a device twice")
    return plain


def physical_device(variable: str, visible: tuple[str, ...] | None, logical: int) -> str:
    """Physical number or name of the process's device number `logical`; UserError when it does not see so many."""
    if visible is None:
        return str(logical)
    if logical >= len(visible):
        seen = ",".join(visible) or "none"
        raise UserError(f"{variable}: device {logical} of this process is wanted, but it sees {len(visible)} ({seen})")
    return visible[logical]
