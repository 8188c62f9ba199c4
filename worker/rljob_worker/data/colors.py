"""Generated pictures: a square of a colour that has a name."""

from __future__ import annotations

import io

import numpy as np

from rljob_api.spec import SyntheticData

QUESTION = "what colour is the square ?"
_SIDE = 32
_COLORS = {
    "red": (220, 30, 30), "green": (30, 170, 50), "blue": (40, 60, 220), "yellow": (235, 220, 40),
    "cyan": (40, 210, 220), "magenta": (210, 40, 200), "white": (250, 250, 250), "black": (10, 10, 10),
    "orange": (245, 140, 20), "purple": (110, 40, 150), "brown": (120, 70, 30), "pink": (250, 160, 190),
    "grey": (128, 128, 128),
}  # fmt: skip
_NOISE = 16


def color_rows(data: SyntheticData) -> list[tuple[str, bytes]]:
    """(colour, PNG) of squares on grey noise, all of them different, the same for the same seed: raw bits of PCG64.

    Args:
        data: `symbols` is the number of colours, `rows` that of pictures.
    """
    bits = np.random.PCG64(data.seed)
    names = list(_COLORS)[: data.symbols]
    return [_row(bits, names) for _ in range(data.rows)]


def _row(bits: np.random.PCG64, names: list[str]) -> tuple[str, bytes]:
    import PIL.Image

    drawn = bits.random_raw(4)
    name = names[int(drawn[0]) % len(names)]
    side = _SIDE // 2 + int(drawn[1]) % (_SIDE // 4)
    left, top = (int(value) % (_SIDE - side + 1) for value in drawn[2:])
    noise = bits.random_raw(_SIDE * _SIDE).view(np.uint8).reshape(_SIDE, _SIDE, 8)[..., :3] % _NOISE
    picture = noise.astype(np.int64) + 120
    square = slice(top, top + side), slice(left, left + side)
    picture[square] = np.array(_COLORS[name]) + noise[square] - _NOISE // 2
    file = io.BytesIO()
    PIL.Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(file, "PNG")
    return name, file.getvalue()
