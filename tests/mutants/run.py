"""Put each fault of this folder into a copy of this checkout, and run the tests that must notice it.

    make test-mutants [MUTANTS='"PART OF A NAME" ...']

Tests run on the unchanged copy before they judge a fault: those that fail there would notice anything. Ends with 1
when a fault was not noticed, or is no longer to be found in the code: then it is to be brought up to date.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants.fault import Fault
from mutants.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900
SIDE_BY_SIDE = 2
TESTS_FAILED = 1
"""pytest's exit code; the others mean that no test has judged."""


def copy_checkout(folder: Path) -> None:
    """All files that git tracks, or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run_tests(folder: Path, tests: str, expected: Collection[int]) -> int:
    """pytest's exit code in the copy; with another one than expected, its output is printed."""
    path = os.pathsep.join(str(folder / part) for part in ("crds", "operator", "worker"))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    # Bytecode of the code before the fault would be taken for that of the code with it: they can be of one second.
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "RLJOB_FAULTS": "named"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    code = done.returncode
    if code < 0 and re.search(r"^\d+ failed.* in [\d.]+s", done.stdout, re.MULTILINE):
        # They have judged; what the fault left in the process ended it afterwards.
        code = TESTS_FAILED
    if code not in expected:
        print(done.stdout[-3000:], done.stderr[-2000:], flush=True)
    return code


def problem_with(fault: Fault, folder: Path) -> str:
    """Why the fault went unnoticed, or an empty string."""
    path = folder / fault.file
    text = path.read_text() if path.exists() else ""
    if (count := text.count(fault.old)) != 1:
        return f"its text stands {count} times in {fault.file}"
    path.write_text(text.replace(fault.old, fault.new))
    try:
        code = run_tests(folder, fault.tests, (0, TESTS_FAILED))
    except subprocess.TimeoutExpired:
        return f"its tests did not end in {SECONDS} s"
    finally:
        path.write_text(text)
    return {TESTS_FAILED: "", 0: f"not noticed by {fault.tests}"}.get(code, f"pytest ended with {code}")


def judge(faults: Sequence[Fault], copies: threading.local, scratch: Path) -> int:
    """Number of these faults, which have the same tests, that were not caught; prints a line for each."""
    if not hasattr(copies, "folder"):
        copies.folder = Path(tempfile.mkdtemp(dir=scratch))
        copy_checkout(copies.folder)
    began = time.monotonic()
    if code := run_tests(copies.folder, faults[0].tests, (0,)):
        print(f"MISSED: without any fault, pytest ends with {code}: {faults[0].tests}", flush=True)
        return len(faults)
    uncaught = 0
    for fault in faults:
        problem = problem_with(fault, copies.folder)
        uncaught += bool(problem)
        verdict = f"MISSED: {problem}" if problem else "caught"
        print(f"{time.monotonic() - began:4.0f}s  {fault.name}: {verdict}", flush=True)
        began = time.monotonic()
    return uncaught


def main(parts: list[str]) -> int:
    """Number of faults that were not caught."""
    faults = [fault for fault in FAULTS if not parts or any(part in fault.name for part in parts)]
    if not faults:
        sys.exit(f"no fault of faults.py has one of these in its name: {', '.join(parts)}")
    by_tests = defaultdict(list)
    for fault in faults:
        by_tests[fault.tests].append(fault)
    copies = threading.local()
    with tempfile.TemporaryDirectory(prefix="rljob-mutants-") as scratch, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        uncaught = sum(pool.map(lambda alike: judge(alike, copies, Path(scratch)), by_tests.values()))
    print(f"{len(faults) - uncaught} of {len(faults)} faults caught")
    return uncaught


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
