"""The time that `rljob validate` takes to name what is wrong in a manifest, in a process that has just started.

Of the manifests in `tests/api/bad_manifests.yaml`, each of which is wrong in one place, some are drawn by a seed and
given to a `rljob validate` each, one after the other. The row is the slowest of them against two seconds.

    python benchmarks/cold_validate.py [--count N] [--seed N]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from figures import Figure, report

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "api"))
from manifests import manifest  # noqa: E402

SECONDS = 2.0
Case = tuple[str, Sequence[str]]
"""The path that is to be named, and settings over the example."""


@dataclass(frozen=True)
class Answer:
    """The time of one process, and whether it named the path."""

    case: Case
    seconds: float
    processor: float
    named: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="manifests")
    parser.add_argument("--seed", type=int, default=0, help="of their draw")
    arguments = parser.parse_args()
    bad: dict[str, list[str | list[str]]] = yaml.safe_load((ROOT / "tests/api/bad_manifests.yaml").read_text())
    cases = [(path, [one] if isinstance(one, str) else one) for path, many in bad.items() for one in many]
    drawn = random.Random(arguments.seed).sample(cases, min(arguments.count, len(cases)))
    with tempfile.TemporaryDirectory(prefix="rljob-validate-") as folder:
        example = Path(folder) / "job.yaml"
        example.write_text(yaml.safe_dump(manifest()))
        answers = [answer(case, example) for case in drawn]
    for one in answers:
        if not one.named:
            print(f"not named: {one.case[0]}: {one.case[1]}")
    return report(figures(answers))


def answer(case: Case, example: Path) -> Answer:
    """`rljob validate` of the example with the case's settings over it."""
    settings = [one if one.startswith("metadata.") else f"spec.{one}" for one in case[1]]
    options = [part for setting in settings for part in ("--set", setting)]
    began, before = time.monotonic(), os.times()
    ended = subprocess.run(
        [str(Path(sys.executable).with_name("rljob")), "validate", str(example), *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )
    after = os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    named = ended.returncode == 2 and case[0] in ended.stdout + ended.stderr
    return Answer(case, time.monotonic() - began, processor, named)


def figures(answers: Sequence[Answer]) -> list[Figure]:
    """The slowest, and how many named the path."""
    seconds = [one.seconds for one in answers]
    processor = [one.processor for one in answers]
    note = (
        f"median {statistics.median(seconds):.2f} s, slowest {max(seconds):.2f} s of {len(answers)}; processor time "
        f"{statistics.median(processor):.2f} s, at most {max(processor):.2f} s"
    )
    named = sum(one.named for one in answers) / len(answers)
    return [
        Figure("slowest cold rljob validate", f"{SECONDS:g} s", max(seconds) / SECONDS, 1.0, at_most=True, note=note),
        Figure("manifests whose place it names", "all of them", named, 1.0),
    ]


if __name__ == "__main__":
    sys.exit(main())
