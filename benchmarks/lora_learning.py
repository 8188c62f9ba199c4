"""Learning of adapters in as many steps as of all parameters, from a model that has begun to learn.

All sides are real jobs of the quickstart with FSDP. A run of `--before` steps trains all parameters; its export is the
model that three others start from: one trains all parameters again, one adapters of rank 8, and one adapters that stay
at zero. A gain is the mean reward of a run's last ten steps less that of all steps of the run whose adapters stay at
zero, which is where both began.

    python benchmarks/lora_learning.py [--before N] [--steps N] [--lr RATE]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from example_runs import run_example
from figures import Figure, report

from rljob_api.metrics import REWARD_KEY

EXAMPLE = "quickstart"
ADAPTERS = "spec.training.lora={rank: 8, alpha: 16}"
RATE, ZERO = 5e-3, 1e-30
LAST = 10
OF_FULL, STAYS = 0.8, 0.05


def rewards(folder: Path, name: str, steps: int, settings: tuple[str, ...]) -> np.ndarray:
    """Mean reward of each step of a run."""
    common = ("spec.training.backend=FSDP", f"spec.steps={steps}", "spec.checkpoint.everySteps=50")
    found = np.array(
        [record.metrics[REWARD_KEY] for record in run_example(EXAMPLE, folder, name, (*common, *settings))]
    )
    print(f"{name:>7}:", " ".join(f"{value:.3f}" for value in found[LAST - 1 :: LAST]), flush=True)
    return found


def exported(folder: Path, name: str) -> Path:
    """The folder of a run's last weights."""
    command = [sys.executable, "-m", "rljob_worker.cli.main", "export", str(folder / name), "--to", str(folder / "hf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return folder / "hf"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=int, default=50, help="steps of the run before (default 50)")
    parser.add_argument("--steps", type=int, default=50, help="steps of each run that is compared (default 50)")
    parser.add_argument("--lr", type=float, default=RATE, help=f"learning rate of the adapters (default {RATE:g})")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lora-") as name:
        folder = Path(name)
        rewards(folder, "before", arguments.before, ())
        # Other prompts than those that the run before has seen.
        start = (f"spec.model={{path: {exported(folder, 'before')}}}", "spec.seed=4321")
        full = rewards(folder, "full", arguments.steps, start)
        lora = rewards(
            folder, "lora", arguments.steps, (*start, ADAPTERS, f"spec.training.optimizer.lr={arguments.lr}")
        )
        zero = rewards(folder, "zero", arguments.steps, (*start, ADAPTERS, f"spec.training.optimizer.lr={ZERO}"))
    began = float(zero.mean())
    gains = {which: float(found[-LAST:].mean()) - began for which, found in (("full", full), ("lora", lora))}
    moved = abs(float(zero[-LAST:].mean() - zero[:LAST].mean()))
    return report(
        [
            Figure(
                f"Reward gained by adapters of rank 8 in {arguments.steps} steps",
                "all parameters, as many steps",
                gains["lora"] / gains["full"],
                OF_FULL,
                note=f"{gains['lora']:.2f} against {gains['full']:.2f}, from {began:.2f}",
            ),
            Figure(
                "the same, adapters that stay at zero",
                "where they began",
                moved,
                STAYS,
                at_most=True,
                note="difference of mean rewards",
            ),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
