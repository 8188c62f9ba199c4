"""A 64-bit checksum made of integer operations that every device has, computed where the tensor is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps

import numpy as np
import numpy.typing as npt
import torch

Form = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From words int32 [n] and a row's weights int64 [_ROW], the rows' sums int64 [rows, limbs]."""
_ROW = 1 << 18
"""32-bit words that share one table of weights (2 MiB)."""
_ROWS_AT_ONCE = 16
"""Bounds the 64-bit temporaries to 32 MiB each."""
SHEET_BYTES = 4 * 2**20
"""Smaller tensors are summed side by side; kept for the life of the process."""
_LIMBS = 4
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class BegunChecksum:
    """A checksum whose computation on a device has begun: `end_checksums` waits for it."""

    rows: torch.Tensor
    """Sums of the rows, int64 [rows, limbs]."""
    tail: torch.Tensor
    """uint8 [0 to 3] after the last word; of several tensors, theirs one after the other."""
    nbytes: int


class Sheets:
    """Checksum of several tensors' bytes, prepared once; it costs a few operators, however many the tensors are.

    The tensors are laid out in sheets in their order: as many as fit into `SHEET_BYTES`, each at a multiple of 4 bytes,
    or one that is larger. The sums of the sheets' rows follow each other. Sizes alone decide what is in which
    sheet, so that two sides of the same pieces find the same.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        """Prepare the checksum of what these tensors (of one device) hold at each `begin`, as rounded to `dtype`."""
        self._dtype = dtype
        self._nbytes = sum(_room(tensor, dtype) for tensor in tensors)
        self._sheets = [_Sheet(sheet, dtype) for sheet in _in_sheets(tensors, dtype)]

    def begin(self) -> BegunChecksum:
        """Have the device compute it; `end_checksums` waits for it."""
        return together([sheet.begin() for sheet in self._sheets], self._nbytes)


class GrowingSheets:
    """`Sheets` of tensors that come one by one and may change as soon as they were added."""

    def __init__(self) -> None:
        self._rows: list[BegunChecksum] = []
        self._sheet: torch.Tensor | None = None
        self._filled = self._nbytes = 0

    def add(self, tensor: torch.Tensor) -> None:
        """The next one."""
        room = _room(tensor, tensor.dtype)
        self._nbytes += room
        if self._filled + room > SHEET_BYTES:
            self._end_sheet()
        if room > SHEET_BYTES:
            self._rows.append(begin_checksum(tensor))
            return
        if self._sheet is None:
            self._sheet = torch.zeros(SHEET_BYTES, dtype=torch.uint8, device=tensor.device)
        place = self._sheet[self._filled : self._filled + tensor.nbytes]
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._filled += room

    def begin(self) -> BegunChecksum:
        """See `Sheets`."""
        self._end_sheet()
        return together(self._rows, self._nbytes)

    def _end_sheet(self) -> None:
        if self._sheet is not None and self._filled:
            self._rows.append(begin_checksum(self._sheet[: self._filled]))
            self._sheet, self._filled = None, 0


class _Sheet:
    """Tensors that are put side by side to be summed, or one that is summed where it is if it can."""

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        self._tensors, self._dtype = list(tensors), dtype
        nbytes = tensors[0].numel() * dtype.itemsize
        self._alone = len(tensors) == 1 and (nbytes > SHEET_BYTES or nbytes % 4 == 0)
        if self._alone:
            return
        rooms = [_room(tensor, dtype) for tensor in tensors]
        self._bytes = _sheet(tensors[0].device)[: sum(rooms)]
        self._places, self._gaps = [], []
        begin = 0
        for tensor, room in zip(tensors, rooms, strict=True):
            nbytes = tensor.numel() * dtype.itemsize
            self._places.append(self._bytes[begin : begin + nbytes].view(dtype).view(tensor.shape))
            if nbytes < room:
                self._gaps.append(self._bytes[begin + nbytes : begin + room])
            begin += room

    def begin(self) -> BegunChecksum:
        """Sums of the rows, as of what the tensors hold now."""
        if self._alone:
            return begin_checksum(self._tensors[0].to(self._dtype))
        torch._foreach_copy_(self._places, self._tensors)
        if self._gaps:
            torch._foreach_zero_(self._gaps)
        return begin_checksum(self._bytes)


@lru_cache(maxsize=8)
def _sheet(device: torch.device) -> torch.Tensor:
    return torch.zeros(SHEET_BYTES, dtype=torch.uint8, device=device)


def together(begun: Sequence[BegunChecksum], nbytes: int) -> BegunChecksum:
    """One checksum of parts of `nbytes` in all, whose rows follow each other."""
    if len(begun) == 1:
        return begun[0]
    if not begun:
        return begin_checksum(torch.empty(0, dtype=torch.uint8))
    tails = torch.cat([each.tail for each in begun])
    return BegunChecksum(torch.cat([each.rows for each in begun]), tails, nbytes)


def _in_sheets(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Iterator[list[torch.Tensor]]:
    sheet: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        room = _room(tensor, dtype)
        if sheet and filled + room > SHEET_BYTES:
            yield sheet
            sheet, filled = [], 0
        sheet.append(tensor)
        filled += room
    if sheet:
        yield sheet


def _room(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    return -(-tensor.numel() * dtype.itemsize // 4) * 4


def device_checksum(tensor: torch.Tensor) -> int:
    """Checksum of the elements' bytes in row-major order; see `begin_checksum`."""
    return end_checksums([begin_checksum(tensor)])[0]


