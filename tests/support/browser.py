"""A page as a browser shows it: headless Chromium, which reaches nothing but what the page is served from."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_SECONDS = 240
_CLOCK_SECONDS = (8, 60, 600)
_NOT_READY = 'data-ready="false"'


@dataclass(frozen=True)
class Shown:
    """A page after its scripts ran."""

    dom: str
    """Its elements, as HTML."""
    console: list[str]
    """Messages of scripts, and of what the page's policy refused."""


def browser() -> str:
    """The program; the test is skipped where there is none, and fails in CI."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        assert not os.environ.get("CI"), "chromium must be installed in CI"
        pytest.skip("needs chromium (apt-get install chromium)")
    return program


def show(address: str, folder: Path, *, picture: Path | None = None) -> Shown:
    """Open a page and give its scripts eight seconds of their clock; more while it says that it is not ready.

    A page says so by `data-ready="false"` of its root.

    Args:
        address: of the page.
        folder: for the browser's own files.
        picture: file of a screenshot, taken in place of the elements.
    """
    output = ["--dump-dom"] if picture is None else [f"--screenshot={picture}"]
    own = [
        f"--user-data-dir={folder / 'browser'}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--window-size=1250,2000",
    ]
    quiet = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    for seconds in _CLOCK_SECONDS:
        # Its clock stands still while a request is under way, and may run ahead of other work of the browser's.
        wait = f"--virtual-time-budget={1000 * seconds}"
        command = [browser(), *quiet, *own, wait, *output, address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        if _NOT_READY not in done.stdout:
            break
    return Shown(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])
