"""Learning to call a tool: held-out answers that are right, with the tool and with one that refuses.

`examples/tools.yaml` has a Python tool, and `examples/tools-mcp.yaml` that of an MCP server over stdio. Nothing of a
held-out row tells its answer but the tool, so that what a model reaches whose tool tells nothing is what it guesses.

    python benchmarks/tool_learning.py [--seeds 1234]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from example_runs import run_example
from figures import Figure, report

HELD_OUT = "eval/held-out"
REACHED, REFUSED = 0.8, 0.3
PLACES = ("spec.data", "spec.evaluation.sets[0]")
EXAMPLES: Mapping[str, Sequence[str]] = {
    "tools": [f"{place}.environment.tools[0].python=./tools.py:Locked" for place in PLACES],
    "tools-mcp": [
        f"{place}.environment.tools[0].mcp.command=[python, examples/tools_server.py, --locked]" for place in PLACES
    ],
}
"""Settings with which the tool of an example tells nothing."""


def learned(example: str, folder: Path, name: str, settings: Sequence[str]) -> list[float]:
    """Held-out answers that are right, from before training to its end."""
    records = run_example(example, folder, name, settings)
    found = [value for record in records if (value := record.metric(HELD_OUT)) is not None]
    print(f"{example}, {name}: {' '.join(f'{value:.3f}' for value in found)}", flush=True)
    return found


def figures_of(example: str, seeds: Sequence[int], folder: Path) -> list[Figure]:
    """The rows of an example."""
    curves, refused = [], []
    for seed in seeds:
        own = [f"spec.seed={seed}"]
        curves.append(learned(example, folder, f"{example}-{seed}", own))
        refused.append(learned(example, folder, f"{example}-{seed}-refused", [*own, *EXAMPLES[example]]))
    note = f"of seeds {', '.join(map(str, seeds))}; {max(curve[0] for curve in curves):.2f} at the start"
    least, most = min(curve[-1] for curve in curves), max(curve[-1] for curve in refused)
    return [
        Figure(f"Held-out answers of `{example}.yaml` that are right, the least", "all", least, REACHED, note=note),
        Figure("The same, with a tool that tells nothing, the most", "all", most, REFUSED, at_most=True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=[*EXAMPLES], help="(default all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234], help="(default 1234)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tools-") as name:
        figures = [one for example in arguments.examples for one in figures_of(example, arguments.seeds, Path(name))]
    return report(figures)


if __name__ == "__main__":
    sys.exit(main())
