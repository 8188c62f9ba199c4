"""This kernel's means to confine a process."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_worker.confined import landlock, system_calls


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel's means."""

    landlock: int
    """ABI; 0: none."""
    filters: bool
    """Filters of system calls."""

    @classmethod
    def here(cls) -> Kernel:
        """That of this machine, as this process may use it."""
        return cls(landlock.abi(), system_calls.known())

    def remains(self) -> list[str]:
        """Abilities that remain to confined code of the same user, one sentence each; empty: none."""
        found = []
        if self.landlock < landlock.FILES_SINCE:
            found.append(
                "files of the same user can be read and written, /dev/shm among them, and variables of processes that "
                "are not RLJob's read (no Landlock: Linux 5.13, switched on)"
            )
        if self.landlock < landlock.SIGNALS_SINCE:
            found.append("processes of the same user can be signalled (no Landlock ABI 6: Linux 6.12)")
        if not self.filters:
            found.append("Unix sockets of the same user can be connected to (no seccomp filters)")
        return found
