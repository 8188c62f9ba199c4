"""Encodings and compressions of a file, by its first bytes: what a message calls a file that cannot be read."""

from __future__ import annotations

import codecs

_BEGINNINGS = (
    # UTF-32 first: its mark for little-endian begins with that of UTF-16.
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
    (b"\x1f\x8b", "compressed by gzip"),
    (b"BZh", "compressed by bzip2"),
    (b"\xfd7zXZ\x00", "compressed by xz"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\xff\xff\xff\xff", "an Arrow stream"),
    (b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS, not the file itself"),
)
_REMEDIES = {
    "UTF-16": "convert it: iconv -f UTF-16 -t UTF-8",
    "UTF-32": "convert it: iconv -f UTF-32 -t UTF-8",
    "compressed by gzip": "unpack it: gunzip",
    "compressed by bzip2": "unpack it: bunzip2",
    "compressed by xz": "unpack it: unxz",
    "compressed by zstd": "unpack it: unzstd",
    "a ZIP archive": "unpack it: unzip",
    "a Parquet file": "give it a name that ends with .parquet",
    "a pointer of Git LFS, not the file itself": "fetch it: git lfs pull",
}


def what_it_is(head: bytes) -> str:
    """Name a file's format by its first bytes, where it is not plain text in UTF-8; empty where nothing is known of it.

    UTF-16 without a mark is known by its zero bytes, which no JSON in UTF-8 has.
    """
    for beginning, name in _BEGINNINGS:
        if head.startswith(beginning):
            return name
    start = head[:64]
    if b"\0" not in start or len(start) < 4:
        return ""
    if b"\0\0\0" in (start[1:4], start[:3]):
        return "UTF-32"
    many, few = sorted((start[0::2].count(0), start[1::2].count(0)), reverse=True)
    return "UTF-16" if many * 2 > len(start) // 2 > few * 4 else ""


def not_text(head: bytes, wanted: str = "UTF-8 is needed") -> str:
    """A message's part that says what the file is instead of text in UTF-8; empty where `what_it_is` finds nothing."""
    name = what_it_is(head)
    if not name:
        return ""
    remedy = _REMEDIES.get(name)
    return f"is {name}; {wanted}" + (f" ({remedy})" if remedy else "")


def without_mark(content: bytes) -> bytes:
    """The content without the mark that some editors put before UTF-8."""
    return content.removeprefix(codecs.BOM_UTF8)
