"""Parts that npu and cuda share and that need neither: visible devices, the checksum, the shape of an exported
tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing.reductions as reductions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rljob_worker.devices import checksum
from rljob_worker.devices.checksum import device_checksum
from rljob_worker.devices.ipc import export_tensor, import_tensor
from rljob_worker.devices.visible import parse_visible_devices, physical_device
from rljob_worker.errors import UserError

ASCEND, CUDA = "ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        (None, None),
        ("", ()),
        (" ", ()),
        ("NoDevFiles", ()),
        ("0", ("0",)),
        ("6,2", ("6", "2")),
        (" 6 , 02", ("6", "2")),
    ],
)
def test_visible_devices_as_ray_hands_them(value: str | None, visible: tuple[str, ...] | None) -> None:
    for variable, names in ((ASCEND, False), (CUDA, True)):
        assert parse_visible_devices(variable, value, names_allowed=names) == visible


def test_cuda_takes_names() -> None:
    value = "GPU-9f2a0b1c-0000-1111-2222-333344445555,MIG-1b"
    assert parse_visible_devices(CUDA, value, names_allowed=True) == tuple(value.split(","))
    with pytest.raises(UserError, match=f"{ASCEND}: .*which is no device; it takes numbers, comma"):
        parse_visible_devices(ASCEND, value, names_allowed=False)


@pytest.mark.parametrize(("value", "message"), [("0,,1", "has '',"), ("-1", "'-1'"), ("3,03", "twice"), ("0;1", "0;1")])
def test_wrong_visible_devices_are_refused(value: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_visible_devices(CUDA, value, names_allowed=True)


def test_logical_numbers_become_physical_ones() -> None:
    assert [physical_device(ASCEND, ("6", "2"), i) for i in (0, 1)] == ["6", "2"]
    assert physical_device(ASCEND, None, 3) == "3"
    with pytest.raises(UserError, match=r"ASCEND_RT_VISIBLE_DEVICES: device 1 .* sees 1 \(6\)"):
        physical_device(ASCEND, ("6",), 1)
    with pytest.raises(UserError, match=r"sees 0 \(none\)"):
        physical_device(ASCEND, (), 0)


# The checksum

MASK = (1 << 64) - 1


def splitmix(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference(data: bytes, row: int) -> int:
    """The definition in plain Python integers."""
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data) // 4 * 4, 4)]
    value = 0
    for start in range(0, len(words), row):
        part = words[start : start + row]
        # splitmix64 adds the golden ratio before it mixes: state i * golden gives the weight of place i.
        weights = [splitmix((i * 0x9E3779B97F4A7C15) & MASK) | 1 for i in range(len(part))]
        sums = sum(w * m for w, m in zip(part, weights, strict=True)) & MASK
        value = (value + splitmix(sums ^ splitmix(start // row))) & MASK
    tail = int.from_bytes(data[len(data) // 4 * 4 :], "little")
    return splitmix(splitmix(value ^ tail) ^ len(data))


@settings(max_examples=60)
@given(data=st.binary(max_size=500), row=st.sampled_from([1, 4, 7, 64]))
def test_the_checksum_is_its_definition(data: bytes, row: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum, "_ROW", row)
        patch.setattr(checksum, "_ROWS_AT_ONCE", 3)
        checksum._weights.cache_clear()
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        assert device_checksum(tensor) == reference(data, row)
        if data:
            odd = torch.frombuffer(bytearray(b"x" + data), dtype=torch.uint8)[1:]
            assert device_checksum(odd) == reference(data, row)
    checksum._weights.cache_clear()


def test_the_checksum_sees_every_change_and_the_order() -> None:
    rows = checksum._ROW * 17 + 5
    words = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, rows, dtype=np.int32))
    seen = {device_checksum(words)}
    assert device_checksum(words.view(torch.float32)) in seen
    assert device_checksum(words.clone()) in seen
    for place in (0, 1, checksum._ROW - 1, checksum._ROW, 16 * checksum._ROW, rows - 1):
        for bit in (0, 31):
            changed = words.clone()
            changed[place] ^= 1 << bit if bit < 31 else -(2**31)
            seen.add(device_checksum(changed))
    swapped = words.clone()
    swapped[[0, checksum._ROW]] = words[[checksum._ROW, 0]]
    seen |= {device_checksum(swapped), device_checksum(words.roll(1)), device_checksum(words[:-1])}
    seen |= {device_checksum(torch.zeros(n, dtype=torch.uint8)) for n in (0, 1, 4, 8)}
    assert len(seen) == 1 + 12 + 3 + 4


def test_checksums_that_end_together_are_those_that_end_alone() -> None:
    random = np.random.default_rng(2)
    sizes = [0, 3, 4, 4 * checksum._ROW, 12 * checksum._ROW + 5, 4, 0, 1001]
    tensors = [torch.from_numpy(random.integers(0, 256, size, dtype=np.uint8)) for size in sizes]
    together = checksum.end_checksums([checksum.begin_checksum(tensor) for tensor in tensors])
    assert together == [device_checksum(tensor) for tensor in tensors]
    assert checksum.end_checksums([]) == []


def test_a_begun_checksum_is_of_what_was_there_then() -> None:
    data = torch.zeros(1001, dtype=torch.uint8)
    begun, before = checksum.begin_checksum(data), device_checksum(data)
    data.fill_(7)
    assert checksum.end_checksums([begun]) == [before] != [device_checksum(data)]


@pytest.fixture
def small_sheets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checksum, "SHEET_BYTES", 256)
    checksum._sheet.cache_clear()
    yield
    checksum._sheet.cache_clear()


@pytest.mark.usefixtures("small_sheets")
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=9),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]),
    data=st.data(),
)
def test_tensors_summed_side_by_side_and_one_by_one_have_one_checksum(
    sizes: list[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    random = torch.Generator().manual_seed(sum(sizes))
    tensors = [torch.randint(0, 200, (size,), generator=random).float() for size in sizes]
    tensors = [tensor.view(2, -1).t() if len(tensor) % 2 == 0 else tensor for tensor in tensors]
    sheets = checksum.Sheets(tensors, dtype)

    def one_by_one() -> int:
        growing = checksum.GrowingSheets()
        for tensor in tensors:
            rounded = tensor.to(dtype, copy=True)
            growing.add(rounded)
            rounded.zero_()
        return checksum.end_checksums([growing.begin()])[0]

    [before] = checksum.end_checksums([sheets.begin()])
    assert one_by_one() == before
    changed = tensors[data.draw(st.integers(0, len(tensors) - 1))]
    if changed.numel():
        changed[data.draw(st.integers(0, len(changed) - 1))] += 30
        assert checksum.end_checksums([sheets.begin()]) == [one_by_one()] != [before]


@pytest.mark.usefixtures("small_sheets")
def test_tensors_that_changed_places_have_another_checksum() -> None:
    one, other = torch.arange(9.0), torch.arange(9.0) + 5
    large = [torch.full((301,), value, dtype=torch.uint8) for value in range(9)]
    seen = {
        checksum.end_checksums([checksum.Sheets(tensors, tensors[0].dtype).begin()])[0]
        for tensors in ([one, other], [other, one], [one], large, large[::-1], [*large[:-1], large[-1] + 1])
    }
    assert len(seen) == 6


def test_the_checksum_is_over_row_major_bytes() -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    assert device_checksum(tensor.t()) == device_checksum(tensor.t().contiguous()) != device_checksum(tensor)
    assert device_checksum(tensor.bfloat16()) == device_checksum(tensor.bfloat16().view(torch.int16))


class Saturating(TorchDispatchMode):
    """Products and sums of 64-bit integers end at the type's bounds, as floats would carry them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mul.Tensor, torch.ops.aten.sum.dim_IntList) and result.dtype == torch.int64:
            floats = [each.double() if isinstance(each, torch.Tensor) else each for each in args]
            return self.bounded(func(*floats, **(kwargs or {})))
        return result

    def bounded(self, floats: torch.Tensor) -> torch.Tensor:
        inside = floats.abs() < 2.0**62
        return torch.where(inside, floats, 0.0).to(torch.int64) + torch.where(inside, 0, 2**63 - 1)


