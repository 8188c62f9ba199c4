"""Files given for a manifest that are none: a sentence with its place, within two seconds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from manifests import DESIGN_EXAMPLE
from support.clocks import at_once
from support.hostile_texts import TEXTS

from rljob_api.validation import ManifestError, load_manifest
from rljob_api.yaml_text import parse_yaml


def refused(manifest: Path | str) -> str:
    with at_once(), pytest.raises(ManifestError) as error:
        load_manifest(manifest)
    return str(error.value.problems[0])


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_would_take_long_or_all_memory(name: str) -> None:
    text, message = TEXTS[name]
    assert refused(text + "\n").startswith(message)


def test_files_that_are_too_large(tmp_path: Path) -> None:
    for name, line in (("text", "a"), ("lines", "  a: b\n"), ("nothing", "\0")):
        (tmp_path / name).write_text(line * (11_000_000 // len(line)))
        assert refused(tmp_path / name) == "has more than 1 MiB, which is no manifest"
    (tmp_path / "largest").write_text("# comment\n" * 100_000 + DESIGN_EXAMPLE)
    with at_once():
        assert load_manifest(tmp_path / "largest").metadata.name == "qwen3-4b-grpo"


def test_files_of_other_encodings_name_the_line(tmp_path: Path) -> None:
    for name, content in (("latin", b"a: \xe9\n"), ("half", b"a: \xed\xa0\x80")):
        (tmp_path / name).write_bytes(content)
        assert refused(tmp_path / name).startswith("cannot be read: line 1 is not UTF-8")
    for name in ("UTF-16", "UTF-16LE", "UTF-16BE", "UTF-32", "UTF-32LE", "UTF-32BE"):
        (tmp_path / name).write_bytes("a: é\n".encode(name))
        said = name if name.startswith("UTF-16") else "UTF-32"
        assert refused(tmp_path / name) == f"is {said}; a manifest is UTF-8 (convert it: iconv -f {said} -t UTF-8)"
    (tmp_path / "zeros").write_bytes(bytes(64))
    assert refused(tmp_path / "zeros") == "line 1: holds the character U+0000: special characters are not allowed"
    (tmp_path / "joined").write_bytes(b"a: 1\n\xef\xbb\xbfb: 1\n")
    assert refused(tmp_path / "joined").startswith("line 2 begins with a byte order mark (U+FEFF)")
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbf" + DESIGN_EXAMPLE.lstrip().encode())
    assert load_manifest(tmp_path / "bom.yaml").metadata.name == "qwen3-4b-grpo"


def test_devices_links_and_names(tmp_path: Path) -> None:
    for device in ("/dev/zero", "/dev/random", "/dev/null"):
        assert refused(Path(device)) == "is neither a file nor a pipe"
    (tmp_path / "loop").symlink_to("loop")
    assert refused(tmp_path / "loop").startswith("cannot be read: ")
    assert refused(tmp_path / ("x" * 300)).startswith("cannot be read: ")


def test_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "silent")
    silent = os.open(tmp_path / "silent", os.O_RDWR)
    assert refused(tmp_path / "silent").startswith("is a pipe that was not written to its end within 1.5 s")
    os.close(silent)
    reading, writing = os.pipe()
    os.write(writing, DESIGN_EXAMPLE.encode())
    os.close(writing)
    assert load_manifest(Path(f"/proc/self/fd/{reading}")).metadata.name == "qwen3-4b-grpo"
    os.close(reading)


def test_json_keeps_what_yaml_does_not_read() -> None:
    assert parse_yaml('{\n\t"a": "\\ud83d\\ude00"\n}') == {"a": "\U0001f600"}
