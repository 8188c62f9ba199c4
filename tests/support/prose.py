"""The docstring rules that a program can check: `counts.py` prints how many docstrings break each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("crds", "operator", "worker", "helm", "images", "examples", "benchmarks", "tests")
BEGINS = re.compile(r"(What|Of|As|Those|Which|How|Where)\b")
"""A docstring begins with a verb or the noun that it is about."""
PERSON = re.compile(r"\b(who|whom|whoever|told|knows)\b", re.IGNORECASE)
"""Processes are not people."""
EXCEPTIONS = re.compile(r"\b(people|person|user|users|user's|stranger|strangers|administrator|administrators)\b")
"""A sentence about these is about people."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string that is a statement: of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value


def findings() -> tuple[list[str], list[str]]:
    """Docstrings that begin with a word of BEGINS, and docstrings that speak of processes as of people.

    The files that were changed last come first: a new finding is in one of them.
    """
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    begins, people = [], []
    for path in sorted(files, key=lambda path: -path.stat().st_mtime):
        for line, text in docstrings(ast.parse(path.read_text())):
            at = f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0][:80] if text.strip() else ''}"
            if BEGINS.match(text.strip()):
                begins.append(at)
            sentences = re.split(r"(?<=[.:;])\s+", text)
            if any(PERSON.search(one) and not EXCEPTIONS.search(one) for one in sentences):
                people.append(at)
    return begins, people
