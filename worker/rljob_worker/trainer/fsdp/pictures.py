"""The tower of a model that sees, run once for each picture of a row however many samples have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rljob_worker.models.hf_model import HfModel


class _Seen(Protocol):
    """Result of transformers' `get_image_features`."""

    pooler_output: tuple[Tensor, ...]
    """[tokens, h] of each picture."""
    deepstack_features: list[Tensor] | None
    """[tokens of all, h] of some of the tower's layers; only Qwen3-VL has them."""


def see_once(model: HfModel, places: Callable[[], Sequence[int]]) -> None:
    """Have a model compute the features of distinct pictures, and put each where the row has it.

    Args:
        model: whose forward pass gets distinct pictures.
        places: which of them are in the row, in order.
    """
    inner = cast("_Inner", model.get_submodule("model"))
    features = inner.get_image_features

    def repeated(pixel_values: Tensor, image_grid_thw: Tensor, **settings: object) -> _Seen:
        seen, row = features(pixel_values, image_grid_thw, **settings), places()
        deep = getattr(seen, "deepstack_features", None)
        if deep is not None:
            sizes = [len(part) for part in seen.pooler_output]
            seen.deepstack_features = [_in_row(layer.split(sizes), row) for layer in deep]
        seen.pooler_output = tuple(seen.pooler_output[number] for number in row)
        return seen

    inner.get_image_features = repeated


class _Inner(Protocol):
    get_image_features: Callable[..., _Seen]


def _in_row(parts: Sequence[Tensor], row: Sequence[int]) -> Tensor:
    return torch.cat([parts[number] for number in row])
