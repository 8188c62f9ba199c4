"""Devices: what differs between npu, cuda and cpu, behind one interface."""

from rljob_api.roles import COMPUTE_VARIABLE
from rljob_worker.devices.base import Device
from rljob_worker.devices.select import check_profile, get_device
from rljob_worker.host.memory import MemoryInfo

__all__ = ["COMPUTE_VARIABLE", "Device", "MemoryInfo", "check_profile", "get_device"]
