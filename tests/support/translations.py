"""Compares the Chinese pages of `docs/zh` with the English ones: `python tests/support/translations.py`.

Run by `make lint`. Prints pages that are older than their English page, and exits with 1 only for a broken page: one
without its first line, one of a page that does not exist, or one whose code blocks are not those of the English page.
`--update docs/zh/PAGE.md ...` writes the digest of today's English page, once the Chinese text says the same.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "docs/zh"
SOURCES = {
    "README.md": "README.md",
    **{
        name: f"docs/{name}"
        for name in (
            "concepts.md",
            "first-job.md",
            "first-hour-on-npu.md",
            "tutorial-gsm8k.md",
            "troubleshooting.md",
            "from-other-frameworks.md",
            "faq.md",
            "glossary.md",
        )
    },
}
"""Chinese page below `docs/zh` -> the English page that it translates."""
OTHERS = {"reference.md", "translating.md"}
"""Pages of `docs/zh` that translate none: generated from the types, and the rules for translators."""
FIRST_LINE = re.compile(r"<!-- translates (\S+) sha256:([0-9a-f]{16}) -->\n")
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"(^|\s+)# .*$", re.MULTILINE)
HEADING = re.compile(r"^(#+) ", re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Finding:
    """A sentence about one Chinese page; `broken`: it has to be mended before the tests pass."""

    page: str
    text: str
    broken: bool

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of a page's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def blocks(text: str) -> list[str]:
    """Return the code blocks of a page without their comments, which may be translated."""
    return [COMMENT.sub("", block) for block in FENCE.findall(text)]


def outline(text: str) -> list[int]:
    """Return the levels of a page's headings, in order."""
    return [len(marks) for marks in HEADING.findall(FENCE.sub("", text))]


def spans(text: str) -> set[str]:
    """Return commands, fields and names in code style outside of code blocks, without links' targets."""
    return set(SPAN.findall(FENCE.sub("", text)))


def findings(root: Path = ROOT) -> list[Finding]:
    """Return what is wrong with the Chinese pages below `root`, broken pages first."""
    there = {path.name for path in (root / FOLDER).glob("*.md")}
    found = [
        Finding(f"{FOLDER}/{name}", "is missing" if name in SOURCES else "is not in SOURCES or OTHERS", broken=True)
        for name in sorted(there ^ (SOURCES.keys() | OTHERS))
        if name not in OTHERS
    ]
    for name in sorted(there & SOURCES.keys()):
        found += _of_page(root, name)
    return sorted(found, key=lambda finding: not finding.broken)


def _of_page(root: Path, name: str) -> list[Finding]:
    page, source = f"{FOLDER}/{name}", SOURCES[name]
    text = (root / page).read_text(encoding="utf-8")
    first = FIRST_LINE.match(text)
    if not first or first[1] != source:
        return [Finding(page, f"must begin with <!-- translates {source} sha256:... --> (16 hexadecimal digits)", True)]
    if not (root / source).exists():
        return [Finding(page, f"translates {source}, which does not exist", broken=True)]
    english = (root / source).read_text(encoding="utf-8")
    found = [Finding(page, f"{difference}; copy it from {source}", True) for difference in _blocks(english, text)]
    if first[2] != digest(english):
        how = f"bring the text up to it, then: python tests/support/translations.py --update {page}"
        return [*found, Finding(page, f"is older than {source}; {how}", broken=False)]
    if outline(text) != outline(english):
        found.append(Finding(page, f"has other headings than {source}", broken=True))
    if other := spans(text) ^ spans(english):
        named = ", ".join(f"`{span}`" for span in sorted(other))
        found.append(Finding(page, f"is not older than {source}, and only one of them has {named}", broken=True))
    return found


def _blocks(english: str, chinese: str) -> list[str]:
    ours, theirs = blocks(chinese), blocks(english)
    if len(ours) != len(theirs):
        return [f"has {len(ours)} code blocks instead of {len(theirs)}"]
    return [
        f"code block {i} differs in more than comments"
        for i, (our, their) in enumerate(zip(ours, theirs, strict=True), 1)
        if our != their
    ]


def update(root: Path, page: str) -> None:
    """Write the digest of today's English page into the first line of `page`, a path below `root`."""
    path = root / page
    source = SOURCES[path.name]
    line = f"<!-- translates {source} sha256:{digest((root / source).read_text(encoding='utf-8'))} -->\n"
    text = path.read_text(encoding="utf-8")
    path.write_text(line + FIRST_LINE.sub("", text, count=1), encoding="utf-8")


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write digests, list findings; return 1 when a page is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [f"{FOLDER}/{name}" for name in SOURCES]
    parser.add_argument(
        "--update", nargs="+", default=[], choices=names, metavar="PAGE", help="one of " + " ".join(names)
    )
    for page in parser.parse_args(arguments).update:
        update(root, page)
    found = findings(root)
    older = sum(not finding.broken for finding in found)
    print(*found, f"Chinese pages: {len(SOURCES)}, older than their English page: {older}", sep="\n")
    return int(any(finding.broken for finding in found))


if __name__ == "__main__":
    sys.exit(main())
