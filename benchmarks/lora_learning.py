"""Learning of adapters in as many steps as of all parameters, from a model that has begun to learn.

All sides are real jobs of the quickstart with FSDP. A run of `--before` steps trains all parameters; its export is the
model that three others start from: one trains all parameters again, one adapters of rank 8, and one adapters that stay
at zero. A gain is the mean reward of a run's last ten steps less that of all steps of the run whose adapters stay at
zero, which is where both began.

Adapters leave the head and the norm before it as they are, and the norm makes all hidden states as long as each other.
Logits of a head of small values stay small, however a layer is adapted: with the quickstart's own initial values (0.02)
no adapter can reach what all parameters reach. A pretrained model has a head that tells its tokens apart, so the first
run begins with larger values, as `examples/lora.yaml` does. What the head allows is printed: the mean over the symbols
of the largest probability that any hidden state gives them.

    python benchmarks/lora_learning.py [--before N] [--steps N] [--lr RATE] [--initializer-range STD]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from example_runs import ONE_THREAD, run_example
from figures import Figure, report
from safetensors.torch import load_file
from transformers import AutoTokenizer

from rljob_api.metrics import REWARD_KEY
from rljob_worker.data.synthetic import symbol_names

EXAMPLE = "quickstart"
ADAPTERS = "spec.training.lora={rank: 8, alpha: 16}"
RATE, ZERO, INITIAL = 5e-3, 1e-30, 0.1
SYMBOLS = 13
LAST = 10
OF_FULL, STAYS = 0.8, 0.05


def rewards(folder: Path, name: str, steps: int, settings: tuple[str, ...]) -> np.ndarray:
    """Mean reward of each step of a run."""
    common = ("spec.training.backend=FSDP", ONE_THREAD, f"spec.steps={steps}", "spec.checkpoint.everySteps=50")
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


def head_limit(model: Path) -> float:
    """Largest mean reward that hidden states of any kind can have with a model's head and last norm.

    Maximizes log p of each symbol over all normed states, which lie in a ball of radius sqrt(hidden size). It is
    concave there, so that projected gradient ascent ends at the maximum.
    """
    weights = load_file(model / "model.safetensors")
    head = (weights["lm_head.weight"] * weights["model.norm.weight"]).double()
    tokenizer = AutoTokenizer.from_pretrained(model)
    targets = torch.tensor([tokenizer(symbol)["input_ids"][0] for symbol in symbol_names(SYMBOLS)])
    radius = head.shape[1] ** 0.5
    curvature = float(torch.linalg.matrix_norm(head, 2)) ** 2
    states = torch.zeros(len(targets), head.shape[1], dtype=torch.float64)
    for _ in range(2000):
        states += (head[targets] - (states @ head.T).softmax(-1) @ head) / curvature
        states *= (radius / states.norm(dim=1, keepdim=True)).clamp(max=1)
    return float((states @ head.T).softmax(-1).gather(1, targets[:, None]).mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=int, default=50, help="steps of the run before (default 50)")
    parser.add_argument("--steps", type=int, default=50, help="steps of each run that is compared (default 50)")
    parser.add_argument("--lr", type=float, default=RATE, help=f"learning rate of the adapters (default {RATE:g})")
    parser.add_argument(
        "--initializer-range", type=float, default=INITIAL, help=f"of the first model's values (default {INITIAL:g})"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lora-") as name:
        folder = Path(name)
        initial = f"spec.model.random.config.initializer_range={arguments.initializer_range}"
        rewards(folder, "before", arguments.before, (initial,))
        model = exported(folder, "before")
        print(f"the head allows a mean reward of {head_limit(model):.3f}", flush=True)
        # Other prompts than those that the run before has seen.
        start = (f"spec.model={{path: {model}}}", "spec.seed=4321")
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
