"""Which engine generates which prompts. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Dispatch:
    """Hands the groups of a generation to engines, each group whole.

    Args:
        groups: how many; numbered from 0.
        engines: how many.
        order: the groups in the order in which engines that are free take them.
        room: groups that an engine runs at once; where all of an engine's share fit, or with None, each engine has its
            share from the beginning: a range of the groups, as even as can be.
    """

    def __init__(self, groups: int, engines: int, order: Sequence[int] = (), room: int | None = None) -> None:
        bounds = [groups * engine // engines for engine in range(engines + 1)]
        shares = [list(range(bounds[engine], bounds[engine + 1])) for engine in range(engines)]
        self._waiting: deque[int] = deque()
        self.first = shares
        """Each engine's groups at the beginning."""
        if room is not None and any(len(share) > room for share in shares):
            assert sorted(order) == list(range(groups))
            self.first = [list(order[engine : room * engines : engines]) for engine in range(engines)]
            self._waiting.extend(order[room * engines :])

    def __len__(self) -> int:
        """Groups that have no engine yet."""
        return len(self._waiting)

    def take(self, count: int) -> list[int]:
        """The groups for an engine that has finished so many, and has room for as many others."""
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
