"""kill -9 of any process of a job with several ranks, then --resume: the bits are those of the run that was left alone.

Four trainers (tensor parallel 2, pipeline parallel 2), and two that divide experts, while they train, save and hand the
weights over: where one rank may be ahead of another. `make test` tries one kill of the two, drawn by RLJOB_SEED.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import REPOSITORY, events, final_state, manifest, run
from kill_chain import Chain
from support.run_bits import digest_of_trajectories
from support.samples import ALL, SEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PHASES = {"actor_train": 0.05, "checkpoint": 0.012, "update_weights": 0.04}
"""By phase: about how long it takes in these jobs, in seconds; the kill comes at a random instant within."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP 2 x PP 2": (4, {"tensorParallel": 2, "pipelineParallel": 2}),
    "EP 2": (2, {"expertParallel": 2}),
}
"""By name: how many trainers, and fields of `spec.training`."""
EVERY = [
    (layout, process, phase)
    for layout, (ranks, _) in LAYOUTS.items()
    for process in ("driver", *(f"trainer-{rank}" for rank in range(ranks)), "engine-0", "reward")
    for phase in PHASES
]
KILLS = EVERY if ALL else random.Random(SEED).sample([kill for kill in EVERY if kill[0] == "EP 2"], 1)
ATTEMPTS = 5
APART = 4
STEPS = 1 + APART * (1 if not ALL else 2 * len(PHASES) * max(ranks + 3 for ranks, _ in LAYOUTS.values()))
"""Room for kills that hit another phase than the one meant and are tried again."""
REWARD = "def score(response, **_):\n    return len(set(response)) % 3\n"


def spec_of(layout: str, folder: Path) -> dict[str, Any]:
    """A small job in that layout; its reward is a function, which runs in a process of its own."""
    (folder / "ranks_reward.py").write_text(REWARD)
    spec: dict[str, Any] = {
        "steps": STEPS,
        "training": {"precision": "fp32", "globalBatchSize": 8, "optimizer": {"lr": 1.0e-3}, **LAYOUTS[layout][1]},
        "checkpoint": {"everySteps": 2, "keep": STEPS},
        "reward": {"python": "ranks_reward:score"},
        "environment": {"pythonPath": [str(folder)]},
    }
    if layout == "EP 2":
        spec["model"] = yaml.safe_load((REPOSITORY / "examples" / "qwen3-moe-ep2.yaml").read_text())["spec"]["model"]
    return spec


Make = Callable[[str], tuple[Path, Chain]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """By layout, once: the calm run's folder, and a run to be killed."""
    known: dict[str, tuple[Path, Chain]] = {}

    def make(layout: str) -> tuple[Path, Chain]:
        if layout not in known:
            folder = tmp_path_factory.mktemp("ranks")
            spec = spec_of(layout, folder)
            code, output = run("run", manifest(folder, **spec), "--output", folder / "calm")
            assert code == 0, output
            chain = Chain(folder, folder / "calm", spec, LAYOUTS[layout][0], APART)
            known[layout] = folder / "calm", chain
        return known[layout]

    return make


@pytest.mark.parametrize(("layout", "process", "phase"), KILLS)
def test_whoever_of_several_ranks_is_killed_the_checkpoints_are_the_calm_runs(
    layout: str, process: str, phase: str, made: Make
) -> None:
    print(f"RLJOB_SEED={SEED}: {process} of {layout} is killed in {phase}")
    _, chain = made(layout)
    chance = random.Random(f"{SEED}/{layout}/{process}/{phase}")
    for _ in range(ATTEMPTS if ALL else 1):
        kill, output = chain.kill(process, phase, chance.uniform(0.0, PHASES[phase]), ends=process != "reward")
        if process == "reward":
            # Another one takes its place: only the kill of the driver that follows ends this start.
            assert events(chain.run_folder)[-1]["step"] > kill["step"], "the run did not outlive the scoring process"
        elif process != "driver":
            assert f"{process} died" in output, output
        assert chain.compare(), "this start should have saved a checkpoint of its own"
        if kill["alive"] == phase:
            return
    assert not ALL, f"no kill in {ATTEMPTS} hit {phase}: the last hit {kill['alive']}"


@pytest.mark.parametrize("layout", sorted({layout for layout, _, _ in KILLS}))
def test_the_end_of_the_killed_run_is_that_of_the_calm_one(layout: str, made: Make) -> None:
    calm, chain = made(layout)
    chain.go_on_to_the_end()
    assert chain.compare()
    assert final_state(chain.run_folder, LAYOUTS[layout][0]) == final_state(calm, LAYOUTS[layout][0])
    assert digest_of_trajectories(chain.run_folder) == digest_of_trajectories(calm)