class Rounding(Saturating):
    """Device that carries integers as if in single precision."""

    def bounded(self, floats: torch.Tensor) -> torch.Tensor:
        return super().bounded(floats.float().double())


@pytest.fixture
def another_device() -> Iterator[None]:
    """Find the form that a device takes anew."""
    checksum._form.cache_clear()
    yield
    checksum._form.cache_clear()


@pytest.mark.usefixtures("another_device")
def test_a_device_whose_integers_do_not_wrap_around_has_the_same_checksum() -> None:
    words = torch.from_numpy(np.random.default_rng(1).integers(-(2**31), 2**31, checksum._ROW * 17 + 5, dtype=np.int32))
    right = device_checksum(words)
    checksum._form.cache_clear()
    with Saturating():
        assert not checksum.wraps_around(words.device)
        assert device_checksum(words) == right


@pytest.mark.usefixtures("another_device")
def test_a_device_whose_integers_are_wrong_is_refused() -> None:
    with Rounding(), pytest.raises(ArithmeticError, match="cpu: sums of 64-bit integers are wrong there"):
        device_checksum(torch.arange(100))


# The exported tensor


def rebuild(*values: Any) -> torch.Tensor:
    tensor = torch.zeros(1)
    tensor.values = values  # type: ignore[attr-defined]
    return tensor


VALUES = (
    torch.Tensor,
    torch.Size([2, 3]),
    (3, 1),
    4,
    torch.storage.TypedStorage,
    torch.bfloat16,
    5,
    b"\x00\xff",
    12,
    8,
)
VALUES += (False, b"count", 1, b"event", True)


def test_an_exported_tensor_travels_with_the_importers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (rebuild, VALUES))
    message = export_tensor(torch.zeros(1), rebuild, "host:npu:3")
    assert json.loads(message)["on"] == "host:npu:3"
    got = import_tensor(message, rebuild, "host:npu:3", 0).values  # type: ignore[attr-defined]
    assert got == (*VALUES[:6], 0, *VALUES[7:])
    with pytest.raises(ValueError, match="on host:npu:3, this process uses host:npu:4"):
        import_tensor(message, rebuild, "host:npu:4", 0)


def test_an_export_of_another_shape_or_of_hooked_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (rebuild, VALUES[:14]))
    with pytest.raises(RuntimeError, match="with 14 values; known here is rebuild with 15"):
        export_tensor(torch.zeros(1), rebuild, "host:npu:3")
    with pytest.raises(RuntimeError, match="as rebuild with"):
        export_tensor(torch.zeros(1), import_tensor, "host:npu:3")

    def refuse(tensor: torch.Tensor) -> Any:
        raise RuntimeError("invalid argument")

    monkeypatch.setattr(reductions, "reduce_tensor", refuse)
    with pytest.raises(RuntimeError, match=r"cannot be exported \(invalid argument\).*staging"):
        export_tensor(torch.zeros(1), rebuild, "host:npu:3")
