"""Pictures as vLLM's engine core takes them: processed before, and not by it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from rljob_worker.models.pictures import PictureFacts
from rljob_worker.types import Picture

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem

    Features = list[MultiModalFeatureSpec] | None

_KEPT = 64
"""Pictures whose pixels are kept: requests of one prompt come side by side."""


class PictureFeatures:
    """Makes a request's features of its pictures, by the same function as trainers do.

    Args:
        facts: the model's.
    """

    def __init__(self, facts: PictureFacts) -> None:
        self._facts = facts
        self._items: OrderedDict[str, MultiModalKwargsItem] = OrderedDict()

    def of(self, prompt: Sequence[int], pictures: Sequence[Picture]) -> list[MultiModalFeatureSpec]:
        """Features of a prompt's pictures, which are found again by their digests.

        Raises:
            ValueError: the prompt has places for other pictures.
        """
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        places = self._facts.places(np.array(prompt, dtype=np.int64), [picture.grid for picture in pictures])
        return [
            MultiModalFeatureSpec(
                data=self._item(picture),
                modality="image",
                identifier=picture.digest,
                mm_position=PlaceholderRange(offset=first, length=count),
                mm_hash=picture.digest,
            )
            for picture, (first, count) in zip(pictures, places, strict=True)
        ]

    def _item(self, picture: Picture) -> MultiModalKwargsItem:
        from transformers import BatchFeature
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

        if picture.digest in self._items:
            self._items.move_to_end(picture.digest)
            return self._items[picture.digest]
        # Torch's tensors can be written, arrays that came through Ray cannot.
        pixels = self._facts.pixel_values(torch.from_numpy(picture.patches.copy()))
        grids = torch.tensor([picture.grid], dtype=torch.int64)
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
        values = BatchFeature({"pixel_values": pixels, "image_grid_thw": grids})
        item = MultiModalKwargsItems.from_hf_inputs(values, fields)["image"][0]
        self._items[picture.digest] = item
        while len(self._items) > _KEPT:
            self._items.popitem(last=False)
        return item
