"""vLLM's side of the weight sync: what a `WeightSyncEngine` calls in every worker of an engine, by `collective_rpc`."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Self, TypeVar

import torch

from rljob_worker.devices import Device, get_device
from rljob_worker.devices.threads import half_the_threads
from rljob_worker.errors import WeightSyncError
from rljob_worker.upstream.install import install
from rljob_worker.upstream.patch import Process
from rljob_worker.upstream.vllm_types import ModelRunner
from rljob_worker.weightsync.landing import Landing
from rljob_worker.weightsync.messages import (
    BeginSync,
    BucketReport,
    Failure,
    FinishReport,
    FinishSync,
    JoinRoute,
    LandBucket,
    WorkerReport,
)
from rljob_worker.weightsync.plan import SyncPlan
from rljob_worker.weightsync.route import Receiver, Route
from rljob_worker.weightsync.routes import route_from
from rljob_worker.weightsync.vllm_layout import ModelLayout

if TYPE_CHECKING:
    from rljob_worker.upstream.vllm_types import Model

_log = logging.getLogger(__name__)
W = TypeVar("W", bound="WeightLandingExtension")
M = TypeVar("M")
R = TypeVar("R", bound=WorkerReport)


def _reporting(method: Callable[[W, M], R]) -> Callable[[W, M], R | Failure]:
    """Return a `Failure` instead of raising.

    When one of several workers raises, vLLM's multiprocess executor leaves the answers of the others in its queues, and
    the next call gets those.
    """

    @functools.wraps(method)
    def reporting(worker: W, message: M) -> R | Failure:
        try:
            with torch.no_grad(), half_the_threads(), _made_on(worker.device):
                return method(worker, message)
        except Exception as error:
            _log.exception("%s failed", method.__name__)
            kind = "" if isinstance(error, WeightSyncError) else f"{type(error).__name__}: "
            return Failure(f"{kind}{error}")

    return reporting


def _made_on(device: torch.device) -> AbstractContextManager[object]:
    """The reload makes tensors where torch makes them by default; on CPU it does anyway, at less cost a call."""
    return nullcontext() if device.type == "cpu" else device


class WeightLandingExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`; called through `collective_rpc` by a `WeightSyncEngine`.

    Methods do not raise: what their docstrings list under Raises comes back as a `Failure`.
    """

    device: torch.device
    model_runner: ModelRunner
    _rljob_sync: Landing | None = None
    rank: int
    """Of this worker in its engine."""
    _rljob_end: tuple[tuple[str, list[str], str], Receiver, SyncPlan] | None = None
    _rljob_layout: ModelLayout | None = None

    def __new__(cls, *_args: object, **_kwargs: object) -> Self:
        """vLLM makes its worker in every worker process, before groups and model: what is changed there is, here."""
        from vllm.platforms import current_platform

        install(Process.ENGINE_WORKER, current_platform.device_type)
        return super().__new__(cls)

    def rljob_device(self) -> Device:
        """The device that this worker computes on."""
        return get_device(self.device.type, self.device.index or 0)

    @_reporting
    def rljob_begin_sync(self, message: BeginSync) -> WorkerReport:
        """Open a sync; an unfinished one is given up.

        Raises:
            WeightSyncError: the slots are not there, the trainers have another plan, or the plan's tensors are not
                those of the engine's model.
        """
        started = time.perf_counter()
        known = (message["route"], message["slots"], message["plan"])
        if self._rljob_end is None or self._rljob_end[0] != known:
            if self._rljob_end is not None:
                self._rljob_end[1].close()
                self._rljob_end = None
            self._rljob_layout = None  # it knows where things lie in the slots
            route, deadline = route_from(message["route"]), time.monotonic() + message["seconds"]
            plan = _plan(message, route)
            receiver = route.make_receiver(self.rljob_device(), message["slots"], message["slot_bytes"], deadline)
            self._rljob_end = (known, receiver, plan)
        _, receiver, plan = self._rljob_end
        if self._rljob_sync is not None:
            self._rljob_sync.give_up()
            self._rljob_sync = None
        model = self.model_runner.model
        if self._rljob_layout is None or not self._rljob_layout.holds(model):
            self._rljob_layout = _layout(model, plan, message["version"])
        self._rljob_sync = Landing(self._rljob_layout, plan, receiver, message["version"])
        return {"seconds": {"begin": time.perf_counter() - started}}

    @_reporting
    def rljob_join_route(self, message: JoinRoute) -> WorkerReport:
        """Take part in what brings the buckets here, from now on; collective over the workers of all engines.

        Raises:
            WeightSyncError: not all others came in time.
        """
        started = time.perf_counter()
        self._open_sync(message["version"])
        assert self._rljob_end is not None
        _, receiver, plan = self._rljob_end
        deadline = time.monotonic() + message["seconds"]
        receiver.join(plan, message["engine"], self.rank, message["version"], message["anew"], deadline)
        return {"seconds": {"begin": time.perf_counter() - started}}

    @_reporting
    def rljob_land_bucket(self, message: LandBucket) -> BucketReport:
        """Land the tensors of one slot.

        Raises:
            WeightSyncError: the bucket is not the next one, or did not come.
        """
        return self._open_sync(message["version"]).land(message)

    @_reporting
    def rljob_finish_sync(self, message: FinishSync) -> FinishReport:
        """Close the sync; the weights count only when this returns.

        Raises:
            WeightSyncError: a tensor of `names` did not land, or a parameter of the model was not loaded.
        """
        started = time.perf_counter()
        landing = self._open_sync(message["version"])
        tensors = landing.finish(message["names"], self.model_runner.model_config)
        self._rljob_sync = None
        return {"version": message["version"], "tensors": tensors, "seconds": {"finish": time.perf_counter() - started}}

    def _open_sync(self, version: int) -> Landing:
        sync = self._rljob_sync
        if sync is None or sync.version != version:
            raise WeightSyncError(f"version {version}: this worker has not begun to take it")
        return sync


def _plan(message: BeginSync, route: Route) -> SyncPlan:
    plan, _ = route.parties().find(time.monotonic() + message["seconds"])
    if plan.fingerprint != message["plan"]:
        raise WeightSyncError(f"the trainers have plan {plan.fingerprint}, expected {message['plan']}")
    return plan


def _layout(model: Model, plan: SyncPlan, version: int) -> ModelLayout:
    try:
        return ModelLayout(model, plan.shapes, plan.torch_dtype)
    except WeightSyncError as error:
        raise WeightSyncError(f"version {version}: {error}") from error
