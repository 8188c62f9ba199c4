"""Reading YAML as the Kubernetes API server does, from files that may be anything."""

from __future__ import annotations

import codecs
import json
import os
import re
import select
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 2**20
"""Largest manifest: the API server stores objects of about as many."""
MAX_DEPTH = 64
"""Blocks inside blocks; a pod template merged into a manifest has about 20."""
MAX_VALUES = 10_000
"""Keys and values, those of aliases counted wherever they are put; the largest pod templates have some hundreds."""
_MAX_DIGITS = 100
_PIPE_SECONDS = 1.5


class YamlError(ValueError):
    """Text that is no YAML, with the line."""


class BareKey(str):
    """A key that YAML reads as something else than text, as it is written."""

    read_as: str
    """In words."""

    def __new__(cls, text: str, read_as: str = "") -> BareKey:
        """Return the text, and what it was read as beside it."""
        key = super().__new__(cls, text)
        key.read_as = read_as
        return key


def bare_key(text: str, value: Any) -> BareKey:
    """A key that was read as `value`."""
    if value is None:
        return BareKey(text or "null", "null")
    return BareKey(text, str(value).lower() if isinstance(value, bool) else "a number")


def read_text(path: Path) -> str:
    """The text of a manifest's file, or of a pipe that is being written; never waits for long.

    Raises:
        YamlError: it is no file, too large, or not UTF-8.
        OSError: it cannot be opened or read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode):
            content = _read_pipe(descriptor)
        elif stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            # Reading a folder is the error that it should be.
            content = os.read(descriptor, MAX_BYTES + 1)
        else:
            raise YamlError("is neither a file nor a pipe")
    finally:
        os.close(descriptor)
    return decode(content)


def _read_pipe(descriptor: int) -> bytes:
    content, deadline = b"", time.monotonic() + _PIPE_SECONDS
    while len(content) <= MAX_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise YamlError(
                f"is a pipe that was not written to its end within {_PIPE_SECONDS:g} s; give a file, or `-`"
            )
        try:
            part = os.read(descriptor, 2**16)
        except BlockingIOError:
            continue
        if not part:
            break
        content += part
    return content


def decode(content: bytes) -> str:
    """The text of at most `MAX_BYTES`.

    Raises:
        YamlError: there are more, or they are not UTF-8.
    """
    if len(content) > MAX_BYTES:
        raise YamlError(f"has more than {MAX_BYTES // 2**20} MiB, which is no manifest")
    if name := _other_encoding(content):
        raise YamlError(f"is {name}; a manifest is UTF-8 (convert it: iconv -f {name} -t UTF-8)")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise YamlError(f"cannot be read: line {line} is not UTF-8 ({error.reason})") from None
    if (mark := text.find("\n\ufeff")) >= 0:
        line = text.count("\n", 0, mark) + 2
        raise YamlError(f"line {line} begins with a byte order mark (U+FEFF), as where files were joined: take it out")
    return text


def _other_encoding(content: bytes) -> str:
    """UTF-16 and UTF-32, by their marks, or by the zeros that their first characters have; else empty."""
    zeros = bytes(byte == 0 for byte in content[:4])
    if content.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)) or zeros in (b"\0\1\1\1", b"\1\1\1\0"):
        return "UTF-32"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    return {b"\1\0\1\0": "UTF-16BE", b"\0\1\0\1": "UTF-16LE"}.get(zeros, "")


class _Loader(yaml.SafeLoader):
    """SafeLoader, with times left as strings, `1e-6` a number, `1:30` a string, and duplicate keys refused."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.MarkedYAMLError:
            raise
        except (ValueError, OverflowError, KeyError, AttributeError):
            # A text that its tag calls a number, a time or a truth value.
            problem = f"is no {node.tag.rpartition(':')[2]}: {_short(str(node.value))!r}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _MAX_DIGITS:
            problem = f"a number of {len(node.value)} digits; at most {_MAX_DIGITS} are read"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return int(super().construct_yaml_int(node))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name = self._key(key)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {name!r} is there twice", key.start_mark)
            seen.add(name)
        self.flatten_mapping(node)
        return {self._key(key): self.construct_object(value, deep=deep) for key, value in node.value}

    def _key(self, node: yaml.Node) -> str:
        """The text of a key; one that is read as something else (`no`, `1`) is marked, for its place to be named."""
        name = self.construct_object(node, deep=True)
        if isinstance(name, str):
            return name
        if not isinstance(node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key is not a scalar", node.start_mark)
        return bare_key(node.value, name)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_NO_JSON = {f"tag:yaml.org,2002:{name}" for name in ("binary", "timestamp", "omap", "pairs", "set")}
_Loader.yaml_constructors = {
    tag: construct for tag, construct in _Loader.yaml_constructors.items() if tag not in _NO_JSON
}
# kubectl's YAML reads these as booleans, so a name `y` needs quotes.
_Loader.bool_values = {**yaml.SafeLoader.bool_values, "y": True, "n": False}
_REPLACED = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float", "tag:yaml.org,2002:int"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^[yYnN]$"), list("yYnN"))
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9_]+(?:[eE][-+]?[0-9]+)?)$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_INT = re.compile(r"^[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))


def parse_yaml(text: str) -> Any:
    """Return the one document in `text`; raise YamlError with the line where it is broken.

    What would take long or grow without bound (depth, aliases of aliases) is refused before anything is built of it.
    """
    if len(text) > MAX_BYTES:
        raise YamlError(f"has more than {MAX_BYTES // 2**20} MiB, which is no manifest")
    try:
        if text.lstrip()[:1] == "{":
            document = _parse_json(text)
            if document is not None:
                return document
        _check_size(text)
        documents = [document for document in yaml.load_all(text, Loader=_Loader) if document is not None]
        if len(documents) == 1:
            check_values(documents[0])
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = f"{where}{error.problem or error.context or 'not YAML'}"
        raise YamlError(problem + _hint(text, mark.line if mark else 0)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"line {line}: holds the character U+{error.character:04X}: {error.reason}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise YamlError(_short(str(error))) from None
    if len(documents) > 1:
        raise YamlError(f"{len(documents)} documents; one is expected")
    return documents[0] if documents else None


_CONFLICT = re.compile(r"^(<{7}|={7}|>{7})( |$)", re.MULTILINE)
_ODD_BLANK = re.compile("^[ \t]*([\u00a0\u2000-\u200f\u202f\u205f\u3000])", re.MULTILINE)


def _hint(text: str, line: int) -> str:
    """The cause of a text that is no YAML, where its lines up to the one that is blamed show that."""
    lines = text.split("\n")[: line + 1]
    before = "\n".join(lines)
    if (mark := _CONFLICT.search(text)) is not None:
        return f"; line {text.count(chr(10), 0, mark.start()) + 1} is a mark of a merge that was not resolved"
    if (blank := _ODD_BLANK.search(before)) is not None:
        number = before.count("\n", 0, blank.start()) + 1
        return f"; line {number} begins with the character U+{ord(blank[1]):04X}, which is no blank of YAML"
    if "{{" in lines[-1]:
        return "; '{{' is a template's, which was not filled in"
    if lines[-1].startswith("\t") or "\t" in lines[-1][: len(lines[-1]) - len(lines[-1].lstrip())]:
        return "; YAML is indented with blanks"
    return ""


def _parse_json(text: str) -> Any:
    """The document, where the text is JSON, of which YAML reads all but tabs and pairs of surrogates; else None."""
    try:
        document = json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    check_values(document)
    return document


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _check_size(text: str) -> None:
    """Refuse documents that are too deep or too large once their aliases are put in their places."""
    values = 0
    open_: list[tuple[str | None, int]] = []
    sizes: dict[str, int] = {}
    for event in _events(text):
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_):
                raise _refused(f"*{event.anchor} stands inside what it repeats", event)
            values += sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.NodeEvent):
            values += 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_.append((event.anchor, values))
            elif event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor:
                sizes[anchor] = values - before + 1
        if len(open_) > MAX_DEPTH:
            raise _refused(f"is deeper than {MAX_DEPTH} blocks inside each other", event)
        if values > MAX_VALUES:
            raise _refused(f"has more than {MAX_VALUES} keys and values, those of aliases included", event)


