"""Pictures of a data set's rows: found, looked at, and cut by the model's image processor, once."""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import xxhash

from rljob_api.how_many import how_many
from rljob_api.spec import DataSource
from rljob_worker.data.sources import LoadedSource
from rljob_worker.errors import UserError
from rljob_worker.models.pictures import IMAGE_TOKEN, PictureFacts, check_sides, processor_settings, tokens_of
from rljob_worker.types import IntArray, Picture

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
MAX_PIXELS = 2**26
"""Limit of a file: a small one can say that it has a billion, and takes the memory of all."""
_MAX_BYTES = 2**28
_DECODED_PIXELS = 2**27
"""Limit of the first rows, whose pictures are decoded before anything starts (some seconds); all headers are read."""
_THUMBNAIL = 64
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that need no other program: an EPS file is a program itself."""
_WIDE = ("I", "F")
"""Pillow's modes of 32 bits."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


@dataclass(frozen=True, slots=True)
class _Found:
    """A picture that was not opened yet: a file's content, or where it is."""

    content: bytes | Path
    name: str
    """Name in messages."""

    def read(self) -> bytes:
        """ValueError where the file cannot be read or is too large."""
        if isinstance(self.content, bytes):
            return self.content
        try:
            if (size := self.content.stat().st_size) > _MAX_BYTES:
                raise ValueError(f"{self.name} has {size} bytes, which is no picture: at most {_MAX_BYTES}")
            return self.content.read_bytes()
        except OSError as error:
            raise ValueError(f"{self.name} cannot be read: {error.strerror}") from None

    def opened(self) -> Image:
        """Its header is read, no pixel; ValueError where it is no picture that is taken."""
        import PIL.Image

        content = self.read()
        try:
            with warnings.catch_warnings():
                # Its own limit warns first, and raises at twice as much.
                warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
                picture = PIL.Image.open(io.BytesIO(content), formats=_FORMATS)
        except PIL.Image.DecompressionBombError:
            raise ValueError(
                f"{self.name} says that it has more than {MAX_PIXELS} pixels: a decompression bomb?"
            ) from None
        except PIL.UnidentifiedImageError:
            # Its text names an object in memory.
            raise ValueError(f"{self.name} is no picture: {', '.join(_FORMATS)} are taken") from None
        except Exception as error:
            raise ValueError(f"{self.name} is no picture: {', '.join(_FORMATS)} are taken ({error})") from None
        width, height = picture.size
        if width * height > MAX_PIXELS:
            raise ValueError(
                f"{self.name} says that it has {width} x {height} pixels, more than {MAX_PIXELS}: a decompression bomb?"
            )
        if wrong := check_sides(width, height):
            raise ValueError(f"{self.name} {wrong}")
        if picture.mode in _WIDE and not _is_gray_16(picture):
            raise ValueError(
                f"{self.name} has numbers of 32 bits ({picture.format}, mode {picture.mode}), and nothing says which "
                "of them is white: 8 or 16 bits a channel are taken"
            )
        return picture

    def decoded(self) -> Image:
        """In RGB, turned as its file says; ValueError where it is damaged."""
        from PIL import ImageOps

        picture = self.opened()
        try:
            turned = ImageOps.exif_transpose(picture)
            assert turned is not None
            return _opaque(_upper_bits(turned) if _is_gray_16(picture) else turned)
        except Exception as error:
            raise ValueError(f"{self.name} is damaged: {error}") from None


def _is_gray_16(picture: Image) -> bool:
    """Whether a channel of grey has 16 bits; versions of Pillow have two names for a PNG of these."""
    return picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format == "PNG")


def _upper_bits(picture: Image) -> Image:
    """The upper 8 of 16 bits of grey: Pillow itself makes all above 255 white."""
    import PIL.Image

    return PIL.Image.fromarray((np.asarray(picture).astype(np.uint32) >> 8).astype(np.uint8))


def _opaque(picture: Image) -> Image:
    """In RGB, on white where it can be seen through, as Qwen's own code and vLLM have it."""
    import PIL.Image

    if not picture.has_transparency_data:
        return picture.convert("RGB")
    seen = picture.convert("RGBA")
    on_white = PIL.Image.new("RGB", seen.size, (255, 255, 255))
    on_white.paste(seen, mask=seen.getchannel("A"))
    return on_white


