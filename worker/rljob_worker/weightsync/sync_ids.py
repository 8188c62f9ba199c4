"""Numbers that tell the messages of one attempt at a sync from those of another."""

from __future__ import annotations


class SyncIds:
    """Hands out strictly growing ids, so that what is left over of an earlier attempt can be recognised."""

    def __init__(self) -> None:
        self._last: int | None = None

    def next(self, version: int, sync_id: int | None) -> int:
        """`sync_id`, or `version` where the caller gave none.

        Raises:
            ValueError: the id is not greater than all before it.
        """
        chosen = version if sync_id is None else sync_id
        if self._last is not None and chosen <= self._last:
            raise ValueError(
                f"sync id {chosen} (version {version}) is not greater than {self._last}, the id of the sync before; "
                "to sync a version again, give both sides a greater sync_id"
            )
        self._last = chosen
        return chosen
