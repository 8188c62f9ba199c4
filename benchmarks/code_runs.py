"""Programs a second that the reward `code` runs, against the goal of 20 on two cores, and how soon a bomb is ended.

200 different programs in 2 scoring processes, two tests each: each test of `Stdin` is a process of its own, and with
`Calls` each program. Started once; the first program is not counted. A bomb has one test, and is followed by a right
program in the same scoring process, which is to score 1.

    python benchmarks/code_runs.py [--programs N]
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
from figures import Figure, report
from transformers import PreTrainedTokenizerBase

from rljob_api.spec import RLJobSpec
from rljob_worker.rewards.runner import RewardRunner
from rljob_worker.rewards.score_calls import RewardSample
from rljob_worker.rewards.scorers import Scorers
from rljob_worker.types import Generation, Prompt

GOAL, BOMB_SECONDS = 20.0, 2.0
PROCESSES = 2
PROGRAMS = {"Stdin": "print(int(input()) + {0})", "Calls": "def f(n):\n    return n + {0}"}
BOMBS = {
    "forks": "import os\nwhile True:\n    os.fork()",
    "10 GB": "held = [bytes(2**20) for _ in range(10 * 2**10)]",
    "10^9 lines": "for number in range(10**9):\n    print(number)",
    "10,000 files": "for number in range(10_000):\n    open(str(number), 'w').close()",
}


class NoTokenizer(PreTrainedTokenizerBase):
    """Responses come with their texts."""


def spec_of(kind: str) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            "steps": 1,
            "model": {"path": "none"},
            "data": {"synthetic": {}},
            "rollout": {"promptsPerStep": 1, "samplesPerPrompt": 2, "maxResponseTokens": 8},
            "reward": {"name": "code", "args": {"kind": kind, "tests": "tests"}},
        }
    )


def sample(spec: RLJobSpec, number: int, program: str, tests: object) -> RewardSample:
    assert spec.reward is not None
    nothing = Generation(np.zeros(0, np.int64), np.zeros(0, np.float32), "stop")
    prompt = Prompt(f"data/{number}", "data", "", (2,), None, spec.reward, row={"tests": tests})
    return RewardSample(prompt, 0, nothing, f"```python\n{program}\n```")


def programs_per_second(kind: str, count: int) -> float:
    """Responses that were scored, all as right, in a second."""
    spec, samples = spec_of(kind), []
    for number in range(count + 1):
        if kind == "Stdin":
            tests: object = [{"input": str(n), "output": str(n + number)} for n in (1, 2)]
        else:
            tests = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1 + number, 2 + number]}
        samples.append(sample(spec, number, PROGRAMS[kind].format(number), tests))
    with RewardRunner(Scorers(spec, NoTokenizer(), processes=PROCESSES)) as runner:
        runner.score(samples[:1], time.monotonic() + 60)
        began = time.monotonic()
        results = runner.score(samples[1:], time.monotonic() + 600)
        seconds = time.monotonic() - began
    assert all(result.score == 1 for result in results)
    return count / seconds


def bomb_seconds() -> dict[str, float]:
    """Seconds from a bomb's begin to its verdict, by its name."""
    spec, found = spec_of("Stdin"), {}
    tests = [{"input": "1", "output": "2"}]
    right = sample(spec, 0, PROGRAMS["Stdin"].format(1), tests)
    with RewardRunner(Scorers(spec, NoTokenizer(), processes=1)) as runner:
        runner.score([right], time.monotonic() + 60)
        for name, program in BOMBS.items():
            began = time.monotonic()
            (bomb,) = runner.score([sample(spec, 1, program, tests)], began + 60)
            found[name] = time.monotonic() - began
            (after,) = runner.score([right], time.monotonic() + 60)
            assert (bomb.score, after.score) == (0, 1), name
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    options = parser.parse_args()
    figures = [
        Figure(f"programs of the reward code, {kind}", "a second, two processes", rate, GOAL)
        for kind in PROGRAMS
        if (rate := programs_per_second(kind, options.programs))
    ]
    bombs = bomb_seconds()
    note = ", ".join(f"{name} {seconds:.2f}" for name, seconds in bombs.items())
    what = "Seconds until a bomb is ended, the most"
    return report([*figures, Figure(what, "all", max(bombs.values()), BOMB_SECONDS, at_most=True, note=note)])


if __name__ == "__main__":
    sys.exit(main())
