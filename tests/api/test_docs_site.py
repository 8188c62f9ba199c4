"""The documentation's site: pages keep their places and links, and what leads nowhere ends the build."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import site_build  # noqa: E402

PYTHON = ROOT / ".venv" / "docs" / "bin" / "python"


def test_pages_and_what_they_link_to_are_staged_in_their_places(tmp_path: Path) -> None:
    site_build.stage(tmp_path)
    staged = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"README.md", "CHANGELOG.md", "docs/faq.md", "docs/zh/faq.md", "helm/rljob/README.md"} <= staged
    assert {"examples/quickstart.yaml", "examples/README.md", "docs/images/architecture.png"} & staged
    assert "- `quickstart.yaml`" in (tmp_path / "examples" / "README.md").read_text()
    assert "(examples/)" not in (tmp_path / "README.md").read_text()
    for page in site_build.pages():
        copy = tmp_path / page.relative_to(ROOT)
        lead_nowhere = [path for path in site_build.linked(page) if not (tmp_path / path.relative_to(ROOT)).exists()]
        assert copy.is_file()
        assert not lead_nowhere, page


@pytest.mark.skipif(not PYTHON.exists(), reason="`make lint` makes the environment of the documentation's site")
@pytest.mark.parametrize("link", ["nowhere.md", "faq.md#nothing-of-this-name"])
def test_a_dead_link_ends_the_build(tmp_path: Path, link: str) -> None:
    """Of two pages: all of them take seconds, and are built by `make lint`."""
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import site_build as site\n"
        "site.ROOT, site.PAGES = Path(sys.argv[2]), ('docs/*.md',); sys.exit(site.build(Path(sys.argv[2]) / 'out'))"
    )
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "faq.md").write_text("# FAQ\n\n## A question\n")
    for target, code in (("faq.md#a-question", 0), (link, 1)):
        (tmp_path / "docs" / "README.md").write_text(f"# Pages\n\n[one]({target})\n")
        command = [PYTHON, "-c", program, ROOT / "docs", tmp_path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, done.stderr
    assert link.partition("#")[2] in done.stderr
