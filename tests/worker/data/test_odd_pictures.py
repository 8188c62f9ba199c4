"""Pictures of unusual kinds, as Pillow opens them: what is shown is what a viewer shows, or it is refused by name."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from rljob_worker.data.pictures import RowPictures, _Found
from rljob_worker.errors import UserError
from rljob_worker.models.pictures import processor_settings

SIDE = 16
GRAY = np.linspace(0, 255, SIDE * SIDE).reshape(SIDE, SIDE).astype(np.uint8)
WHITE, BLACK = (255, 255, 255), (0, 0, 0)


def encoded(picture: PIL.Image.Image, kind: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **settings)
    return file.getvalue()


def pixels(content: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(_Found(content, "'a'").decoded())


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_of_gray_are_as_bright_as_8(kind: str) -> None:
    wide = encoded(PIL.Image.fromarray(GRAY.astype(np.uint16) << 8), kind)
    assert np.array_equal(pixels(wide), pixels(encoded(PIL.Image.fromarray(GRAY), "PNG")))


def test_16_bits_are_turned_as_their_file_says() -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    wide = encoded(PIL.Image.fromarray(GRAY.astype(np.uint16) << 8), "PNG", exif=exif)
    assert np.array_equal(pixels(wide)[..., 0], np.rot90(GRAY, -1))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_of_32_bits_have_no_white(mode: str) -> None:
    content = encoded(PIL.Image.new(mode, (SIDE, SIDE)), "TIFF")
    with pytest.raises(ValueError, match=rf"^'a' has numbers of 32 bits \(TIFF, mode {mode}\).*8 or 16 bits a channel"):
        _Found(content, "'a'").opened()


def half_seen(mode: str) -> PIL.Image.Image:
    """Black, of which the lower half cannot be seen."""
    picture = np.zeros((SIDE, SIDE, len(mode)), np.uint8)
    picture[: SIDE // 2, :, -1] = 255
    return PIL.Image.fromarray(picture, mode)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_can_be_seen_through_is_white(mode: str, kind: str) -> None:
    found = pixels(encoded(half_seen(mode), kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert tuple(found[0, 0]) == BLACK
    assert tuple(found[-1, -1]) == WHITE


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_a_colour_of_a_palette_that_can_be_seen_through_is_white(kind: str) -> None:
    picture = PIL.Image.new("P", (SIDE, SIDE), 0)
    picture.putpalette([0, 0, 0, 200, 0, 0])
    picture.putpixel((0, 0), 1)
    found = pixels(encoded(picture, kind, transparency=0))
    assert tuple(found[0, 0]) == (200, 0, 0)
    assert tuple(found[-1, -1]) == WHITE


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_the_first_picture_of_a_film_is_taken(kind: str) -> None:
    first, *more = (PIL.Image.new("RGB", (SIDE, SIDE), (shade, 0, 0)) for shade in (250, 100, 0))
    found = pixels(encoded(first, kind, save_all=True, append_images=more))
    assert abs(int(found[0, 0, 0]) - 250) < 5


def test_cmyk_is_taken() -> None:
    found = pixels(encoded(PIL.Image.new("RGB", (SIDE, SIDE), (250, 0, 0)).convert("CMYK"), "JPEG"))
    assert found[0, 0, 0] > 240 > 10 > found[0, 0, 1]


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"<svg xmlns='http://www.w3.org/2000/svg'/>"])
def test_what_is_no_picture_is_named_without_an_address_in_memory(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^'a' is no picture: PNG, .* are taken") as caught:
        _Found(content, "'a'").opened()
    assert " at 0x" not in str(caught.value)


@pytest.mark.parametrize("value", ["data:image/png;base64,iVBO Rw0K", "DATA:,x"])
def test_a_data_url_is_told_apart_from_one_that_would_be_fetched(value: str) -> None:
    with pytest.raises(ValueError, match=r"is a data: URL, which is not read: .*Parquet"):
        RowPictures._one(None, value, 0)  # type: ignore[arg-type]


RIGHT = {
    "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5, 0, 1],
    "image_std": [0.5, 1, 0.25],
}  # fmt: skip


def test_settings_may_be_whole_numbers(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(RIGHT))
    assert processor_settings(tmp_path)[0] == RIGHT | {"rescale_factor": 1 / 255}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("patch_size", 0),
        ("merge_size", -1),
        ("merge_size", True),
        ("temporal_patch_size", "2"),
        ("image_mean", ["a", 0, 0]),
        ("image_std", [0, 1, 1]),
        ("image_std", [float("nan"), 1, 1]),
        ("rescale_factor", 0),
        ("rescale_factor", "1/255"),
    ],
)
def test_settings_that_cannot_be_calculated_with_are_named(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(RIGHT | {key: value}))
    with pytest.raises(UserError, match=rf"preprocessor_config.json: {key} is "):
        processor_settings(tmp_path)
