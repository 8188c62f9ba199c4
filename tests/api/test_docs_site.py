"""The documentation's site: pages keep their places and links, and what leads nowhere ends the build."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.browser import show
from support.samples import unless_all

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import site_build  # noqa: E402

PYTHON = ROOT / ".venv" / "docs" / "bin" / "python"
needs_generator = pytest.mark.skipif(
    not PYTHON.exists(), reason="`make lint` makes the environment of the documentation's site"
)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing: a browser asks for a dozen files of each page."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The whole site: its folder, and the address that it is served at."""
    folder = tmp_path_factory.mktemp("site")
    command = [PYTHON, ROOT / "docs" / "site_build.py", "--output", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,))
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


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


@needs_generator
@pytest.mark.parametrize("link", ["nowhere.md", "faq.md#nothing-of-this-name"])
def test_a_dead_link_ends_the_build(tmp_path: Path, link: str) -> None:
    """Build two pages: all of them take seconds, and are built by `make lint`."""
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


@needs_generator
def test_a_chinese_page_as_a_browser_shows_it(site: tuple[Path, str], tmp_path: Path) -> None:
    shown = show(f"{site[1]}/docs/zh/first-job.html", tmp_path)
    assert shown.console == []
    assert '<html lang="zh-Hans"' in shown.dom
    assert "<title>集群上的第一个任务 - RLJob</title>" in shown.dom
    assert '<a href="../first-job.html">English</a>' in shown.dom
    assert "中文" in shown.dom.split("<article", 1)[0], "the folder of Chinese pages in the list of pages"


@needs_generator
@unless_all("a browser takes seconds for a page")
def test_every_page_as_a_browser_shows_it(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = site
    wrong = {}
    for path in sorted(folder.rglob("*.html")):
        page = path.relative_to(folder).as_posix()
        shown = show(f"{address}/{page}", tmp_path)
        article = shown.dom.partition("<article")[2]
        if shown.console or len(article) < 100 or ("zh/" in page) != ('<html lang="zh-Hans"' in shown.dom):
            wrong[page] = shown.console or article
    assert not wrong