class RowPictures:
    """The pictures of one source's rows.

    Args:
        loaded: the source.
    """

    def __init__(self, loaded: LoadedSource) -> None:
        self._loaded = loaded
        self.key = loaded.image_key
        self._root = _root(loaded.source)

    def of(self, row: int, content: dict[str, Any]) -> list[Image]:
        """A row's pictures, decoded; UserError names row and file."""
        return [self._checked(row, one.decoded) for one in self._found(row, content)]

    def checked(self, left_out: Container[int] = ()) -> LoadedSource:
        """Look at the header of each row's pictures, and decode the first ones; UserError names row and file.

        Args:
            left_out: rows whose pictures need not be any.

        Returns:
            The source, with a fingerprint and hashes of rows that change where a picture's file does.
        """
        if self.key is None or self._loaded.source.synthetic is not None:
            return self._loaded
        room, hashes = _DECODED_PIXELS, list[int]()
        for row, content in enumerate(self._loaded.rows):
            seen = xxhash.xxh3_64()
            # Those of a row that is left out may be what is wrong with it.
            with suppress(UserError) if row in left_out else nullcontext():
                for one in self._found(row, content):
                    file = self._checked(row, one.read)
                    seen.update(xxhash.xxh3_64_digest(file))
                    if row in left_out:
                        continue
                    here = _Found(file, one.name)
                    width, height = self._checked(row, here.opened).size
                    room -= width * height
                    if room >= 0:
                        self._checked(row, here.decoded)
            hashes.append(seen.intdigest())
        return _with_hashes(self._loaded, np.array(hashes, dtype=np.uint64).view(np.int64))

    def _checked(self, row: int, action: Callable[[], T]) -> T:
        try:
            return action()
        except ValueError as error:
            raise self._error(row, str(error)) from None

    def _error(self, row: int, wrong: str) -> UserError:
        return UserError(
            f"{self._loaded.place(row)}: the picture ({self.key!r}, {self._loaded.field}.imageKey) {wrong}"
        )

    def _found(self, row: int, content: dict[str, Any]) -> Iterator[_Found]:
        if self.key is None:
            return
        if self.key not in content:
            there = ", ".join(map(repr, content))
            raise self._error(row, f"is absent; the keys there are: {there}")
        value = content[self.key]
        if value is None:
            return
        for number, one in enumerate(value if isinstance(value, list) else [value]):
            try:
                yield self._one(one, number)
            except ValueError as error:
                raise self._error(row, str(error)) from None

    def _one(self, value: object, number: int) -> _Found:
        if isinstance(value, dict):
            # As Hugging Face's data sets have them.
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return _Found(value, f"number {number} of the row")
        if not isinstance(value, str) or not value:
            raise ValueError(f"number {number} is {type(value).__name__}: the path of a file, or its bytes, is needed")
        if value[:5].lower() == "data:":
            raise ValueError(
                f"{value[:40]!r} is a data: URL, which is not read: put the picture into a file below the data's "
                "folder, or its bytes into a column of a Parquet file"
            )
        if _URL.match(value):
            raise ValueError(f"{value[:80]!r} is a URL: pictures are not fetched; put it below the data's folder")
        if self._root is None:
            raise ValueError(f"{value!r} is a path, and data of a hub have no folder: bytes are needed")
        path = self._root / value
        try:
            real = path.resolve()
            inside = real.is_relative_to(self._root.resolve())
            if inside and not real.is_file():
                raise ValueError(f"{value!r} is no file in {self._root}")
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{value!r} cannot be found: {error}") from None
        if not inside:
            raise ValueError(f"{value!r} leads out of {self._root}: pictures lie below the data's folder")
        return _Found(real, repr(value))


def _with_hashes(loaded: LoadedSource, pictures: IntArray) -> LoadedSource:
    """The source as its rows and their pictures are, of which these are the hashes [rows]."""
    both = xxhash.xxh3_128_hexdigest(loaded.fingerprint.encode() + b"\0" + pictures.astype("<i8").tobytes())
    return replace(loaded, fingerprint=both, row_hashes=lambda: loaded.row_hashes() ^ pictures)


