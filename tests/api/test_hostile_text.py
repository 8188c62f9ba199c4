"""What may be given for a manifest and is none: a sentence with its place, within two seconds."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path

import pytest
from manifests import DESIGN_EXAMPLE

from rljob_api.validation import ManifestError, load_manifest
from rljob_api.yaml_text import parse_yaml

LETTERS = "abcdefgh"


def _levels(level: str) -> str:
    """Each level repeats the one before nine times."""
    return f"{LETTERS[0]}: &{LETTERS[0]} {{x: 1}}\n" + "".join(
        f"{name}: &{name} {level.format(', '.join([f'*{before}'] * 9))}\n" for before, name in pairwise(LETTERS)
    )


TEXTS = {
    "aliases of aliases": (_levels("[{}]"), "line 5, "),
    "merged aliases": (_levels("{{<<: [{}]}}"), "line 5, "),
    "an alias of itself": ("a: &a [*a]\n", "line 1, column 8: *a stands inside what it repeats"),
    "a document of itself": ("&a {spec: *a}\n", "line 1, column 11: *a stands inside what it repeats"),
    "merged into itself": ("a: &a {<<: *a}\n", "line 1, column 12: *a stands inside what it repeats"),
    "open brackets": ("[" * 3000, "line 1, column 65: is deeper than 64 blocks inside each other"),
    "brackets": ("a:\n  " + "[" * 3000 + "]" * 3000 + "\n", "line 2, column 66: is deeper than 64 blocks"),
    "half a million brackets": ("[" * 500_000, "line 1, column 65: is deeper than 64 blocks"),
    "braces": ("{a: " * 3000, "line 1, column 257: is deeper than 64 blocks"),
    "dashes": ("- " * 3000 + "x\n", "line 1, column 129: is deeper than 64 blocks"),
    "deep JSON": ('{"a":' * 3000 + "1" + "}" * 3000, "line 1, column 321: is deeper than 64 blocks"),
    "less deep JSON": ('{"a":' * 100 + "1" + "}" * 100, "is deeper than 64 blocks"),
    "many values": ("- x\n" * 200_000, "line 10000, column 3: has more than 10000 keys and values"),
    "half a character": ('spec: {steps: "\\ud800"}\n', "spec.steps: holds half a character"),
    "half a character in JSON": ('{"spec": {"steps": ["\\udfff"]}}\n', "spec.steps[0]: holds half a character"),
    "half a character as a key": ('spec: {"\\udfff": 1}\n', "spec: holds half a character"),
    "5,000 digits": (f"spec: {{steps: {'9' * 5000}}}\n", "line 1, column 15: a number of 5000 digits"),
    "5,000 digits in JSON": (f'{{"spec": {{"steps": {"9" * 5000}}}}}\n', "line 1, column 20: a number of 5000 digits"),
    "5,000 hexadecimal digits": (f"a: 0x{'f' * 5000}\n", "line 1, column 4: a number of 5002 digits"),
    "50,000 bits": (f"a: 0b{'1' * 50_000}\n", "line 1, column 4: a number of 50002 digits"),
    "no number": ("a: !!int x\n", "line 1, column 4: is no int: 'x'"),
    "no time": ("a: !!float x\n", "line 1, column 4: is no float: 'x'"),
    "no truth value": ("a: !!bool x\n", "line 1, column 4: is no bool: 'x'"),
    "bytes": ('a: !!binary "%%%"\n', "line 1, column 4: could not determine a constructor for the tag"),
    "a set": ("a: !!set {x}\n", "line 1, column 4: could not determine a constructor for the tag"),
    "an unknown alias": ("a: 1\nb: *x\n", "line 2, column 4: found undefined alias 'x'"),
    "two anchors of a name": ("a: &a 1\nb: &a 2\n", "line 2, column 4: second occurrence"),
    "a key that is a list": ("? [a]\n: 1\n", "line 1, column 3: a key is not a scalar"),
    "a key twice in JSON": ('{"a": 1,\n "a": 2}', "line 2, column 2: key 'a' is there twice"),
    "no number in JSON": ('{"a": NaN}', "apiVersion: is missing"),
    "a control character": ("a: 1\nb: \x07\n", "line 2: holds the character U+0007"),
    "another YAML": ("%YAML 9.9\n---\na: 1\n", "line 1, column 1: found incompatible YAML document"),
}


def refused(manifest: Path | str) -> str:
    begun = time.monotonic()
    with pytest.raises(ManifestError) as error:
        load_manifest(manifest)
    assert time.monotonic() - begun < 2
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
    begun = time.monotonic()
    assert load_manifest(tmp_path / "largest").metadata.name == "qwen3-4b-grpo"
    assert time.monotonic() - begun < 2


def test_files_of_other_encodings_name_the_line(tmp_path: Path) -> None:
    for name, content in (("utf-16", "a: é\n".encode("utf-16")), ("latin", b"a: \xe9\n"), ("half", b"a: \xed\xa0\x80")):
        (tmp_path / name).write_bytes(content)
        assert refused(tmp_path / name).startswith("cannot be read: line 1 is not UTF-8")
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
