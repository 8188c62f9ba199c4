"""vLLM's side of the weight sync: what a `WeightReceiver` calls in every worker of an engine, by `collective_rpc`."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rljob_worker.devices import Device, get_device
from rljob_worker.weightsync import rendezvous
from rljob_worker.weightsync.device_slots import DeviceSlots
from rljob_worker.weightsync.errors import WeightSyncError
from rljob_worker.weightsync.plan import PlacedPiece, PlacedTensor, dtype_named
from rljob_worker.weightsync.slots import Slots
from rljob_worker.weightsync.staging import Staging
from rljob_worker.weightsync.threads import half_the_threads
from rljob_worker.weightsync.verify import compare_checksums
from rljob_worker.weightsync.vllm_cpu import repair_moe_activation
from rljob_worker.weightsync.vllm_reload import LayerwiseReload

_log = logging.getLogger(__name__)
_Method = Callable[[Any, dict[str, Any]], dict[str, Any]]

# vLLM imports a worker extension in every worker, before it loads the model.
repair_moe_activation()


def _reporting(method: _Method) -> _Method:
    """Return `{"error": text}` instead of raising.

    When one of several workers raises, vLLM's multiprocess executor leaves the answers of the others in its queues, and
    the next call gets those.
    """

    @functools.wraps(method)
    def reporting(worker: Any, message: dict[str, Any]) -> dict[str, Any]:
        try:
            with torch.no_grad(), half_the_threads(), _made_on(worker.device):
                return method(worker, message)
        except Exception as error:
            _log.exception("%s failed", method.__name__)
            kind = "" if isinstance(error, WeightSyncError) else f"{type(error).__name__}: "
            return {"error": f"{kind}{error}"}

    return reporting


def _made_on(device: torch.device) -> AbstractContextManager[Any]:
    """The reload makes tensors where torch makes them by default; on CPU it does anyway, at less cost a call."""
    return nullcontext() if device.type == "cpu" else device


class WeightLandingExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`; called through `collective_rpc` by a `WeightReceiver`.

    Methods do not raise: what their docstrings list under Raises comes back as `{"error": text}`.
    """

    device: torch.device
    model_runner: Any
    _rljob_sync: _Landing | None = None
    _rljob_slots: tuple[Any, Staging] | None = None

    def rljob_device(self) -> Device:
        """The device that this worker computes on."""
        return get_device(self.device.type, self.device.index or 0)

    @_reporting
    def rljob_begin_sync(self, message: dict[str, Any]) -> dict[str, Any]:
        """Open a sync: `version`, `dtype`, `folder`, names of the `slots` in host memory, `slot_bytes`, `seconds`.

        An unfinished one is given up.

        Raises:
            WeightSyncError: the slots are not there.
        """
        started = time.perf_counter()
        place = (message["folder"], message["slots"])
        if self._rljob_slots is None or self._rljob_slots[0] != place:
            if self._rljob_slots is not None:
                self._rljob_slots[1].close()
            self._rljob_slots = (place, _attached(self.rljob_device(), message))
        slots = self._rljob_slots[1]
        self._rljob_sync = _Landing(self.model_runner.model, slots, message["version"], dtype_named(message["dtype"]))
        return {"begin_seconds": time.perf_counter() - started}

    @_reporting
    def rljob_land_bucket(self, message: dict[str, Any]) -> dict[str, Any]:
        """Load the tensors of one slot; returns their `names`, the `checksums` of their bytes, and seconds.

        Raises:
            WeightSyncError: a checksum differs, the model has no use for a tensor, or a module stays incomplete.
        """
        return self._open_sync(message).land(message)

    @_reporting
    def rljob_finish_sync(self, message: dict[str, Any]) -> dict[str, Any]:
        """Close the sync; the weights count only when this returns.

        Raises:
            WeightSyncError: a tensor of `names` did not land, or a parameter of the model was not loaded.
        """
        started = time.perf_counter()
        tensors = self._open_sync(message).finish(message["names"], self.model_runner.model_config)
        self._rljob_sync = None
        return {"version": message["version"], "tensors": tensors, "finish_seconds": time.perf_counter() - started}

    def _open_sync(self, message: Mapping[str, Any]) -> _Landing:
        sync = self._rljob_sync
        if sync is None or sync.version != message["version"]:
            raise WeightSyncError(f"version {message['version']}: this worker has not begun to take it")
        return sync


