"""The device interface and its CPU."""

from __future__ import annotations

import socket

import pytest
import torch
import xxhash

from rljob_worker.devices import COMPUTE_VARIABLE, Device, get_device
from rljob_worker.errors import UserError


def test_the_cpu_is_a_device() -> None:
    device = get_device("cpu", 2)
    assert isinstance(device, Device)
    assert device.identity() == f"{socket.gethostname()}:cpu:2"
    assert (device.name, device.index, device.torch_device) == ("cpu", 2, torch.device("cpu"))
    assert (device.process_group_backend, device.visible_devices_variable) == ("gloo", None)
    device.synchronize()
    device.empty_cache()
    device.set_current()
    assert not device.own_memory
    with pytest.raises(ValueError, match="made to be shared"):
        device.share(torch.ones(1))
    info = device.memory_info()
    assert 0 < info.free <= info.total


@pytest.mark.parametrize("name", ["npu", "ascend-a2", "hami"])
def test_a_profile_whose_library_is_missing_is_refused_with_what_to_install(name: str) -> None:
    with pytest.raises(
        UserError, match=f"'{name}' cannot be used here: torch_npu is not installed; use the worker image"
    ):
        get_device(name)


def test_cuda_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match=r"'cuda' cannot be used here: torch .* is built without CUDA; use the worker"):
        get_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=r"cuda device 0 is wanted, but torch finds 0 .*give the container its devices"):
        get_device("cuda")


def test_any_profile_computes_on_the_cpu_when_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPUTE_VARIABLE, "cpu")
    assert get_device("ascend-a2", 1).identity() == f"{socket.gethostname()}:cpu:1"
    with pytest.raises(ValueError, match="'gpu' is no known profile"):
        get_device("gpu")
    monkeypatch.setenv(COMPUTE_VARIABLE, "npu")
    with pytest.raises(ValueError, match="RLJOB_COMPUTE_DEVICE: 'npu' is no device to compute on; allowed: cpu"):
        get_device("ascend-a2")


def test_wrong_names_and_indices() -> None:
    with pytest.raises(ValueError, match="'gpu' is no known profile; known: cpu, npu"):
        get_device("gpu")
    with pytest.raises(ValueError, match="device index: -1"):
        get_device("cpu", -1)


def test_profiles_of_the_api_are_all_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from rljob_api.spec import Profile

    monkeypatch.setattr(torch.version, "cuda", None)
    assert get_device(Profile.CPU).name == "cpu"
    for profile in Profile:
        if profile is not Profile.CPU:
            with pytest.raises(UserError, match="cannot be used here"):
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
