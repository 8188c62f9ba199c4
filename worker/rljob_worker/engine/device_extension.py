"""RLJob's methods in vLLM's workers on npu and cuda; vLLM mixes this class into the worker's bases.

The worker's own class and its patches stay: nothing here overrides a method of it.
"""

from __future__ import annotations

import torch

from rljob_worker.engine.kv_caches import kv_cache_storages
from rljob_worker.engine.worker_extension import WorkerExtension
from rljob_worker.upstream.vllm_device import Parameters, parameters_of, put_back, return_asked_log_probs
from rljob_worker.upstream.vllm_graphs import GraphMemory, captured_graphs, model_of


class DeviceWorkerExtension(WorkerExtension):
    """Memory hand-over on npu and cuda."""

    device: torch.device
    _rljob_parameters: Parameters = []

    def rljob_prepare(self) -> None:
        """Have the sampler return the log-probabilities that the engine's arguments ask for, too, and remember what
        captured graphs hold on to."""
        return_asked_log_probs(self.model_runner)
        super().rljob_prepare()
        if self.rljob_captured_graphs():
            self._rljob_graphs = GraphMemory(
                model_of(self.model_runner), lambda: kv_cache_storages(self.model_runner.kv_caches)
            )

    def rljob_scale_weights(self, factor: float) -> None:
        """Multiply each MLP's last projection where it lies, as new weights are written."""
        for name, parameter in model_of(self.model_runner).named_parameters():
            if name.endswith("down_proj.weight"):
                parameter.data.mul_(factor)

    def rljob_captured_graphs(self) -> int:
        """Graphs of decoding steps that this worker has captured."""
        return captured_graphs(self.model_runner)

    def rljob_device_memory(self) -> tuple[int, int]:
        """Free and total bytes of this worker's device, after what is queued there."""
        module = torch.get_device_module(self.device)
        module.synchronize()
        free, total = module.mem_get_info()
        return int(free), int(total)

    def rljob_weight_bytes(self) -> int:
        """Bytes of the model's parameters and buffers."""
        model = model_of(self.model_runner)
        tensors = [*model.parameters(), *model.buffers()]
        storages = (tensor.untyped_storage() for tensor in tensors)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def rljob_note_parameters(self) -> None:
        """Remember the model's parameters for `rljob_restore_parameters`."""
        self._rljob_parameters = parameters_of(model_of(self.model_runner))

    def rljob_restore_parameters(self) -> int:
        """Put back parameters that were replaced since; returns how many."""
        noted, self._rljob_parameters = self._rljob_parameters, []
        return put_back(noted)