def begin_checksum(tensor: torch.Tensor) -> BegunChecksum:
    """Checksum of the bytes that a tensor's elements have in row-major order; dtype and shape are not part of it.

    Each row of 32-bit words w becomes sum_i m_i * w_i mod 2**64 with fixed 64-bit weights m: multilinear hashing, in
    which two rows that differ collide with a chance below 2**-32 (Lemire and Kaser, Strongly universal string hashing
    is fast, 2014). Integer sums do not depend on their order, so the result is the same on every device and at every
    run, also where a device's integers do not wrap around (`_by_limbs`). The host mixes each row's sum with its number
    by splitmix64, adds them up modulo 2**64, and folds in the 0 to 3 bytes after the last word and the number of bytes.

    Raises:
        ArithmeticError: the device's integers are not to be trusted.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(data) // 4 * 4
    tail = data[whole:] if whole == len(data) else data[whole:].clone()
    words = data[:whole].clone() if data.storage_offset() % 4 else data[:whole]
    return BegunChecksum(_row_sums(words), tail, len(data))


def end_checksums(begun: Sequence[BegunChecksum]) -> list[int]:
    """Checksums of one device, which is waited for once."""
    if not begun:
        return []
    lengths = [len(each.rows) for each in begun]
    ends = np.cumsum(lengths)
    rows = _folded(torch.cat([each.rows for each in begun]))
    numbers = np.arange(len(rows)) - np.repeat(ends - lengths, lengths)
    sums = np.concatenate(
        [np.zeros(1, np.uint64), _mixed(rows ^ _mixed(numbers.astype(np.uint64))).cumsum(dtype=np.uint64)]
    )
    return [
        _whole(int(sums[end]) - int(sums[end - length]), each)
        for end, length, each in zip(ends, lengths, begun, strict=True)
    ]


def _row_sums(data: torch.Tensor) -> torch.Tensor:
    form = _form(data.device)
    if not len(data):
        return data.new_empty((0, _LIMBS if form is _by_limbs else 1), dtype=torch.int64)
    return form(data.view(torch.int32), _weights(data.device))


def _whole(rows: int, begun: BegunChecksum) -> int:
    tail = bytes(begun.tail.tolist()) if len(begun.tail) else b""
    value = (rows & _MASK) ^ int.from_bytes(tail[:8], "little")
    for start in range(8, len(tail), 8):
        value = _mix(value) ^ int.from_bytes(tail[start : start + 8], "little")
    return _mix(_mix(value) ^ begun.nbytes)


def _in_steps(weighted: Form) -> Form:
    """A form for rows of one length, for words of any number: as many rows at once as the temporaries' bound allows."""

    @wraps(weighted)
    def sums(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        full = words.numel() // _ROW
        found: list[torch.Tensor] = []
        for start in range(0, full, _ROWS_AT_ONCE):
            rows = words[start * _ROW : min(start + _ROWS_AT_ONCE, full) * _ROW].view(-1, _ROW)
            found.append(weighted(rows, weights))
        if rest := words.numel() - full * _ROW:
            found.append(weighted(words[full * _ROW :].view(1, -1), weights[:rest]))
        return torch.cat(found)

    return sums


@_in_steps
def _wrapping(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """int64 [rows, 1]: sum_i m_i * w_i of each row, modulo 2**64, where the device's integers wrap around."""
    return (words.to(torch.int64) * weights).sum(dim=1, keepdim=True)


@_in_steps
def _by_limbs(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """int64 [rows, 4]: the same sum as sum_j 2**(16 j) * limbs_j, from products that stay below 2**50 in magnitude.

    For devices whose 64-bit products or sums do not wrap around. w = w_1 * 2**16 + w_0 with a signed w_1, m by four
    limbs of 16 bits; what would be multiplied by 2**64 falls away.
    """
    low, high = (words & 0xFFFF).to(torch.int64), (words >> 16).to(torch.int64)
    parts = [((weights >> 16 * j) & 0xFFFF) for j in range(_LIMBS)]
    sums = [(low * part).sum(dim=1) for part in parts]
    for j, part in enumerate(parts[:-1]):
        sums[j + 1] = sums[j + 1] + (high * part).sum(dim=1)
    return torch.stack(sums, dim=1)


def _in_one_pass(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """int64 [rows, 1]: as `_wrapping`, ten times as fast, which reads and writes 64-bit temporaries."""
    from rljob_worker.devices.checksum_kernel import row_sums

    return row_sums(words, weights).view(-1, 1)


def _folded(sums: torch.Tensor) -> npt.NDArray[np.uint64]:
    """Each row of [rows, limbs] as one integer modulo 2**64."""
    limbs = sums.cpu().numpy().view(np.uint64)
    return (limbs << np.arange(0, 16 * limbs.shape[1], 16, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)


def wraps_around(device: torch.device) -> bool:
    """Whether the device computes the checksum in its fast form."""
    return _form(device) is not _by_limbs


@lru_cache(maxsize=8)
def _form(device: torch.device) -> Form:
    """The fastest form whose result on the device is that of plain integers.

    Raises:
        ArithmeticError: none is.
    """
    words = np.array([1, -1, 2**31 - 1, -(2**31), 0x12345678, -0x789ABCDE + 2**31, 65535, -65536] * 512, dtype=np.int32)
    weights = _weights(device)
    words = words[: len(weights)]
    pairs = zip(words.tolist(), weights[: len(words)].tolist(), strict=True)
    right = sum(word * weight for word, weight in pairs) & _MASK
    for form in (_in_one_pass, _wrapping, _by_limbs) if device.type == "cuda" else (_wrapping, _by_limbs):
        if int(_folded(form(torch.from_numpy(words).to(device), weights))[0]) == right:
            return form
    raise ArithmeticError(
        f"{device}: sums of 64-bit integers are wrong there, and the weight sync could not be verified"
    )


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    """int64 [_ROW], odd: splitmix64 of 1, 2, 3, ..."""
    states = np.arange(_ROW, dtype=np.uint64) * np.uint64(_GOLDEN)
    return torch.from_numpy((_mixed(states) | np.uint64(1)).view(np.int64)).to(device)


def _mix(x: int) -> int:
    """`_mixed` of one, which numpy takes thirty times as long for."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's next outputs from states `x`."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
