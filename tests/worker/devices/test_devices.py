"""The device interface and its CPU."""

from __future__ import annotations

import socket

import pytest
import torch
import xxhash

from rljob_worker.devices import Device, get_device


def test_the_cpu_is_a_device() -> None:
    device = get_device("cpu", 2)
    assert isinstance(device, Device)
    assert device.identity() == f"{socket.gethostname()}:cpu:2"
    assert (device.name, device.index, device.torch_device) == ("cpu", 2, torch.device("cpu"))
    assert (device.process_group_backend, device.visible_devices_variable) == ("gloo", None)
    device.synchronize()
    device.empty_cache()
    info = device.memory_info()
    assert 0 < info.free <= info.total


@pytest.mark.parametrize("name", ["npu", "cuda", "ascend-a2", "hami"])
def test_devices_to_come_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"resources.profile: '{name}' is not built yet; allowed now: cpu"):
        get_device(name)


def test_wrong_names_and_indices() -> None:
    with pytest.raises(ValueError, match="'gpu' is no known profile; known: cpu, npu"):
        get_device("gpu")
    with pytest.raises(ValueError, match="device index: -1"):
        get_device("cpu", -1)


def test_profiles_of_the_api_are_all_known() -> None:
    from rljob_api.spec import Profile

    for profile in Profile:
        if profile == "cpu":
            assert get_device(profile).name == "cpu"
        else:
            with pytest.raises(ValueError, match="is not built yet"):
                get_device(profile)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_checksum_is_over_the_row_major_bytes(dtype: torch.dtype) -> None:
    device = get_device("cpu")
    tensor = (torch.arange(24).reshape(4, 6) % 3).to(dtype)
    data = bytes(tensor.flatten().view(torch.uint8).tolist())
    assert device.checksum(tensor) == xxhash.xxh3_64_intdigest(data)
    assert device.checksum(tensor.t()) == device.checksum(tensor.t().contiguous()) != device.checksum(tensor)
    assert device.checksum(torch.nn.Parameter(tensor.float())) == device.checksum(tensor.float())
    changed = tensor.clone()
    changed[2, 3] = 1 if changed[2, 3] == 0 else 0
    assert device.checksum(changed) != device.checksum(tensor)


def test_checksum_of_scalar_empty_and_foreign_tensors() -> None:
    device = get_device("cpu")
    assert device.checksum(torch.tensor(1.0)) == device.checksum(torch.ones(1))
    assert device.checksum(torch.empty(0)) == xxhash.xxh3_64_intdigest(b"")
    with pytest.raises(ValueError, match="on meta"):
        device.checksum(torch.empty(2, device="meta"))