def _attached(device: Device, message: Mapping[str, Any]) -> Staging:
    if not device.own_memory:
        return Slots.attach(message["slots"], message["slot_bytes"])
    deadline = time.monotonic() + message["seconds"]
    handles = rendezvous.find_device(message["folder"], device.identity(), deadline)
    return DeviceSlots.open(device, handles, message["slot_bytes"])


class _Landing:
    """One sync in one worker."""

    def __init__(self, model: Any, slots: Staging, version: int, dtype: torch.dtype) -> None:
        self.version = version
        self._model, self._slots, self._dtype = model, slots, dtype
        self._names: list[str] = []
        self._reload = LayerwiseReload(model)

    def land(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """See `WeightLandingExtension.rljob_land_bucket`."""
        started = time.perf_counter()
        bucket = _Bucket(message, self._slots, self._dtype, f"version {self.version}, bucket {message['bucket']}")
        with ThreadPoolExecutor(1, "rljob-checksum") as hasher:
            bucket.start_checksums(hasher)
            self._model.load_weights(self._checked(bucket))
        loaded = time.perf_counter()
        self._reload.complete_modules(bucket.where)
        self._slots.settle()
        self._names += bucket.given
        return {
            "names": bucket.given,
            "checksums": bucket.checksums,
            "checksum_seconds": bucket.checksum_seconds,
            "load_seconds": loaded - started - bucket.checksum_seconds,
            "repack_seconds": time.perf_counter() - loaded,
        }

    def _checked(self, bucket: _Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        for position, (tensor, weight) in enumerate(bucket.weights):
            bucket.check(position)
            before = self._reload.loader_calls
            yield tensor.name, weight
            # `load_weights` skips names it does not know without a word: the only trace is that no loader was called.
            if self._reload.loader_calls == before:
                raise WeightSyncError(f"{bucket.where}: the engine's model has no parameter for {tensor.name}")
            bucket.given.append(tensor.name)

    def finish(self, names: Sequence[str], model_config: Any) -> int:
        """See `WeightLandingExtension.rljob_finish_sync`; returns the number of tensors."""
        if self._names != list(names):
            wrong = next((name for name in names if self._names.count(name) != 1), "order of tensors")
            raise WeightSyncError(
                f"version {self.version}: {len(self._names)} of {len(names)} tensors have landed; wrong: {wrong}"
            )
        self._reload.finish(f"version {self.version}", model_config)
        return len(self._names)


class _Bucket:
    """The tensors of one slot; a tensor's checksum is compared before the loader gets it, while others are loading."""

    def __init__(self, message: Mapping[str, Any], slots: Staging, dtype: torch.dtype, where: str) -> None:
        self.where = where
        self._slots = slots
        self.given: list[str] = []
        self.checksums: list[list[int]] = []
        self.checksum_seconds = 0.0
        """Seconds that loading waited for checksums."""
        self._expected: list[list[int]] = message["checksums"]
        placed = [_placed(tensor) for tensor in message["tensors"]]
        self.weights = [
            (tensor, slots.tensor(message["slot"], tensor.offset, dtype, tensor.shape)) for tensor in placed
        ]

    def start_checksums(self, hasher: ThreadPoolExecutor) -> None:
        """Compute them in order, where the slots allow it on a thread of their own: xxh3 does not hold the
        interpreter's lock."""
        start = hasher.submit if self._slots.beside else _at_once
        self._computed = [start(_checksums, self._slots, tensor, weight) for tensor, weight in self.weights]

    def check(self, position: int) -> None:
        """Wait for a tensor's checksums; WeightSyncError when they are not those of the trainers."""
        started = time.perf_counter()
        tensor = self.weights[position][0]
        actual = self._computed[position].result()
        self.checksum_seconds += time.perf_counter() - started
        compare_checksums(tensor, self._expected[position], actual, self.where)
        self.checksums.append(actual)


def _checksums(slots: Staging, tensor: PlacedTensor, weight: torch.Tensor) -> list[int]:
    return [slots.checksum(piece.part_of(weight)) for piece in tensor.pieces]


def _at_once(function: Callable[..., list[int]], *arguments: Any) -> Future[list[int]]:
    future: Future[list[int]] = Future()
    future.set_result(function(*arguments))
    return future


def _placed(value: Mapping[str, Any]) -> PlacedTensor:
    pieces = tuple(PlacedPiece(p["producer"], p["dim"], p["start"], p["length"]) for p in value["pieces"])
    return PlacedTensor(value["name"], tuple(value["shape"]), value["offset"], value["nbytes"], pieces)
