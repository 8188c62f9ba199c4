"""All benchmarks, one after the other: a table of their rows for the README, and at the end the rows that missed.

    python benchmarks/all.py [--only weight_sync ...]

A row that misses its limit does not stop the others. Exits with 1 when one did, or when a benchmark did not get as far
as its rows. Run it with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import HEADER, MISSED

FOLDER = Path(__file__).parent
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("rollout_vs_vllm",),
    # In a process of its own: vLLM's groups of one process meet once.
    ("rollout_vs_vllm", "--case", "large"),
    ("rollout_limit",),
    ("train_vs_megatron",),
    ("train_vs_megatron", "--preset", "medium", "--rounds", "7"),
    ("train_limit",),
    ("train_limit", "--setting", "medium"),
    ("shared_prompts",),
    ("shared_prompts", "--setting", "short"),
    ("fsdp_rows",),
    ("lora_learning",),
    ("backends_learning",),
    ("balance",),
    ("weight_sync",),
    ("weight_sync", "--null"),
    ("arena",),
    ("rounded_fill",),
    ("device_switch", "--device", "cpu", "--gibibytes", "2"),
    ("lanes",),
    ("lanes", "--mode", "Async"),
    ("long_tail",),
    ("episodes",),
    ("episode_faults",),
    ("episode_pace",),
    ("turn_overhead",),
    ("tool_learning",),
    ("peer_trl",),
    ("code_runs",),
    ("run_trace",),
    ("cold_validate",),
    ("operator_scale",),
    ("operator_idle",),
    ("preemption",),
)


@dataclass(frozen=True)
class Outcome:
    """Output of one benchmark."""

    command: str
    rows: Sequence[str]
    exit_code: int
    minutes: float

    @property
    def misses(self) -> Iterator[str]:
        """The rows that missed, or the benchmark where it did not end as one does."""
        missed = [row.split(" | ")[0].removeprefix("| ") for row in self.rows if row.endswith(f"| {MISSED} |")]
        if missed or (self.exit_code == 0 and self.rows):
            yield from (f"{self.command}: {row}" for row in missed)
        else:
            yield f"{self.command}: ended with exit code {self.exit_code} and {len(self.rows)} rows"


def run(command: Sequence[str]) -> Outcome:
    """Run one, with its output passed on."""
    name, *arguments = command
    print(f"\n--- {' '.join(command)}", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(FOLDER / f"{name}.py"), *arguments], stdout=subprocess.PIPE, text=True, errors="replace"
    )
    rows = []
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith("| "):
            rows.append(line.rstrip())
    exit_code = process.wait()
    return Outcome(" ".join(command), rows, exit_code, (time.monotonic() - began) / 60)


def commit() -> str:
    """Commit of the code that was measured."""
    git = ("git", "-C", str(FOLDER))
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True).stdout
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    return head.strip() + (" with changes" if changed else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted({name for name, *_ in COMMANDS})
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these benchmarks alone")
    options = parser.parse_args()
    measured = commit()
    outcomes = [run(command) for command in COMMANDS if command[0] in options.only]
    print(f"\nMeasured at {measured}:\n\n{HEADER}")
    for outcome in outcomes:
        print(*outcome.rows, sep="\n", end="\n" if outcome.rows else "")
    print("\nMinutes:", ", ".join(f"{outcome.command} {outcome.minutes:.1f}" for outcome in outcomes))
    misses = [miss for outcome in outcomes for miss in outcome.misses]
    for miss in misses:
        print(f"Missed: {miss}")
    return int(bool(misses))


if __name__ == "__main__":
    sys.exit(main())
