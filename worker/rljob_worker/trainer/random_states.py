"""States of torch's generators in a rank's file."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_worker.trainer.state_file import StateReader

_HOST, _DEVICE = "rng.torch", "rng.device"


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the host's generator and, where the rank has a device of its own, of the device's."""
    states = {_HOST: torch.get_rng_state()}
    if device.type != "cpu":
        states[_DEVICE] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_random_states(reader: StateReader, device: torch.device) -> None:
    """Set the generators to what `random_states` returned. Raises ValueError where the file lacks a state."""
    torch.set_rng_state(reader.read(_HOST))
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(reader.read(_DEVICE), device)
