"""Ending a pass over micro-batches early without leaving a peer waiting.

A rank that simply raised would leave its peers inside a collective. Instead, the ranks that depend on one another agree
on the first micro-batch that is not computed any more; from there on the schedule runs with one-element tensors, and
all ranks raise together where the pass ends. The lowest of these ranks leads: when it was asked to stop, it announces
the *next* micro-batch before it computes its own. No peer can begin that next one earlier, because it waits inside the
current one (tensor, expert parallelism) or for the leader's output (pipeline parallelism).
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from rljob_worker.errors import StopRequested
from rljob_worker.trainer.rendezvous import Notices


class StopAgreement:
    """A rank's stop request, which any thread may set, and what its peers agreed; cleared when a pass has raised."""

    def __init__(self, requested: threading.Event, rank: int, world_size: int, leader: int, notices: Notices) -> None:
        self._rank = rank
        self._world_size = world_size
        self._leader = leader
        self._requested = requested
        self._notices = notices
        self._pass = 0
        self._next = 0
        self._stop_at: int | None = None

    def begin_pass(self, leader: int | None = None) -> None:
        """Start counting the micro-batches of a forward or forward-backward pass.

        Args:
            leader: of this pass and those that follow; None: as before.
        """
        if leader is not None:
            self._leader = leader
        self._pass += 1
        self._next = 0
        self._stop_at = None

    def skip(self) -> bool:
        """Whether the micro-batch that is about to start is to be skipped; call once for each."""
        current, self._next = self._next, self._next + 1
        if self._stop_at is None:
            if self._rank == self._leader:
                if self._requested.is_set():
                    self._announce(current)
            elif self._world_size > 1:
                self._stop_at = self._notices.read(_get_default_store(), self._key())
        return self._stop_at is not None and current >= self._stop_at

    def finish_pass(self) -> None:
        """Raise StopRequested on all ranks when any of them was asked to stop; collective."""
        stop = self._requested.is_set() or self._stop_at is not None
        if self._world_size > 1:
            flag = torch.tensor([int(stop)])
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            stop = bool(flag.item())
        if stop:
            self._requested.clear()
            raise StopRequested("the step was stopped before it changed the weights")

    def _announce(self, current: int) -> None:
        # Alone, there is no peer to tell and the current micro-batch can be skipped itself.
        self._stop_at = current if self._world_size == 1 else current + 1
        if self._world_size > 1:
            self._notices.post(_get_default_store(), self._key(), self._stop_at)

    def _key(self) -> str:
        return f"rljob/stop/{self._leader}/{self._pass}"
