"""Devices: what differs between npu, cuda and cpu, behind one interface."""

from rljob_worker.devices.base import Device
from rljob_worker.devices.select import get_device
from rljob_worker.memory.host import MemoryInfo

__all__ = ["Device", "MemoryInfo", "get_device"]
