"""The image processor of a model with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rljob_worker.errors import UserError
from rljob_worker.host.files import write_whole

_MEAN, _STD = [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]
_LEAST, _MOST = 2, 64
"""Tokens along a side of the smallest and the largest picture."""
_PROCESSORS = {
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
}
"""Names of transformers' classes: of the whole, and of videos, which vLLM asks for where none comes."""


def save_processor(config: Mapping[str, object], folder: Path) -> None:
    """Write processor_config.json for a model of this config, with the sizes of its tower.

    Raises:
        UserError: the config has no sizes.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise UserError("spec.model.random.config.vision_config: is missing: the sizes of what sees")
    sizes = {
        "patch_size": vision.get("patch_size", 14),
        "merge_size": vision.get("spatial_merge_size", 2),
        "temporal_patch_size": vision.get("temporal_patch_size", 2),
    }
    for name, size in sizes.items():
        if not isinstance(size, int) or not 1 <= size <= 256:
            raise UserError(f"spec.model.random.config.vision_config: {name} is {size!r}; a number from 1 to 256")
    side = int(sizes["patch_size"]) * int(sizes["merge_size"])
    whole, of_videos = _PROCESSORS[str(config["model_type"])]
    shared = {
        **sizes, "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3,
        "rescale_factor": 1 / 255, "image_mean": _MEAN, "image_std": _STD,
        "size": {"shortest_edge": (_LEAST * side) ** 2, "longest_edge": (_MOST * side) ** 2},
    }  # fmt: skip
    value = {
        "processor_class": whole,
        "image_processor": {**shared, "image_processor_type": "Qwen2VLImageProcessor"},
        "video_processor": {**shared, "video_processor_type": of_videos},
    }
    write_whole(folder / "processor_config.json", json.dumps(value, indent=2) + "\n", durable=False)
