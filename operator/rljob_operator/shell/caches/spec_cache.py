"""Specs that were validated, as many of them as memory is meant for."""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache

from pydantic import BaseModel
from pydantic_core import to_json

from rljob_api.json_types import Json
from rljob_api.spec import RLJobSpec

_MOST_BYTES = 4 * 2**20
"""Kept as JSON; parsed they take three times as much. To validate a usual one again takes a millisecond."""
_LARGEST = _MOST_BYTES // 8
"""One that is larger is not kept: it would push too many others out."""


class SpecCache:
    """The specs that were used last, by UID and generation of their jobs."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], tuple[RLJobSpec, int]] = OrderedDict()
        self._bytes = 0

    def get(self, uid: str, generation: int) -> RLJobSpec | None:
        """A spec; None where it is not kept (any more)."""
        found = self._kept.get((uid, generation))
        if found is None:
            return None
        self._kept.move_to_end((uid, generation))
        return found[0]

    def keep(self, uid: str, generation: int, spec: RLJobSpec, given: dict[str, Json] | None) -> None:
        """Keep a spec; `given` is what it was parsed from."""
        size = len(to_json(given))
        if size > _LARGEST:
            return
        self.drop(uid, generation)
        _share_sets(spec)
        self._kept[uid, generation] = spec, size
        self._bytes += size
        while self._bytes > _MOST_BYTES:
            _, (_, size) = self._kept.popitem(last=False)
            self._bytes -= size

    def drop(self, uid: str, generation: int) -> None:
        """Forget a spec."""
        self._bytes -= self._kept.pop((uid, generation), (None, 0))[1]


def _share_sets(spec: RLJobSpec) -> None:
    """Let its blocks share their sets of given fields with those of other jobs: 15 kB a job otherwise.

    Nothing writes into such a set: pydantic copies it with its model.
    """
    blocks: list[object] = [spec]
    while blocks:
        block = blocks.pop()
        if isinstance(block, BaseModel):
            object.__setattr__(block, "__pydantic_fields_set__", _shared(frozenset(block.model_fields_set)))
            blocks += vars(block).values()
        elif isinstance(block, list):
            blocks += block


@lru_cache(maxsize=1024)
def _shared(names: frozenset[str]) -> set[str]:
    return set(names)
