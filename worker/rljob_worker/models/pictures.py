"""Pictures as models of the Qwen-VL family take them: patches, their tokens and their positions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rljob_worker.errors import UserError
from rljob_worker.models.facts import PICTURE_MODELS, read_hf_config
from rljob_worker.models.json_files import read_json_object
from rljob_worker.types import BatchPictures, IntArray, Picture

if TYPE_CHECKING:
    from torch import Tensor

IMAGE_TOKEN = "<|image_pad|>"
MARK = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
"""A picture in the text of a prompt, as the family's chat templates write it."""
PICTURE_TOKENS = ("<|vision_start|>", "<|vision_end|>", IMAGE_TOKEN, "<|video_pad|>")
"""Tokens of the family's tokenizers; none of them is ever sampled."""
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files of which the first that is there has the image processor's settings."""
_TOKEN_KEYS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_MAX_SIDES = 200
"""Bound of the longer side over the shorter: the image processors refuse more."""


def tokens_of(grid: Sequence[int], merge: int) -> int:
    """Tokens of a picture of so many patches (frames, rows, columns), of which `merge` of a side become one."""
    frames, rows, columns = grid
    return frames * rows * columns // merge**2


@dataclass(frozen=True, slots=True)
class PictureFacts:
    """Facts about pictures in a checkpoint's files.

    Attributes:
        image_token: id of the token that stands for a picture's features, once for each.
        placeholders: ids that stand for pictures or frame them: none of them may be sampled.
        merge: patches of a side that become one token.
        patch: pixels of a patch's side.
        frames: pictures that a patch spans: a still one stands for all of them.
        mean: of each channel, in units of a pixel's byte.
        std: the same.
    """

    image_token: int
    placeholders: tuple[int, ...]
    merge: int
    patch: int
    frames: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of_folder(cls, folder: str | Path) -> PictureFacts:
        """Read config.json and the image processor's file; UserError where one lacks what is needed, or they differ."""
        where = Path(folder) / "config.json"
        config = read_hf_config(folder)
        if config.get("model_type") not in PICTURE_MODELS:
            kind, known = config.get("model_type"), " and ".join(PICTURE_MODELS)
            raise UserError(f"{where}: model_type {kind!r} takes no pictures here; {known} do")
        tokens = {key: config.get(key) for key in _TOKEN_KEYS}
        # Older configs have no end token of their own.
        missing = [key for key in _TOKEN_KEYS[:3] if type(tokens[key]) is not int]
        if missing:
            raise UserError(f"{where}: has no {', '.join(missing)}")
        settings, path = processor_settings(folder)
        vision = config.get("vision_config")
        if isinstance(vision, Mapping):
            for ours, theirs in (
                ("merge_size", "spatial_merge_size"), ("patch_size", "patch_size"),
                ("temporal_patch_size", "temporal_patch_size"),
            ):  # fmt: skip
                if vision.get(theirs, settings[ours]) != settings[ours]:
                    raise UserError(f"{path}: {ours} is {settings[ours]}, and {where} has {theirs} {vision[theirs]}")
        scale = settings["rescale_factor"]
        return cls(
            image_token=cast(int, tokens["image_token_id"]),
            placeholders=tuple(sorted({token for token in tokens.values() if type(token) is int})),
            merge=settings["merge_size"],
            patch=settings["patch_size"],
            frames=settings["temporal_patch_size"],
            mean=tuple(value / scale for value in settings["image_mean"]),
            std=tuple(value / scale for value in settings["image_std"]),
        )

    def tokens(self, grid: Sequence[int]) -> int:
        """That a picture of so many patches (frames, rows, columns) becomes."""
        return tokens_of(grid, self.merge)

    def pixel_values(self, patches: Tensor) -> Tensor:
        """Normalise patches [p, D] uint8 to [p, D] float32; the engine and the trainer both do it here."""
        # Commands that only look at manifests have the names above, and do not wait for torch.
        import torch

        mean = torch.tensor(self.mean, dtype=torch.float32, device=patches.device)[None, :, None]
        std = torch.tensor(self.std, dtype=torch.float32, device=patches.device)[None, :, None]
        channels = patches.float().view(len(patches), len(self.mean), -1)
        return ((channels - mean) / std).view(len(patches), -1)

    def places(self, tokens: IntArray, grids: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Find pictures among a sequence's tokens: first token and number of tokens of each.

        Raises:
            ValueError: the sequence has placeholders for another number of features.
        """
        found = np.flatnonzero(tokens == self.image_token)
        counts = [self.tokens(grid) for grid in grids]
        starts = np.cumsum([0, *counts])
        if starts[-1] != len(found):
            raise ValueError(f"pictures of {starts[-1]} tokens, and {len(found)} places for them in the prompt")
        places = []
        for start, count in zip(starts[:-1].tolist(), counts):
            first = int(found[start])
            if int(found[start + count - 1]) != first + count - 1:
                raise ValueError("the places of a picture are not side by side in the prompt")
            places.append((first, count))
        return places

    def positions(self, tokens: IntArray, grids: Sequence[Sequence[int]]) -> IntArray:
        """Positions [3, n] (time, row, column) of a sequence's tokens, as `get_rope_index` of transformers has them.

        Text goes on by one in all three; a picture's tokens have their row and column in it, and what follows goes on
        after the largest of them.
        """
        found = np.empty((3, len(tokens)), dtype=np.int64)
        done = following = 0
        for (first, count), grid in zip(self.places(tokens, grids), grids):
            text = first - done
            found[:, done:first] = following + np.arange(text)
            following += text
            shape = (grid[0], grid[1] // self.merge, grid[2] // self.merge)
            found[:, first : first + count] = following + np.indices(shape).reshape(3, -1)
            following += max(shape)
            done = first + count
        found[:, done:] = following + np.arange(len(tokens) - done)
        return found


def processor_settings(folder: str | Path) -> tuple[dict[str, Any], Path]:
    """The image processor's settings, of which those that are used here are checked, and their file.

    Raises:
        UserError: there is no such file, or it lacks one; or pixels would be resized in another colour order.
    """
    for name in PROCESSOR_FILES:
        path = Path(folder) / name
        if path.is_file():
            break
    else:
        raise UserError(f"{folder}: has none of {', '.join(PROCESSOR_FILES)}: nothing says how pictures are taken")
    found = read_json_object(path)
    inner = found.get("image_processor")
    settings: dict[str, Any] = dict(inner) if isinstance(inner, Mapping) else dict(found)
    settings.setdefault("rescale_factor", 1 / 255)
    for key in ("patch_size", "merge_size", "temporal_patch_size"):
        if key not in settings:
            raise UserError(f"{path}: has no {key}")
        if type(settings[key]) is not int or settings[key] < 1:
            raise UserError(f"{path}: {key} is {settings[key]!r}: a whole number above 0 is needed")
    for key in ("image_mean", "image_std"):
        value = settings.get(key)
        if not isinstance(value, list) or len(value) != 3 or not all(map(_is_number, value)):
            raise UserError(f"{path}: {key} is {value!r}, no number for each of three channels")
    if not all(value > 0 for value in settings["image_std"]):
        raise UserError(f"{path}: image_std is {settings['image_std']!r}: pixels are divided by numbers above 0")
    if not _is_number(settings["rescale_factor"]) or settings["rescale_factor"] <= 0:
        raise UserError(f"{path}: rescale_factor is {settings['rescale_factor']!r}: a number above 0 is needed")
    if settings.get("do_rescale") is False or settings.get("do_normalize") is False:
        raise UserError(f"{path}: do_rescale and do_normalize must not be false")
    return settings, path


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_sides(width: int, height: int) -> str:
    """Say what is wrong with a picture's size; empty where nothing is."""
    if min(width, height) < 1:
        return f"is {width} x {height} pixels"
    if max(width, height) > _MAX_SIDES * min(width, height):
        return f"is {width} x {height} pixels: one side is more than {_MAX_SIDES} times the other"
    return ""


def batch_pictures(
    streams: Sequence[IntArray], pictures: Sequence[Sequence[Picture]], facts: PictureFacts
) -> BatchPictures:
    """The pictures of some streams, each picture once.

    Args:
        streams: N arrays of tokens.
        pictures: of each stream.
        facts: the model's.
    """
    numbers: dict[str, int] = {}
    distinct: list[Picture] = []
    owned = []
    for of_stream in pictures:
        for picture in of_stream:
            if numbers.setdefault(picture.digest, len(distinct)) == len(distinct):
                distinct.append(picture)
            owned.append(numbers[picture.digest])
    width = 3 * facts.frames * facts.patch**2
    return BatchPictures(
        patches=np.concatenate([np.empty((0, width), np.uint8), *(one.patches for one in distinct)]),
        grids=np.array([one.grid for one in distinct], dtype=np.int64).reshape(-1, 3),
        counts=np.array([len(of_stream) for of_stream in pictures], dtype=np.int64),
        numbers=np.array(owned, dtype=np.int64),
        positions=np.concatenate(
            [facts.positions(tokens, [p.grid for p in of_stream]) for tokens, of_stream in zip(streams, pictures)],
            axis=1,
        ),
    )
