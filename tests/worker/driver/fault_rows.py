"""The fault matrix: rows are manifests, one for each policy and layout; columns are what goes wrong in a run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from jobs import ONE_AND_ONE, REPOSITORY
from support.samples import ALL, SEED, drawn

APART = 4
"""Steps between two faults: a checkpoint is due at each second one, so that every start saves one of its own."""
A_RUN = 2
"""Faults of a row that `make test` draws: a SIGKILL, and a SIGSTOP or SIGTERM. With the library by which writes fail
all is imported once more: `make test` has a full disk in test_damaged_checkpoint.py alone."""
DEADLINE = 8
"""Seconds for a phase, and for a reward to score one sample, where a process is stopped."""
REWARD = """\
def score(response, **_):
    return len(set(response)) % 3

def rare(response, **_):
    return float("b" in response)

def keep(rewards, prompt, label):
    assert len(set(rewards)) > 1, "another filter takes it"
    return sum(map(ord, prompt + label)) % 4 > 0
"""
"""Reward by a given letter, which a third of the groups of four responses lack: their rewards are equal."""
EVALUATION = {"everySteps": 2, "maxPrompts": 2, "data": {"synthetic": {"rows": 8, "seed": 5}}}
UNLEARNED = 1.0e-5
"""Learning rate of a row whose filter needs groups of unequal rewards in hundreds of steps: a weight moves by about the
rate in a step, so by 0.002 in all, and no sequence of bits solves the reward."""
FILTERS = {"filter": "ZeroVariance", "function": "letters:keep"}
FP32 = {"precision": "fp32", "optimizer": {"lr": 1.0e-3}}


@dataclass(frozen=True)
class Cell:
    """A fault: SIGKILL, SIGSTOP for good, SIGTERM, or a disk that takes no more of a checkpoint."""

    column: str
    process: str
    phase: str
    lasts: float = 0.0
    """About how long the phase takes, in seconds: the fault comes at a random instant within."""

    def __str__(self) -> str:
        return f"{self.column}-{self.process}-{self.phase}"


@dataclass(frozen=True)
class Row:
    """A manifest, and what may go wrong in it.

    Args:
        spec: fields of the job but for steps and checkpoints, for a folder where its modules may lie.
        cells: all of `make test-faults`.
        ranks: trainers, each with a file in a checkpoint.
        drawn: whether `make test` may draw it.
        exact: whether phases are long enough for a kill to be tried again until it hits the one meant.
        report: whether the calm run draws its report.
        pauses: steps at the end in which processes are stopped for a while.
    """

    spec: Callable[[Path], dict[str, Any]]
    cells: tuple[Cell, ...]
    ranks: int = 1
    drawn: bool = True
    exact: bool = False
    report: bool = False
    pauses: int = 0


def kills(processes: tuple[str, ...], phases: dict[str, float]) -> tuple[Cell, ...]:
    """A SIGKILL of each in each phase."""
    return tuple(Cell("SIGKILL", process, phase, phases[phase]) for process, phase in product(processes, phases))


def scored(folder: Path, function: str = "score") -> dict[str, Any]:
    """A reward that is a function, which runs in a process of its own."""
    (folder / "letters.py").write_text(REWARD)
    reward = {"python": f"letters:{function}", "timeoutSeconds": DEADLINE}
    return {"reward": reward, "environment": {"pythonPath": [str(folder)]}}


def model_of(example: str) -> Any:
    return yaml.safe_load((REPOSITORY / "examples" / example).read_text())["spec"]["model"]


def _colocated(folder: Path) -> dict[str, Any]:
    return scored(folder, "rare") | {
        "algorithm": {"name": "grpo", "kl": {"coefficient": 0.01}},
        "training": {"precision": "fp32", "globalBatchSize": 8, "optimizer": {"lr": UNLEARNED, "schedule": "linear"}},
        "rollout": {**ROLLOUT, "oversampling": {**FILTERS, "factor": 1.5, "limit": 50}},
        "evaluation": EVALUATION,
    }


def _of_ranks(layout: dict[str, Any], example: str | None = None, **resources: int) -> Callable[[Path], dict[str, Any]]:
    more: dict[str, Any] = {} if example is None else {"model": model_of(example)}
    if resources:
        more["resources"] = {"profile": "cpu", "nodes": 1, **resources}
    return lambda folder: scored(folder) | {"training": {**FP32, "globalBatchSize": 8, **layout}} | more


def _growing(rollout: dict[str, Any], **more: Any) -> Callable[[Path], dict[str, Any]]:
    """A filter takes groups of it; two engines."""
    groups = {"promptsPerStep": 4, "samplesPerPrompt": 4, "oversampling": {"filter": "ZeroVariance", "limit": 50}}
    return lambda folder: {
        "training": FP32,
        "rollout": {**groups, **rollout},
        "resources": {"profile": "cpu", "nodes": 1, "devicesPerNode": 2},
        "evaluation": EVALUATION,
        **more,
    }


def _lockstep(folder: Path) -> dict[str, Any]:
    return {
        **APART_SPEC,
        "mode": "Disaggregated",
        "rollout": {**ROLLOUT, "staleness": {"max": 1}},
        "resources": {**ONE_AND_ONE, "trainer": {"devicesPerNode": 2}},
    }


def _episodes(folder: Path) -> dict[str, Any]:
    lake = {"name": "FrozenLake", "args": {"size": 3, "instructions": False}, "processes": 2, "perProcess": 16}
    held_out = {"seeds": {"first": 5000, "count": 8}, "applyChatTemplate": True, "environment": lake}
    return {
        "data": {"seeds": {"count": 1000}, "applyChatTemplate": True, "environment": lake},
        "reward": {"name": "environment"},
        "episodes": {"maxTurns": 4, "maxTokensPerTurn": 2, "maxTokens": 63},
        "rollout": {"promptsPerStep": 4, "samplesPerPrompt": 4, "maxResponseTokens": 2},
        "training": {**FP32, "globalBatchSize": 8},
        "evaluation": {"everySteps": 2, "data": held_out},
    }


ROLLOUT = {"promptsPerStep": 4, "samplesPerPrompt": 4, "maxResponseTokens": 4, "ignoreEos": True}
APART_SPEC: dict[str, Any] = {
    "algorithm": {"name": "grpo", "kl": {"coefficient": 0.01}},
    "training": {**FP32, "globalBatchSize": 8},
    "evaluation": {**EVALUATION, "atStart": True},
}
"""Fields of jobs with devices of their own: an evaluation in the engines' lane, a reference model in the trainers'."""
PARTIAL = {"maxResponseTokens": 24, "partial": {"factor": 2.5}, "staleness": {"max": 2}}
TAIL = {"maxResponseTokens": 48, "tail": {"deferLongest": 0.4}}
COLOCATED_PHASES = {
    "rollout": 0.03,
    "reward": 0.0,
    "rollout_sleep": 0.002,
    "wake_up": 0.001,
    "ref_log_probs": 0.01,
    "log_probs": 0.01,
    "actor_train": 0.04,
    "checkpoint": 0.005,
    "rollout_wake_weights": 0.001,
    "update_weights": 0.01,
    "sleep": 0.001,
    "rollout_wake_kv": 0.001,
    "eval": 0.01,
}
RANK_PHASES = {"actor_train": 0.05, "checkpoint": 0.012, "update_weights": 0.04}
"""Phases in which one rank may be ahead of another."""
EPISODE_PHASES = {"rollout": 0.3, "actor_train": 0.05, "update_weights": 0.01, "checkpoint": 0.005}
"""Environments are waited for within the rollout."""
GROWING_PHASES = {"rollout": 0.1, "reward": 0.0, "actor_train": 0.05, "checkpoint": 0.005, "update_weights": 0.01}
GROWING = (
    *kills(("driver", "trainer-1", "engine-0", "engine-1"), GROWING_PHASES),
    Cell("SIGSTOP", "engine-1", "rollout"),
    Cell("SIGTERM", "driver", "rollout", 0.1),
    Cell("disk", "trainer-0", "checkpoint"),
)
ROWS: dict[str, Row] = {
    "colocated": Row(
        _colocated,
        (
            *kills(("driver", "trainer-0", "engine-0"), COLOCATED_PHASES),
            *(Cell("SIGSTOP", *place) for place in (("trainer-0", "actor_train"), ("engine-0", "rollout"))),
            Cell("SIGSTOP", "reward", "rollout"),
            Cell("SIGSTOP", "driver", "actor_train"),
            Cell("SIGTERM", "driver", "rollout", 0.03),
            Cell("disk", "trainer-0", "checkpoint"),
        ),
        exact=True,
        pauses=6,
    ),
    "experts on two": Row(
        _of_ranks({"expertParallel": 2}, "qwen3-moe-ep2.yaml"),
        (
            *kills(("driver", "trainer-0", "trainer-1", "engine-0", "reward"), RANK_PHASES),
            Cell("SIGSTOP", "trainer-1", "actor_train"),
            Cell("SIGTERM", "driver", "actor_train", 0.05),
            Cell("disk", "trainer-1", "checkpoint"),
        ),
        ranks=2,
        exact=True,
    ),
    "tensor by pipeline": Row(
        _of_ranks({"tensorParallel": 2, "pipelineParallel": 2}),
        kills(("driver", *(f"trainer-{rank}" for rank in range(4)), "engine-0", "reward"), RANK_PHASES),
        ranks=4,
        drawn=False,
        exact=True,
    ),
    "rows on two": Row(
        _of_ranks({"backend": "FSDP"}, "fsdp.yaml", devicesPerNode=2),
        kills(("driver", "trainer-0", "trainer-1", "engine-0"), RANK_PHASES),
        ranks=2,
        drawn=False,
        exact=True,
    ),
    "adapters on two": Row(
        _of_ranks({"backend": "FSDP", "lora": {"rank": 4, "alpha": 8}}, "fsdp.yaml", devicesPerNode=2),
        kills(("driver", "trainer-0", "trainer-1", "engine-0"), RANK_PHASES),
        ranks=2,
        drawn=False,
        exact=True,
    ),
    "context on two": Row(
        _of_ranks({"contextParallel": 2}, devicesPerNode=2),
        kills(("driver", "trainer-0", "trainer-1", "engine-0"), RANK_PHASES),
        ranks=2,
        drawn=False,
        exact=True,
    ),
    "partial": Row(_growing(PARTIAL), GROWING, ranks=2),
    "tail": Row(_growing(TAIL), GROWING, ranks=2),
    # A checkpoint has the experts of responses that are complete and not trained on yet.
    "partial with experts": Row(
        _growing({**PARTIAL, "routerReplay": True}, model=model_of("router-replay.yaml")),
        GROWING,
        ranks=2,
        drawn=False,
    ),
    "episodes": Row(
        _episodes,
        (
            *kills(("driver", "trainer-0", "engine-0", "environment"), EPISODE_PHASES),
            *kills(("driver", "environment"), {"eval": 0.1}),
            Cell("SIGSTOP", "engine-0", "rollout"),
            Cell("SIGTERM", "driver", "rollout", 0.3),
        ),
        drawn=False,
    ),
    "lockstep": Row(
        _lockstep,
        (
            *kills(("driver", "trainer-1", "engine-0"), {"actor_train": 0.04}),
            *kills(("driver", "trainer-0", "engine-0"), {"update_weights": 0.005}),
            *kills(("driver", "engine-0"), {"rollout": 0.05}),
            *kills(("driver",), {"reward_wait": 0.0, "admission_wait": 0.01, "batch_wait": 0.02}),
            *kills(("driver", "trainer-0"), {"checkpoint": 0.01}),
            *kills(("driver", "engine-0"), {"eval": 0.0}),
            Cell("SIGSTOP", "engine-0", "rollout"),
            Cell("SIGTERM", "driver", "actor_train", 0.04),
            Cell("disk", "trainer-1", "checkpoint"),
        ),
        ranks=2,
        report=True,
    ),
}
DRAWN_ROWS = list(ROWS) if ALL else drawn("rows", [name for name, row in ROWS.items() if row.drawn])
"""Rows in which something goes wrong in this run of the tests. Mode Async above staleness 0 has no bits that two runs
share: test_async.py has its faults."""


def cells_of(name: str) -> tuple[Cell, ...]:
    """The faults of a row in this run of the tests: all, or some of a column each."""
    row = ROWS[name]
    if ALL or name not in DRAWN_ROWS:
        return row.cells if ALL else ()
    chance = random.Random(f"{SEED} {name}")
    columns = "SIGKILL", chance.choice(["SIGSTOP", "SIGTERM"])
    return tuple(chance.choice([cell for cell in row.cells if cell.column == column]) for column in columns)


def steps_of(name: str) -> int:
    """Steps of a row: room for its faults, for kills that are tried again, and for the end."""
    row = ROWS[name]
    faults = (2 if row.exact else 1) * len(row.cells) if ALL else A_RUN
    return APART * (faults + 1) + row.pauses


def spec_of(name: str, folder: Path, save_every: int = 2) -> dict[str, Any]:
    """A row's fields of `spec`; its modules are written to the folder."""
    steps = steps_of(name)
    return ROWS[name].spec(folder) | {"steps": steps, "checkpoint": {"everySteps": save_every, "keep": steps}}
