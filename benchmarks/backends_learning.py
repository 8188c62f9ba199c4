"""Learning of jobs with FSDP: the quickstart beside Megatron's, a critic, pictures, a teacher.

All are real jobs of the examples. What is compared is what each must come to: a reward, how much of the returns a
critic foretells, the KL to a teacher at the end against the first step's; for pictures also a job whose rows have the
picture of another row, from which there is nothing to learn, and for the quickstart the first three steps' gradient
norms of both backends.

    python benchmarks/backends_learning.py [--only quickstart|ppo|vision|distill ...]

`distill` needs the policy of `quickstart` and runs that first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from example_runs import ONE_THREAD, run_example
from figures import Figure, report

from rljob_api.metrics import REWARD_KEY
from rljob_api.spec import SyntheticData
from rljob_api.wire.step_record import StepRecord
from rljob_worker.data.colors import QUESTION, color_rows

FSDP = "spec.training.backend=FSDP"
NORM, EXPLAINED, KL = "train/grad_norm", "critic/explained_variance", "train/teacher_kl"
LAST = 10
FIRST_STEPS, SAME_NORM = 3, 1e-6
COLORS, ROWS, ANSWER = 5, 4096, 2
"""The numbers of `examples/vision.yaml`."""


def values(records: Sequence[StepRecord], metric: str) -> np.ndarray:
    """The metric in each step."""
    return np.array([record.metrics[metric] for record in records], dtype=float)


def smooth(found: np.ndarray) -> float:
    """The highest mean of ten steps side by side."""
    return float(np.convolve(found, np.full(LAST, 1 / LAST), "valid").max())


def quickstart(folder: Path) -> list[Figure]:
    """Hold the first steps to Megatron's, and all of them to the same goal."""
    fsdp = run_example("quickstart", folder, "quickstart", [FSDP, ONE_THREAD])
    megatron = run_example("quickstart", folder, "megatron", [f"spec.steps={FIRST_STEPS}", ONE_THREAD])
    ours, theirs = (values(records[:FIRST_STEPS], NORM) for records in (fsdp, megatron))
    apart = float(np.max(np.abs(ours / theirs - 1)))
    return [
        Figure("quickstart with FSDP: mean reward", "ten steps", smooth(values(fsdp, REWARD_KEY)), 0.9),
        Figure(
            f"its gradient norms in the first {FIRST_STEPS} steps, millionths apart",
            "Megatron's",
            apart / SAME_NORM,
            1,
            at_most=True,
        ),
    ]


def ppo(folder: Path) -> list[Figure]:
    """Learn from one sample of each prompt."""
    records = run_example("ppo", folder, "ppo", [])
    return [
        Figure("PPO, one sample a prompt: mean reward", "ten steps", smooth(values(records, REWARD_KEY)), 0.6),
        Figure("its critic: explained variance", "the last ten steps", values(records, EXPLAINED)[-LAST:].mean(), 0.8),
    ]


def vision(folder: Path) -> list[Figure]:
    """Learn colours of squares, and of those in other rows' pictures."""
    steps = ["spec.steps=60", ONE_THREAD]
    seen = run_example("vision", folder, "vision", steps)
    drawn = color_rows(SyntheticData(task="NameColor", symbols=COLORS, answerSymbols=ANSWER, rows=ROWS))
    with open(folder / "swapped.jsonl", "w") as file:
        for number, ((name, _), (_, picture)) in enumerate(pairwise([*drawn, drawn[0]])):
            (folder / f"{number}.png").write_bytes(picture)
            row = {"prompt": QUESTION, "label": " ".join([name] * ANSWER), "images": f"{number}.png"}
            file.write(json.dumps(row) + "\n")
    data = (
        f"spec.data={{path: {folder}/swapped.jsonl, promptKey: prompt, labelKey: label, imageKey: images,"
        " applyChatTemplate: true}"
    )
    swapped = run_example("vision", folder, "swapped", [*steps, data])
    return [
        Figure("colours of pictures: mean reward", "ten steps", smooth(values(seen, REWARD_KEY)), 0.9),
        Figure(
            "colours of other rows' pictures: mean reward",
            "ten steps; 0.2 by chance",
            smooth(values(swapped, REWARD_KEY)),
            0.4,
            at_most=True,
        ),
    ]


def distill(folder: Path) -> list[Figure]:
    """Learn from the quickstart's policy."""
    teacher = folder / "teacher"
    command = [
        sys.executable,
        "-m",
        "rljob_worker.cli.main",
        "export",
        str(folder / "quickstart"),
        "--to",
        str(teacher),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    kl = values(run_example("distill", folder, "distill", [f"spec.algorithm.distill.teacher.path={teacher}"]), KL)
    return [Figure("distillation: KL to the teacher", "the first step's", kl[-LAST:].mean() / kl[0], 0.1, at_most=True)]


PARTS: Mapping[str, Callable[[Path], list[Figure]]] = {
    "quickstart": quickstart,
    "ppo": ppo,
    "vision": vision,
    "distill": distill,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], help="(default all)")
    chosen = parser.parse_args().only
    if "distill" in chosen and "quickstart" not in chosen:
        chosen = ["quickstart", *chosen]
    figures = []
    with tempfile.TemporaryDirectory(prefix="backends-") as name:
        for part, learn in PARTS.items():
            if part in chosen:
                found = learn(Path(name))
                print(*found, sep="\n", flush=True)
                figures += found
    return report(figures)


if __name__ == "__main__":
    sys.exit(main())
