"""RLJob's extension of a vLLM worker, on a device that shares no memory with others."""

from __future__ import annotations

from separate_devices import SeparateDevice

from rljob_worker.weightsync.vllm_extension import WeightLandingExtension


class SeparateDeviceExtension(WeightLandingExtension):
    rank: int

    def rljob_device(self) -> SeparateDevice:
        return SeparateDevice(self.rank)