def _events(text: str) -> Iterator[yaml.Event]:
    """Up to the first thing that is no YAML, which is the loader's to report."""
    try:
        # libyaml's is ten times as fast; where it is missing, PyYAML's own is the same but slower.
        yield from yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.MarkedYAMLError, yaml.reader.ReaderError, UnicodeEncodeError):
        return


def _refused(what: str, event: yaml.Event) -> yaml.MarkedYAMLError:
    mark = event.start_mark
    assert mark is not None
    return yaml.MarkedYAMLError(problem=what, problem_mark=yaml.Mark("", 0, mark.line, mark.column, None, 0))


def check_values(value: Any, path: str = "", depth: int = 0) -> None:
    """Refuse what no API server can hold: values of Python's own, half a character (`"\\ud800"`), too much depth.

    Raises:
        YamlError: beginning with the value's path.
    """
    if depth > MAX_DEPTH:
        raise YamlError(f"is deeper than {MAX_DEPTH} blocks inside each other")
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise YamlError(f"{path or 'the document'}: holds half a character (a lone surrogate), which UTF-8 cannot")
    elif isinstance(value, dict):
        for key, item in value.items():
            check_values(key, path, depth)
            check_values(item, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            check_values(item, f"{path}[{i}]", depth + 1)
    elif value is not None and not isinstance(value, int | float):
        raise YamlError(
            f"{path or 'the document'}: is of Python's type {type(value).__name__}, which is no JSON; allowed: a text, "
            "a number, true, false, a list or a mapping"
        )


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."
