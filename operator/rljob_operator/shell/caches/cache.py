"""The objects of one kind, as small as the reconciler needs it."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from rljob_operator.kubernetes_objects import Item, ObjectMeta
from rljob_operator.shell.api.resources import JobKey

Value = TypeVar("Value")
_REMEMBERED_DELETIONS = 2_000
_EVER = 2**63
_LATELY_SECONDS = 30.0


class ObjectKey(NamedTuple):
    """Namespace and name of an object."""

    namespace: str
    name: str


@dataclass(slots=True)
class _Entry(Generic[Value]):
    uid: str
    version: int
    job: JobKey
    value: Value


class Cache(Generic[Item, Value]):
    """Objects of one kind, fed by Kopf's handlers and by the answers to our own writes.

    Of two states of an object the one with the larger resourceVersion wins, wherever it came from (they are numbers
    that grow within a kind; Kubernetes promises so since 1.35 and did it before). So our own write is known at once,
    and a watch that lags behind it cannot bring the older state back. A list that is newer than what is known wins
    always: where it shows an older state, the cluster itself was put back.

    Args:
        job_of: the job that an object belongs to; None: not ours, not kept.
        value_of: the part of an object that is kept.
        changed: called with the job when an object of it appeared, went, or has another value than before.
        explains_failure: whether a value stays known for half a minute after another one (None: the object went) took
            its place.
    """

    def __init__(
        self,
        job_of: Callable[[Item], JobKey | None],
        value_of: Callable[[Item], Value],
        changed: Callable[[JobKey], None],
        explains_failure: Callable[[Value, Value | None], bool] | None = None,
    ) -> None:
        self._job_of = job_of
        self._value_of = value_of
        self._changed = changed
        self._explains_failure = explains_failure
        self._entries: dict[ObjectKey, _Entry[Value]] = {}
        self._by_job: dict[JobKey, set[ObjectKey]] = {}
        self._deleted: OrderedDict[str, int] = OrderedDict()
        self._lately: deque[tuple[float, JobKey, Value]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, namespace: str, name: str) -> Value | None:
        """The value of one object."""
        entry = self._entries.get(ObjectKey(namespace, name))
        return None if entry is None else entry.value

    def version(self, namespace: str, name: str) -> int | None:
        """The resourceVersion of one object."""
        entry = self._entries.get(ObjectKey(namespace, name))
        return None if entry is None else entry.version

    def has(self, item: Item) -> bool:
        """Whether this state of an object is known, or a newer one."""
        meta = item["metadata"]
        entry = self._entries.get(_key(meta))
        return entry is not None and entry.uid == meta["uid"] and int(meta["resourceVersion"]) <= entry.version

    def of_job(self, job: JobKey) -> list[Value]:
        """The values of the objects of a job, by name."""
        return [self._entries[key].value for key in sorted(self._by_job.get(job, ()))]

    def lately_of_job(self, job: JobKey) -> list[tuple[float, Value]]:
        """Values that may explain a failure and were replaced in the last half minute, with the seconds since then."""
        now = time.monotonic()
        while self._lately and self._lately[0][0] < now - _LATELY_SECONDS:
            self._lately.popleft()
        return [(now - at, value) for at, of, value in self._lately if of == job]

    def jobs(self) -> Iterator[JobKey]:
        """The jobs that have objects here."""
        return iter(tuple(self._by_job))

    def learn(self, item: Item, tell: bool = True, listed: int = -1) -> None:
        """Take in a state of an object, from the watch, a list or the answer to a write.

        Args:
            item: the object.
            tell: call `changed`; False where the writer of this state has already acted on it.
            listed: resourceVersion of the list that the state comes from; what was learnt up to there gives way to it.
        """
        meta = item["metadata"]
        key, version, uid = _key(meta), int(meta["resourceVersion"]), str(meta.get("uid", ""))
        job = self._job_of(item)
        if job is None:
            self._drop(key)
            return
        old = self._entries.get(key)
        known = max(self._deleted.get(uid, -1), -1 if old is None else old.version)
        if version <= known and known > listed:
            return
        self._deleted.pop(uid, None)
        value = self._value_of(item)
        if old is not None and (old.job != job or old.uid != uid):
            self._drop(key)
        elif old is not None:
            self._remember(old, value)
        self._entries[key] = _Entry(uid, version, job, value)
        self._by_job.setdefault(job, set()).add(key)
        if tell and (old is None or (old.uid, old.job, old.value) != (uid, job, value)):
            self._changed(job)

    def forget(self, namespace: str, name: str, uid: str, version: int = _EVER) -> None:
        """The object is gone, or none of ours since `version`; older states of it that arrive later are passed over."""
        self._deleted[uid] = version
        self._deleted.move_to_end(uid)
        while len(self._deleted) > _REMEMBERED_DELETIONS:
            self._deleted.popitem(last=False)
        key = ObjectKey(namespace, name)
        entry = self._entries.get(key)
        if entry is not None and entry.uid == uid:
            self._drop(key)

    def keep_only(self, seen: Iterable[str], version: int, namespace: str | None) -> None:
        """After a whole list (at `version`, of one namespace or of all): what it did not show is gone.

        Args:
            seen: UIDs of the list.
            version: the list's resourceVersion; an object that was learnt of later stays.
            namespace: the namespace that was listed; None: all.
        """
        known = set(seen)
        for key, entry in tuple(self._entries.items()):
            listed = namespace is None or key.namespace == namespace
            if listed and entry.uid not in known and entry.version <= version:
                self._drop(key)

    def clear(self) -> None:
        """Forget everything: the kind is no longer there."""
        for key in tuple(self._entries):
            self._drop(key)

    def _drop(self, key: ObjectKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        keys = self._by_job[entry.job]
        keys.discard(key)
        if not keys:
            del self._by_job[entry.job]
        self._remember(entry, None)
        self._changed(entry.job)

    def _remember(self, entry: _Entry[Value], following: Value | None) -> None:
        if self._explains_failure is not None and self._explains_failure(entry.value, following):
            self._lately.append((time.monotonic(), entry.job, entry.value))


def _key(meta: ObjectMeta) -> ObjectKey:
    return ObjectKey(str(meta.get("namespace", "")), str(meta["name"]))
