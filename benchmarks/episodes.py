"""Learning of a small random model in an environment: held-out success, a control, the best fixed list, in minutes.

Each task is an example, run as it is for each seed of noise and model. Beside it stand what the untrained model
reaches, what a model reaches whose rewards are dealt to other episodes of the group (`dealt_anew.py`), and the best of
all fixed lists of moves, which read nothing: success below that proves no reading.

    python benchmarks/episodes.py [--task frozen-lake] [--seeds 1 2 3]

Success is the share of held-out boards: the mean reward of the evaluation, whose rewards are 1 for a board that is
solved and 0 for one that is not.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from example_runs import EXAMPLES, run_example
from figures import Figure, report

from rljob_api.spec import EvaluationSet
from rljob_worker.environments.boards import Board, BoardEnvironment
from rljob_worker.environments.frozen_lake import FrozenLake, LakeSettings
from rljob_worker.environments.sokoban import Sokoban, SokobanSettings

HELD_OUT = "eval/held-out"
DEALT = Path(__file__).with_name("dealt_anew.py")


@dataclass(frozen=True)
class Task:
    """A task to learn.

    Attributes:
        success: held out, at least.
        over_list: above the best fixed list of moves, at least.
        control: held out with rewards dealt anew, at most.
    """

    success: float
    over_list: float
    control: float


TASKS = {"frozen-lake": Task(0.7, 0.1, 0.3), "sokoban": Task(0.3, 0.15, 0.3)}


def held_out_of(example: str) -> tuple[EvaluationSet, int]:
    """The held-out set of an example, and the most moves of an episode."""
    spec = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text())["spec"]
    return EvaluationSet.model_validate(spec["evaluation"]["sets"][0]), spec["episodes"]["maxTurns"]


def environment_of(name: str, args: dict[str, Any]) -> BoardEnvironment:
    """One that is built in."""
    if name == "FrozenLake":
        return FrozenLake(LakeSettings.model_validate(args))
    return Sokoban(SokobanSettings.model_validate(args))


def best_fixed_list(example: str) -> tuple[float, str]:
    """Success of the fixed list of moves that solves most of the held-out boards, and the moves."""
    chosen, turns = held_out_of(example)
    assert chosen.environment is not None
    assert chosen.environment.name is not None
    assert chosen.seeds is not None
    environment = environment_of(chosen.environment.name, chosen.environment.args)
    seeds = range(chosen.seeds.first, chosen.seeds.first + chosen.seeds.count)
    after, solved, first = _moves([environment.make(seed) for seed in seeds], len(environment.names))
    best = (0.0, "")

    def walk(at: np.ndarray, names: tuple[str, ...]) -> None:
        nonlocal best
        best = max(best, (float(solved[at].mean()), " ".join(names)), key=lambda one: one[0])
        if len(names) < turns:
            for number, name in enumerate(environment.names):
                walk(after[at, number], (*names, name))

    walk(first, ())
    return best


def _moves(boards: Sequence[Board], actions: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All that boards can become: what follows each state by each action, which states are solved, each board's first.

    A state is what a board shows: nothing else of these boards changes. One that is over stays as it is.
    """
    states: list[Board] = []
    follows: list[list[int]] = []
    first = []
    for board in boards:
        known = {board.text(): len(states)}
        first.append(len(states))
        states.append(board)
        while len(follows) < len(states):
            here = states[len(follows)]
            row = []
            for action in range(actions):
                there = copy.deepcopy(here)
                if not here.done:
                    there.move(action)
                place = known.setdefault(there.text(), len(states))
                if place == len(states):
                    states.append(there)
                row.append(place)
            follows.append(row)
    return np.array(follows), np.array([state.success for state in states]), np.array(first)


def learned(example: str, folder: Path, name: str, seed: int, *settings: str) -> list[float]:
    """Held-out success of a run, from before training to its end."""
    seeds = [f"spec.seed={seed}", f"spec.model.random.seed={seed}"]
    records = run_example(example, folder, f"{name}-{seed}", [*seeds, *settings])
    return [value for record in records if (value := record.metric(HELD_OUT)) is not None]


def figures_of(example: str, seeds: Sequence[int], folder: Path) -> list[Figure]:
    """The rows of a task."""
    task = TASKS[example]
    fixed, moves = best_fixed_list(example)
    print(f"{example}: the best fixed list of moves ({moves}) solves {fixed:.3f} of the held-out boards", flush=True)
    ends, starts = [], []
    for seed in seeds:
        curve = learned(example, folder, example, seed)
        print(f"{example}, seed {seed}: {' '.join(f'{value:.3f}' for value in curve)}", flush=True)
        starts.append(curve[0])
        ends.append(curve[-1])
    dealt = learned(
        example,
        folder,
        f"{example}-control",
        seeds[0],
        f"spec.reward={{python: '{DEALT}:deal', batch: true}}",
        "spec.evaluation.sets[0].reward={name: environment}",
    )
    print(f"{example}, rewards dealt anew: {' '.join(f'{value:.3f}' for value in dealt)}", flush=True)
    least, note = min(ends), f"of seeds {', '.join(map(str, seeds))}; {max(starts):.2f} at the start"
    return [
        Figure(f"Held-out success of `{example}.yaml`, the least", "all boards", least, task.success, note=note),
        Figure("The same, above the best fixed list", f"{fixed:.2f}", least - fixed, task.over_list),
        Figure("The same, rewards dealt anew", "all boards", dealt[-1], task.control, at_most=True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="frozen-lake", help="(default frozen-lake)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(default 1 2 3)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="episodes-") as name:
        return report(figures_of(arguments.task, arguments.seeds, Path(name)))


if __name__ == "__main__":
    sys.exit(main())