def _root(source: DataSource) -> Path | None:
    """The folder that paths are below; None of data from a hub."""
    if source.path is None:
        return None
    path = Path(source.path).expanduser()
    return path if path.is_dir() else path.parent if path.exists() else None


class _Processed(Protocol):
    def __getitem__(self, key: str) -> Any: ...


class _Processor(Protocol):
    size: Mapping[str, int]

    def __call__(self, *, images: Sequence[Image], **settings: object) -> _Processed: ...


class PictureProcessor:
    """The model's image processor, and the places of pictures in its prompts.

    Args:
        folder: with the tokenizer and the image processor's file.
        tokenizer: of the model.
        max_pixels: of a picture (`model.maxPixels`); None: the processor's own.

    Raises:
        UserError: the folder has no image processor that is known here, or the tokenizer has no token for pictures.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, max_pixels: int | None) -> None:
        from transformers import AutoImageProcessor

        settings, path = processor_settings(folder)
        self._merge = settings["merge_size"]
        self._image_token = _image_token(tokenizer)
        try:
            self._processor: _Processor = AutoImageProcessor.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise UserError(f"{path}: no image processor that transformers has: {error}") from error
        self._bounds: dict[str, object] = {}
        if max_pixels is not None:
            # The least and the most of an area, whatever their names say.
            size = self._processor.size
            edges = [size.get(f"{edge}_edge") for edge in ("shortest", "longest")]
            if not all(type(edge) is int for edge in edges):
                raise UserError(
                    f"{path}: size is {dict(size)}: model.maxPixels needs shortest_edge and longest_edge there, the "
                    "least and the most pixels of a picture"
                )
            least, most = edges
            if least > max_pixels:
                raise UserError(f"spec.model.maxPixels: {max_pixels} is below the image processor's least, {least}")
            if most < max_pixels:
                # vLLM makes room for a picture of that size, and waits for ever for a larger one's.
                raise UserError(f"spec.model.maxPixels: {max_pixels} is above the image processor's most, {most}")
            self._bounds["size"] = {"shortest_edge": least, "longest_edge": max_pixels}

    def picture(self, image: Image) -> Picture:
        """A picture as the model takes it: resized, cut, not normalised; ValueError where the processor refuses it."""
        made = self._processor(
            images=[image], return_tensors="pt", do_rescale=False, do_normalize=False, **self._bounds
        )
        patches = made["pixel_values"].round().clamp(0, 255).byte().numpy()
        frames, rows, columns = (int(size) for size in made["image_grid_thw"][0])
        grid = (frames, rows, columns)
        digest = hashlib.sha256(np.array(grid, dtype="<i8").tobytes() + patches.tobytes()).hexdigest()
        return Picture(patches, grid, digest, image.size, _thumbnail(image))

    def expanded(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """Tokens with as many places for each picture as it has features.

        Raises:
            ValueError: the prompt has places for more pictures, or fewer.
        """
        if (places := sum(token == self._image_token for token in ids)) != len(pictures):
            raise ValueError(
                f"has {how_many(len(pictures), 'picture')}, and its prompt places for {places} ({IMAGE_TOKEN})"
            )
        following = iter(pictures)
        out: list[int] = []
        for token in ids:
            count = 1
            if token == self._image_token:
                count = tokens_of(next(following).grid, self._merge)
            out += [token] * count
        return out


def _thumbnail(image: Image) -> bytes:
    small = image.copy()
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    file = io.BytesIO()
    small.save(file, "PNG")
    return file.getvalue()


def _image_token(tokenizer: PreTrainedTokenizerBase) -> int:
    token = tokenizer.get_vocab().get(IMAGE_TOKEN)
    if token is None:
        raise UserError(f"spec.model: its tokenizer has no {IMAGE_TOKEN}, which stands for pictures")
    return int(token)


def check_tokens(tokenizer: PreTrainedTokenizerBase, facts: PictureFacts) -> None:
    """UserError where tokenizer and config name another token for pictures, or the tokenizer none."""
    token = _image_token(tokenizer)
    if token != facts.image_token:
        raise UserError(
            f"spec.model: {IMAGE_TOKEN} is token {token} of its tokenizer, and image_token_id of config.json is "
            f"{facts.image_token}"
        )
