"""Tensors of a Hugging Face checkpoint as views of the parameters of transformers' model.

transformers fuses and renames parameters (a layer's experts are one), and files on the hub have them one by one. The
place of each follows from its own mapping back, applied to parameters without memory: a result that shares the storage
of a parameter is a view of it. A folder's own headers then decide whether that is right.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from rljob_worker.errors import UserError
from rljob_worker.tensor_slice import TensorSlice, storage_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DERIVED = "rotary_emb.inv_freq"
"""Old checkpoints store this buffer, which follows from the config."""
_MODEL, _TOWER = "model.", "visual."


@dataclass(frozen=True, slots=True)
class RowsView:
    """Place of a part of a checkpoint's tensor in a parameter's consecutive rows; in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """From the first element of the first of the rows."""

    def of(self, rows: Tensor) -> Tensor:
        """The view, of a contiguous tensor of the rows."""
        return rows.as_strided(self.shape, self.stride, rows.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """A tensor of a checkpoint as a view of a whole, contiguous parameter; in elements."""

    name: str
    parameter: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    row: int
    """In one row of the parameter."""

    @property
    def dim(self) -> int | None:
        """The dimension that runs over the parameter's rows; None where all of the tensor is inside of one row.

        Raises:
            UserError: neither.
        """
        outer = [d for d, n in enumerate(self.shape) if n > 1 and self.stride[d] >= self.row]
        inner = sum((n - 1) * s for d, (n, s) in enumerate(zip(self.shape, self.stride)) if d not in outer)
        if (
            len(outer) > 1
            or any(self.stride[d] != self.row for d in outer)
            or self.offset % self.row + inner >= self.row
        ):
            raise UserError(
                f"tensor {self.name} is no range of rows of {self.parameter}, nor in one of them: shape {self.shape}, "
                f"strides {self.stride} from element {self.offset}"
            )
        return outer[0] if outer else None

    def of(self, parameter: Tensor) -> Tensor:
        """The tensor, of a whole parameter."""
        return parameter.contiguous().as_strided(self.shape, self.stride, self.offset)

    def rows(self, first: int, count: int) -> tuple[TensorSlice, RowsView] | None:
        """The part that `count` rows of the parameter from `first` on have, and where they have it; None: none."""
        dim, start = self.dim, self.offset // self.row
        length = 1 if dim is None else self.shape[dim]
        low, high = max(first, start), min(first + count, start + length)
        if low >= high:
            return None
        offset = (low - first) * self.row + self.offset % self.row
        if dim is None or high - low == length:
            return TensorSlice(self.name, self.shape, None, 0, self.shape[0]), RowsView(self.shape, self.stride, offset)
        place = TensorSlice(self.name, self.shape, dim, low - start, high - low)
        return place, RowsView(place.shape, self.stride, offset)


def checkpoint_views(model: nn.Module) -> list[CheckpointView]:
    """Every tensor of a checkpoint of a model whose parameters are on meta, in the model's order.

    Raises:
        UserError: one is no view of a parameter.
    """
    from transformers.core_model_loading import revert_weight_conversion

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    owners = {storage_of(parameter): name for name, parameter in parameters.items()}
    found: Mapping[str, Tensor] = revert_weight_conversion(cast("PreTrainedModel", model), dict(parameters))
    views = []
    for name, tensor in found.items():
        owner = owners.get(storage_of(tensor))
        if owner is None:
            raise UserError(f"tensor {name} of a checkpoint would be a copy, not a view, of the model's parameters")
        row = math.prod(parameters[owner].shape[1:])
        views.append(
            CheckpointView(name, owner, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), row)
        )
    order = {name: index for index, name in enumerate(parameters)}
    return sorted(views, key=lambda view: (order[view.parameter], view.offset))


def called_as(views: Sequence[CheckpointView], names: Container[str]) -> list[CheckpointView]:
    """The views by the names that a folder's files have: towers were once no part of `model`."""
    found = []
    for view in views:
        older = view.name.removeprefix(_MODEL)
        is_older = older.startswith(_TOWER) and view.name not in names and older in names
        found.append(replace(view, name=older) if is_older else view)
    return found


def check_headers(
    views: Sequence[CheckpointView], shapes: Mapping[str, tuple[int, ...]], where: str, *, may_have: Sequence[str] = ()
) -> None:
    """Hold the views against what a folder's files have.

    Args:
        views: of all tensors.
        shapes: name -> shape of the tensors in the files.
        where: the folder, for the error.
        may_have: names of tensors that may be there as well.

    Raises:
        UserError: a tensor is missing, has another shape, or is none of the model's.
    """
    expected = {view.name: view.shape for view in views}
    problems = [f"tensor {name} is missing" for name in expected if name not in shapes]
    problems += [
        f"tensor {name} has shape {shapes[name]}, the model's is {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    problems += [
        f"tensor {name} is not part of the model"
        for name in shapes
        if name not in expected and name not in may_have and not name.endswith(DERIVED)
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"{where}: " + "; ".join(problems[:5]) + more)
