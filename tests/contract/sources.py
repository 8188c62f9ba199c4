"""The real sources that the register is checked against: packages, fetched once and kept in a cache."""

from __future__ import annotations

import ast
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from contracts import Source

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rljob" / "contracts"
# One platform for everyone: the names are the same in all of a release's wheels.
_PLATFORM = ["--python-version", "3.11", "--implementation", "cp", "--only-binary", ":all:"] + [
    part for tag in ("manylinux2014", "manylinux_2_28", "manylinux_2_34") for part in ("--platform", f"{tag}_x86_64")
]
_PACKAGES = {
    Source.TORCH_NPU: "torch_npu==2.10.0.post4",
    Source.UPSTREAM_SAVER: "torch_memory_saver==0.0.10",
    # 0.23.0.post1, which is pinned, is published as source only, and pip cannot fetch that without building it.
    Source.VLLM_ASCEND: "vllm-ascend==0.23.0",
}
_INSTALLED = {Source.TORCH: "torch", Source.RAY: "ray", Source.VLLM: "vllm", Source.MEGATRON: "megatron.core"}


@contextmanager
def made_once(folder: Path) -> Iterator[bool]:
    """Whether this process is the one to make a folder of the cache; the others wait for it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not folder.is_dir()


@cache
def root(source: Source) -> Path:
    """Folder with the source's files; RuntimeError, which names the package, when it is not to be had."""
    if source in _INSTALLED:
        spec = find_spec(_INSTALLED[source])
        assert spec is not None
        assert spec.origin is not None
        return Path(spec.origin).parents[_INSTALLED[source].count(".") + 1]
    package = _PACKAGES[source]
    if source is Source.VLLM_ASCEND:
        return executable(package)
    folder = CACHE / package.replace("==", "-")
    with made_once(folder) as missing:
        if missing:
            _fetch(package, folder, _PLATFORM)
    return folder


@cache
def executable(package: str) -> Path:
    """Folder with a package's wheel for this machine and this Python; RuntimeError when it is not to be had."""
    tag = f"{sys.implementation.cache_tag}-{platform.machine()}"
    folder = CACHE / f"{package.replace('==', '-')}-{tag}"
    with made_once(folder) as missing:
        if missing:
            _fetch(package, folder, [])
    return folder


def _fetch(package: str, folder: Path, wanted: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place]
        done = subprocess.run([*pip, *wanted, package], capture_output=True, text=True, timeout=900, check=False)
        wheels = list(Path(place).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise RuntimeError(
                f"contracts: {package} could not be fetched, so it cannot be said whether the code still fits it; give "
                f"this machine access to a Python package index, or put the unpacked wheel at {folder}\n{done.stderr}"
            )
        unpacked = Path(place) / "unpacked"
        with zipfile.ZipFile(wheels[0]) as archive:
            archive.extractall(unpacked)
        shutil.move(unpacked, folder)


@dataclass(frozen=True, slots=True)
class _Definitions:
    parameters: dict[str, tuple[str, ...]]
    """Functions, classes (of `__init__`) and `Class.method` -> parameters, without self."""
    attributes: set[str]
    """`Class.attribute`: fields of classes, and what their methods assign to."""


@cache
def _definitions(path: Path) -> _Definitions:
    found = _Definitions({}, set())
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            found.parameters.setdefault(node.name, _parameters(node))
        elif isinstance(node, ast.ClassDef):
            methods = {part.name: _parameters(part)[1:] for part in node.body if isinstance(part, ast.FunctionDef)}
            found.parameters.setdefault(node.name, methods.get("__init__", ()))
            found.parameters.update({f"{node.name}.{name}": taken for name, taken in methods.items()})
            found.attributes.update(f"{node.name}.{name}" for name in _attributes(node))
    return found


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self":
            yield part.attr


def _parameters(node: ast.FunctionDef) -> tuple[str, ...]:
    return tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))


def parameters_of(path: Path, name: str) -> tuple[str, ...] | None:
    """Parameters of a function, class or `Class.method` in a file; None when it is not there.

    Those that are passed by name alone come last.
    """
    return _definitions(path).parameters.get(_in_file(name))


def has_attribute(path: Path, name: str) -> bool:
    """Whether a class in a file has the attribute `Class.attribute`."""
    return _in_file(name) in _definitions(path).attributes


def _in_file(name: str) -> str:
    """Without modules: `Class.method`, or the name alone."""
    parts = name.split(".")
    return ".".join(parts[-2:] if len(parts) > 1 and parts[-2][0].isupper() else parts[-1:])


@cache
def _bytes(path: Path) -> bytes:
    return path.read_bytes()


def has_symbol(path: Path, name: str) -> bool:
    """Whether a shared library's string table has the name."""
    return b"\0" + name.encode() + b"\0" in _bytes(path)


def has_text(path: Path, text: str) -> bool:
    """Whether a file contains the text."""
    return text.encode() in _bytes(path)


def missing_parameters(wanted: Sequence[str], found: Sequence[str]) -> list[str]:
    """Parameters that are not at their places."""
    return [name for i, name in enumerate(wanted) if i >= len(found) or found[i] != name]
