"""What RLJob adds to vLLM's workers on npu and cuda; vLLM mixes this class into the worker's bases.

The worker's own class and its patches stay: nothing here overrides a method of it.
"""

from __future__ import annotations

from typing import Any

import torch

from rljob_worker.devices.gloo import share_gloo_loop
from rljob_worker.rollout.kv_caches import kv_cache_storages
from rljob_worker.weightsync.vllm_extension import WeightLandingExtension

# At import, because each worker process imports its extension before it makes groups.
share_gloo_loop()


class DeviceWorkerExtension(WeightLandingExtension):
    """Memory hand-over; landing weights comes with the base."""

    model_runner: Any
    device: torch.device
    _rljob_parameters: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []

    def rljob_prepare(self) -> None:
        """Have the sampler return the log-probabilities that the engine's arguments ask for.

        vllm-ascend 0.23 makes its sampler without them, and it would return those before temperature and top-p.

        Raises:
            RuntimeError: the sampler does not have the setting.
        """
        sampler = self.model_runner.sampler
        mode = self.model_runner.model_config.logprobs_mode
        for part in (sampler, sampler.topk_topp_sampler):
            if not hasattr(part, "logprobs_mode"):
                raise RuntimeError(f"{type(part).__qualname__} has no logprobs_mode: RLJob needs {mode}")
            part.logprobs_mode = mode

    def rljob_device_identity(self) -> str:
        """Identity of this worker's device, as its trainer's."""
        return self.rljob_device().identity()

    def rljob_device_memory(self) -> tuple[int, int]:
        """Free and total bytes of this worker's device, after what is queued there."""
        module = torch.get_device_module(self.device)
        module.synchronize()
        free, total = module.mem_get_info()
        return int(free), int(total)

    def rljob_weight_bytes(self) -> int:
        """Bytes of the model's parameters and buffers."""
        tensors = [*self.model_runner.model.parameters(), *self.model_runner.model.buffers()]
        storages = (tensor.untyped_storage() for tensor in tensors)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def rljob_kv_cache_bytes(self) -> int:
        """Size of the KV cache."""
        return sum(kv_cache_storages(self.model_runner.kv_caches).values())

    def rljob_note_parameters(self) -> None:
        """Remember the model's parameters for `rljob_restore_parameters`."""
        self._rljob_parameters = [
            (module, name, parameter)
            for module in self.model_runner.model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]

    def rljob_restore_parameters(self) -> int:
        """Put back parameters that were replaced since; returns how many.

        Waking, vllm-ascend 0.23 replaces the experts' weights by transposed views of them, in the layout of a
        checkpoint. The reload puts its result, packed, where the weights were that the engine computes with: it would
        find another shape there.
        """
        replaced = 0
        for module, name, parameter in self._rljob_parameters:
            if module._parameters.get(name) is not parameter:
                module._parameters[name] = parameter
                replaced += 1
        self._rljob_parameters = []
        return replaced
