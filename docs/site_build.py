"""The documentation as a site: `python docs/site_build.py [--output dist/site]`, which `make docs` calls.

Pages are those of the repository, in their places, so that a link is the same on the site as in a checkout: what a page
links to that is no page (a manifest, a test) is copied beside it. MkDocs builds it strictly: a link or an anchor that
leads nowhere ends the build.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "helm/rljob/README.md")
PICTURES = "docs/images/*.png"
_LINK = re.compile(r"\]\(<?([^)\s>#]+)(?:#[^)\s>]*)?>?\)")
_FOLDER = re.compile(r"(\]\((?![a-z]+:)[^)\s#]*/)\)")
_LISTING = "# {name}\n\n{lines}\n"


def pages() -> list[Path]:
    """All pages."""
    return sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})


def linked(page: Path) -> Iterator[Path]:
    """Files and folders of the repository that a page links to."""
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target):
            path = (page.parent / unquote(target)).resolve()
            if path.is_relative_to(ROOT) and path.exists():
                yield path


def stage(folder: Path) -> None:
    """Copy pages, pictures and what pages link to; a folder that is linked to becomes a page with its files."""
    for path in [*pages(), *ROOT.glob(PICTURES)]:
        _copy(path, folder)
    for page in pages():
        place = folder / page.relative_to(ROOT)
        # MkDocs takes a folder for no page.
        place.write_text(_FOLDER.sub(r"\1README.md)", place.read_text(encoding="utf-8")), encoding="utf-8")
    for path in {path for page in pages() for path in linked(page)} - set(pages()):
        if path.is_file():
            _copy(path, folder)
        elif not (path / "README.md").is_file():
            place = folder / path.relative_to(ROOT)
            place.mkdir(parents=True, exist_ok=True)
            lines = "\n".join(
                f"- `{one.name}`" for one in sorted(path.iterdir()) if not one.name.startswith((".", "_"))
            )
            (place / "README.md").write_text(_LISTING.format(name=path.name, lines=lines), encoding="utf-8")


def _copy(path: Path, folder: Path) -> None:
    place = folder / path.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, place)


def build(output: Path) -> int:
    """Build the site; MkDocs' exit code, which is not 0 where it warned of anything."""
    with tempfile.TemporaryDirectory(prefix="rljob-site-") as scratch:
        stage(Path(scratch) / "pages")
        for name in ("mkdocs.yml", "site_hooks.py"):
            shutil.copyfile(Path(__file__).with_name(name), Path(scratch) / name)
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--site-dir", str(output.resolve())]
        quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        done = subprocess.run(command, cwd=scratch, env=quiet, timeout=600, stderr=subprocess.PIPE, text=True)
    # With --quiet it would count no warnings.
    sys.stderr.writelines(line for line in done.stderr.splitlines(keepends=True) if not line.startswith("INFO"))
    return done.returncode


def main() -> int:
    """Build the site as the command line says."""
    parser = argparse.ArgumentParser(description="Build the documentation's site, strictly.")
    parser.add_argument("--output", type=Path, default=ROOT / "dist" / "site", help="folder, emptied before")
    return build(parser.parse_args().output)


if __name__ == "__main__":
    sys.exit(main())
