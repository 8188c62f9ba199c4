"""Landing weights in a vLLM 0.23 worker, through its layerwise reload (`vllm/model_executor/model_loader/reload`).

The reload puts a module's parameters on meta, keeps *references* to what the loaders are given until all elements of
the module are there, then makes it anew, packs it, and copies it into the old storage. It does not notice missing
weights, and takes a slot's views for its own; so every module is checked to be complete when its bucket has landed.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rljob_worker.weightsync.checksum import checksum
from rljob_worker.weightsync.errors import WeightSyncError
from rljob_worker.weightsync.plan import PlacedPiece, PlacedTensor, dtype_named
from rljob_worker.weightsync.slots import Slots
from rljob_worker.weightsync.verify import compare_checksums
from rljob_worker.weightsync.vllm_cpu import repair_moe_activation

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
            with torch.no_grad():
                return method(worker, message)
        except Exception as error:
            _log.exception("%s failed", method.__name__)
            kind = "" if isinstance(error, WeightSyncError) else f"{type(error).__name__}: "
            return {"error": f"{kind}{error}"}

    return reporting


class WeightLandingExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`; called through `collective_rpc` by a `WeightReceiver`.

    Methods do not raise: what their docstrings list under Raises comes back as `{"error": text}`.
    """

    model_runner: Any
    _rljob_sync: _Landing | None = None
    _rljob_slots: Slots | None = None

    @_reporting
    def rljob_begin_sync(self, message: dict[str, Any]) -> dict[str, Any]:
        """Open a sync: `version`, `dtype`, names of the `slots`, `slot_bytes`. An unfinished one is given up."""
        started = time.perf_counter()
        slots = self._rljob_slots
        if slots is None or slots.names != tuple(message["slots"]):
            if slots is not None:
                slots.close()
            self._rljob_slots = slots = Slots.attach(message["slots"], message["slot_bytes"])
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


class _Landing:
    """One sync in one worker."""

    def __init__(self, model: Any, slots: Slots, version: int, dtype: torch.dtype) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        self.version = version
        self._layerwise, self._model, self._slots, self._dtype = layerwise, model, slots, dtype
        self._names: list[str] = []
        self._modules: dict[str, Any] = dict(model.named_modules())
        self._touched: set[str] = set()
        self._loader_calls = 0
        self._give_up_unfinished()
        layerwise.initialize_layerwise_reload(model)
        for name, module in self._modules.items():
            self._count_loader_calls(name, module)

    def _give_up_unfinished(self) -> None:
        """Put the old tensors back where a sync was aborted: half-loaded modules hold references into a slot."""
        for module in self._modules.values():
            info = self._layerwise.get_layerwise_info(module)
            if info.can_load():
                self._layerwise._place_kernel_tensors(module, info)
                info.reset()

    def _count_loader_calls(self, name: str, module: torch.nn.Module) -> None:
        """`load_weights` skips names it does not know without a word: the only trace is that no loader was called."""
        for parameter in module.parameters(recurse=False):
            loader = getattr(parameter, "weight_loader", None)
            if loader is not None:
                parameter.weight_loader = self._counting(loader, name)  # type: ignore[attr-defined]

    def _counting(self, loader: Callable[..., Any], module_name: str) -> Callable[..., Any]:
        # `wraps` keeps the name by which the reload finds its way back to the original loader.
        @functools.wraps(loader)
        def counting_loader(*args: Any, **kwargs: Any) -> Any:
            self._loader_calls += 1
            self._touched.add(module_name)
            return loader(*args, **kwargs)

        return counting_loader

    def land(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """See `WeightLandingExtension.rljob_land_bucket`."""
        started = time.perf_counter()
        where = f"version {self.version}, bucket {message['bucket']}"
        placed = [_placed(tensor) for tensor in message["tensors"]]
        weights = [
            (tensor.name, self._slots.tensor(message["slot"], tensor.offset, self._dtype, tensor.shape))
            for tensor in placed
        ]
        checksums = [
            [checksum(piece.part_of(weight)) for piece in tensor.pieces] for tensor, (_, weight) in zip(placed, weights)
        ]
        for tensor, expected, actual in zip(placed, message["checksums"], checksums, strict=True):
            compare_checksums(tensor, expected, actual, where)
        checked = time.perf_counter()
        self._touched.clear()
        given: list[str] = []
        self._model.load_weights(self._given(weights, given, where))
        self._check_complete(where)
        self._names += given
        loaded = time.perf_counter()
        return {
            "names": given,
            "checksums": checksums,
            "checksum_seconds": checked - started,
            "load_seconds": loaded - checked,
        }

    def _given(
        self, weights: Sequence[tuple[str, torch.Tensor]], given: list[str], where: str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            before = self._loader_calls
            yield name, weight
            if self._loader_calls == before:
                raise WeightSyncError(f"{where}: the engine's model has no parameter for {name}")
            given.append(name)

    def _check_complete(self, where: str) -> None:
        for name in sorted(self._touched):
            module = self._modules[name]
            info = self._layerwise.get_layerwise_info(module)
            if not info.can_load():
                continue
            if info.load_numel + _padding(module) == info.load_numel_total:
                self._layerwise._layerwise_process(module, info)
                continue
            raise WeightSyncError(
                f"{where}: {name} has {info.load_numel} of {info.load_numel_total} elements after its bucket"
            )

    def finish(self, names: Sequence[str], model_config: Any) -> int:
        """See `WeightLandingExtension.rljob_finish_sync`; returns the number of tensors."""
        if self._names != list(names):
            wrong = next((name for name in names if self._names.count(name) != 1), "order of tensors")
            raise WeightSyncError(
                f"version {self.version}: {len(self._names)} of {len(names)} tensors have landed; wrong: {wrong}"
            )
        tied = self._tied_modules()
        self._layerwise.finalize_layerwise_reload(self._model, model_config)
        for module in tied:
            # The shared parameter is new, but what was packed out of it for this module is not.
            module.quant_method.process_weights_after_loading(module)
        for name, parameter in self._model.named_parameters():
            if parameter.is_meta:
                raise WeightSyncError(f"version {self.version}: parameter {name} has no weights")
        return len(self._names)

    def _tied_modules(self) -> list[Any]:
        """Modules that got nothing because all their parameters belong to modules that did; any other is an error."""
        waiting: dict[str, Any] = {}
        loaded: set[int] = set()
        for name, module in self._modules.items():
            info = self._layerwise.get_layerwise_info(module)
            if not info.can_load():
                loaded |= {id(parameter) for parameter in module.parameters(recurse=False)}
            elif info.kernel_tensors is not None and info.kernel_tensors[0]:
                waiting[name] = info.kernel_tensors[0]
        for name, parameters in waiting.items():
            for own, parameter in parameters.items():
                if id(parameter) not in loaded:
                    raise WeightSyncError(f"version {self.version}: the engine's {name}.{own} was not loaded")
        return [self._modules[name] for name in waiting]


def _padding(module: Any) -> int:
    """Elements of a vocabulary shard that no checkpoint has; its loader fills them with zeros."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if not isinstance(module, VocabParallelEmbedding):
        return 0
    rows = module.num_embeddings_per_partition - module.shard_indices.num_org_elements
    return int(rows * module.embedding_dim + (rows if getattr(module, "bias", None) is not None else 0))


def _placed(value: Mapping[str, Any]) -> PlacedTensor:
    pieces = tuple(PlacedPiece(p["producer"], p["dim"], p["start"], p["length"]) for p in value["pieces"])
    return PlacedTensor(value["name"], tuple(value["shape"]), value["offset"], value["nbytes"], pieces)
