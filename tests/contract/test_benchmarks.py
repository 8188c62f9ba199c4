"""`make benchmarks` measures every row, whatever the rows before it did, and names those that missed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PRELUDE = "from figures import Figure, report\nimport sys\n"
SCRIPTS = {
    "good": "sys.exit(report([Figure('good', 'its peer', 1.25, 1.0)]))",
    "slow": "sys.exit(report([Figure('one', 'peer', 1.0, 2.0), Figure('two', 'peer', 1.0, 2.0, at_most=True)]))",
    "broken": "raise RuntimeError('no rows')",
    "last": "sys.exit(report([Figure('last', 'its peer', 0.5, 1.0, at_most=True)]))",
}


def ended(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    for name in names:
        (folder / f"{name}.py").write_text(PRELUDE + SCRIPTS[name])
    program = (
        "import sys, pathlib, all\n"
        "all.FOLDER = pathlib.Path(sys.argv.pop(1))\n"
        f"all.COMMANDS = {tuple((name,) for name in names)!r}\n"
        "all.commit = lambda: 'abc1234'\n"
        "sys.exit(all.main())"
    )
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
    command = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def test_a_miss_stops_nothing_and_is_named_at_the_end(tmp_path: Path) -> None:
    run = ended(tmp_path, "slow", "broken", "good", "last")

    table, end = run.stdout.split("Measured at abc1234:")[1].split("\nMinutes:")
    assert table.strip().splitlines()[2:] == [
        "| one | peer | 1.00 | at least 2 | missed |",
        "| two | peer | 1.00 | at most 2 | ok |",
        "| good | its peer | 1.25 | at least 1 | ok |",
        "| last | its peer | 0.50 | at most 1 | ok |",
    ]
    assert end.splitlines()[1:] == ["Missed: slow: one", "Missed: broken: ended with exit code 1 and 0 rows"]
    assert run.returncode == 1


def test_it_ends_with_0_when_every_row_holds(tmp_path: Path) -> None:
    run = ended(tmp_path, "good", "last")

    assert (run.returncode, run.stderr) == (0, "")
    assert "Missed" not in run.stdout
