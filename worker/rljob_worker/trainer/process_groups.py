"""The process groups of a job's trainers, which can be given up while they sleep.

A communicator holds device memory that no memory saver reaches: HCCL keeps two buffers of HCCL_BUFFSIZE (200 MiB) for
each. It goes only when the group is destroyed. So a rank can leave all of its groups and join new ones later:

    LIVE -> release() -> RELEASED -> rebuild() -> LIVE

Released, there is a world over gloo alone, and stand-ins are wherever the groups were: nothing keeps a communicator
alive, and each use of one raises an error. Groups are destroyed all at once, in torch's own order, which is the same
on all ranks: one after the other they would deadlock where ranks are in different ones (pipeline parallelism). Each
generation of groups has a key-value store of its own, whose memory goes with it. Waits have a deadline, and an error
names the ranks that did not come. (Gloo tries five times as long to reach a rank that dies while they connect.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import GroupMember, ProcessGroup
from torch.distributed.distributed_c10d import _world

from rljob_worker.errors import JobError
from rljob_worker.trainer.rendezvous import rendezvous
from rljob_worker.upstream.process_groups import MakeGroup, recorded_groups
from rljob_worker.upstream.references import Pair, References

_ASLEEP_BACKEND = "gloo"
_OWN = __name__.partition(".")[0]


class ReleasedGroup:
    """Stands wherever a process group was while it is given up."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}, given up while the trainer sleeps>"

    def __getattr__(self, attribute: str) -> NoReturn:
        raise RuntimeError(f"process group {self!r} was asked for {attribute}")


def _stand_in(group: object, _make: MakeGroup) -> ReleasedGroup | None:
    return ReleasedGroup(group.group_desc) if isinstance(group, ProcessGroup) else None


class GroupsState(StrEnum):
    """State of a rank's process groups."""

    LIVE = "LIVE"
    RELEASED = "RELEASED"
    BROKEN = "BROKEN"
    """A release or rebuild failed: the process must end."""


class ProcessGroups:
    """The world and every group that was made under `recording`; all ranks make the same calls in the same order.

    Args:
        init_method: where the ranks meet for the life of the job; see `rendezvous`.
        rank: this process among all.
        world_size: number of processes.
        backend: of the live world.
        timeout_seconds: deadline of each wait for other ranks.
        holders: packages of the training backend whose objects may keep groups and be given others in their place,
            as this one's may. Whatever else keeps one was not looked at.
    """

    def __init__(
        self,
        init_method: str,
        *,
        rank: int,
        world_size: int,
        backend: str,
        timeout_seconds: float,
        holders: Sequence[str],
    ) -> None:
        self.state = GroupsState.LIVE
        self._rank, self._world_size = rank, world_size
        self._backend = backend
        self._references = References((*holders, _OWN))
        self._timeout = timedelta(seconds=timeout_seconds)
        self._rendezvous = rendezvous(init_method, rank, self._timeout)
        self._store = self._rendezvous.store
        self._generation = 0
        self._made: list[tuple[MakeGroup, object]] = []
        """Functions that make the groups, in order, and their results here; None where this rank is not a member."""
        self._join(backend)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Groups made inside with `torch.distributed.new_group` can be rebuilt."""
        with recorded_groups(self._timeout, lambda *made: self._made.append(made)):
            yield

    def release(self) -> float:
        """Destroy all groups, keeping a world over gloo; nothing when released. Collective; returns seconds.

        Raises:
            JobError: a rank did not come, a group is there that could not be rebuilt, or something holds one that
                may not, or where it cannot be replaced.
        """
        if self.state is GroupsState.RELEASED:
            return 0.0
        started = time.perf_counter()
        with self._transition("release", GroupsState.LIVE, GroupsState.RELEASED):
            self._check_all_recorded()
            self._meet("release")
            dist.destroy_process_group()
            self._references.replace(self._exchange(_stand_in))
            self._join(_ASLEEP_BACKEND)
            self._meet("released")
        return time.perf_counter() - started

    def rebuild(self) -> float:
        """Make all groups again and put them wherever the old ones were; nothing when live. Collective.

        Returns:
            Seconds it took.

        Raises:
            JobError: a rank did not come, or something holds a stand-in where it cannot be replaced.
        """
        if self.state is GroupsState.LIVE:
            return 0.0
        started = time.perf_counter()
        with self._transition("rebuild", GroupsState.RELEASED, GroupsState.LIVE):
            self._meet("rebuild")
            dist.destroy_process_group()
            self._join(self._backend)
            self._references.replace(self._exchange(lambda _, make: make()))
            # A rank must not use a group that others have not made yet.
            self._meet("rebuilt")
        return time.perf_counter() - started

    def close(self) -> None:
        """Destroy all groups."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._made.clear()

    @contextmanager
    def _transition(self, what: str, before: GroupsState, after: GroupsState) -> Iterator[None]:
        if self.state is not before:
            raise RuntimeError(f"process groups: {what} is not allowed while {self.state}; it needs {before}")
        self.state = GroupsState.BROKEN
        try:
            yield
        except JobError:
            raise
        except dist.DistNetworkError as error:
            # It may have given up first, on a rank that it names in its log.
            raise JobError(
                f"process groups: {what}: trainer-0 has ended, which the others meet at; see its log"
            ) from error
        except Exception as error:
            raise JobError(f"process groups: {what} failed on rank {self._rank}: {error}") from error
        self.state = after

    def _exchange(self, other_for: Callable[[object, MakeGroup], object]) -> list[Pair]:
        """Others for all groups, in the order in which they were made; pairs of the old one and the other one."""
        made, self._made = self._made, []
        pairs = []
        for make, old in made:
            other = other_for(old, make)
            self._made.append((make, None if old is None else other))
            if old is not None:
                pairs.append((old, other))
        return pairs

    def _join(self, backend: str) -> None:
        """A world in a store of its own: keys of one that is destroyed cannot be met again, and do not pile up."""
        self._generation += 1
        dist.init_process_group(
            backend,
            store=self._rendezvous.make(self._generation),
            rank=self._rank,
            world_size=self._world_size,
            timeout=self._timeout,
        )
        self._rendezvous.made(self._generation)

    def _meet(self, where: str) -> None:
        """Wait until every rank is here.

        Raises:
            JobError: some are not within the deadline.
        """
        prefix = f"rljob/{where}/{self._generation}"
        keys = [f"{prefix}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], "")
        try:
            self._store.wait(keys, self._timeout)
        except dist.DistNetworkError:
            raise
        except RuntimeError:
            missing = ", ".join(f"trainer-{rank}" for rank, key in enumerate(keys) if not self._store.check([key]))
            raise JobError(
                f"process groups: {where}: {missing} did not come within {self._timeout.total_seconds():g} s; see its "
                "log"
            ) from None
        self._forget(f"{prefix}/left", keys)

    def _forget(self, counter: str, keys: list[str]) -> None:
        """The last rank that has seen all the keys removes them."""
        if self._store.add(counter, 1) == self._world_size:
            for key in (*keys, counter):
                self._store.delete_key(key)

    def _check_all_recorded(self) -> None:
        known = {GroupMember.WORLD, *(group for _, group in self._made)}
        unknown = [group for group in _world.pg_map if group not in known]
        if unknown:
            names = ", ".join(f"{group.group_desc} ({group.group_name})" for group in unknown)
            raise JobError(
                f"process groups: {names}: made after start-up, so it could not be rebuilt; set "
                "spec.memorySaver.releaseProcessGroups to false"
            )
