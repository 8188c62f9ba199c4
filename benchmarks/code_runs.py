"""Programs a second that the reward `code` runs, against the goal of 20 on two cores.

200 different programs in 2 scoring processes, two tests each: each test of `Stdin` is a process of its own, and with
`Calls` each program. Started once; the first program is not counted.

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
from rljob_worker.types import Generation, Prompt

GOAL = 20.0
PROCESSES = 2
PROGRAMS = {"Stdin": "print(int(input()) + {0})", "Calls": "def f(n):\n    return n + {0}"}


class NoTokenizer(PreTrainedTokenizerBase):
    """Responses come with their texts."""


def programs_per_second(kind: str, count: int) -> float:
    """Responses that were scored, all as right, in a second."""
    spec = RLJobSpec.model_validate(
        {
            "steps": 1,
            "model": {"path": "none"},
            "data": {"synthetic": {}},
            "rollout": {"promptsPerStep": 1, "samplesPerPrompt": 2, "maxResponseTokens": 8},
            "reward": {"name": "code", "args": {"kind": kind, "tests": "tests"}},
        }
    )
    assert spec.reward is not None
    nothing = Generation(np.zeros(0, np.int64), np.zeros(0, np.float32), "stop")
    samples = []
    for number in range(count + 1):
        program = PROGRAMS[kind].format(number)
        if kind == "Stdin":
            tests: object = [{"input": str(n), "output": str(n + number)} for n in (1, 2)]
        else:
            tests = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1 + number, 2 + number]}
        prompt = Prompt(f"data/{number}", "data", "", (2,), None, spec.reward, row={"tests": tests})
        samples.append(RewardSample(prompt, 0, nothing, f"```python\n{program}\n```"))
    with RewardRunner(spec, NoTokenizer(), processes=PROCESSES) as runner:
        runner.score(samples[:1], time.monotonic() + 60)
        began = time.monotonic()
        results = runner.score(samples[1:], time.monotonic() + 600)
        seconds = time.monotonic() - began
    assert all(result.score == 1 for result in results)
    return count / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    options = parser.parse_args()
    return report(
        [
            Figure(f"programs of the reward code, {kind}", "a second, two processes", rate, GOAL)
            for kind in PROGRAMS
            if (rate := programs_per_second(kind, options.programs))
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
