"""Faults of a run, then --resume: each checkpoint is that of the same job's run to which nothing happened.

Rows and columns: `fault_rows.py`. RLJOB_SEED draws a row, and faults of it; `make test-faults` has all.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from calm_runs import calm_run
from fault_rows import DEADLINE, DRAWN_ROWS, Cell, cells_of, steps_of
from jobs import final_state, run
from kill_chain import IMPATIENT, Chain
from support.run_bits import digest_of_trajectories
from support.samples import ALL, SEED
from support.step_lines import read_steps
from support.trace_rules import check_trace

from rljob_worker.checkpoints.reader import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

CELLS = [pytest.param(name, cell, id=f"{name}-{cell}") for name in DRAWN_ROWS for cell in cells_of(name)]
ATTEMPTS = 5
PAUSES = [
    # process, phase, seconds; a driver may be away for longer than any deadline
    ("driver", "actor_train", DEADLINE + 1.5),
    ("trainer-0", "actor_train", 2.5),
    ("trainer-0", "update_weights", 2.5),
    ("engine-0", "rollout", 2.5),
    ("engine-0", "update_weights", 2.5),
    ("reward", "rollout", 2.5),
]
PAUSED = PAUSES if ALL else random.Random(f"{SEED} pauses").sample(PAUSES, 2)
Chains = Callable[[str], tuple[Path, Chain]]


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Chains:
    """By row, once: the calm run's folder, and a run to be harmed."""
    known: dict[str, tuple[Path, Chain]] = {}

    def make(name: str) -> tuple[Path, Chain]:
        if name not in known:
            calm = calm_run(name, tmp_path_factory)
            known[name] = calm, Chain(name, tmp_path_factory.mktemp("chain"), calm)
        return known[name]

    return make


@pytest.mark.parametrize(("name", "cell"), CELLS)
def test_a_run_that_was_harmed_saves_what_the_calm_run_saved(name: str, cell: Cell, chains: Chains) -> None:
    _, chain = chains(name)
    chance = random.Random(f"{SEED} {name} {cell}")
    tried = ATTEMPTS if ALL and chain.row.exact and cell.column == "SIGKILL" else 1
    for _ in range(tried):
        hit = chain.strike(cell, chance.uniform(0.0, cell.lasts))
        print(f"RLJOB_SEED={SEED}: {name}, {cell}: in {hit}")
        assert chain.compare(), "this start should have saved a checkpoint of its own"
        if hit == cell.phase:
            return
    assert tried == 1, f"no fault in {tried} hit {cell.phase}: the last hit {hit}"


@pytest.mark.parametrize("name", DRAWN_ROWS)
def test_a_run_that_was_harmed_often_ends_as_the_calm_run(name: str, chains: Chains) -> None:
    calm, chain = chains(name)
    if chain.row.pauses:
        go_on_with_pauses(chain)
    else:
        chain.go_on_to_the_end()
    assert chain.compare()
    harmed = chain.run_folder
    assert final_state(harmed, chain.row.ranks) == final_state(calm, chain.row.ranks)
    carried = [Checkpoints(one / "checkpoints").latest() for one in (harmed, calm)]
    assert json.dumps(carried[0].carried) == json.dumps(carried[1].carried)  # type: ignore[union-attr]
    for folder in (harmed, calm):
        code, output = run("audit", folder)
        assert code == 0, output
    assert read_steps(harmed)[-1].get("prompts") == read_steps(calm)[-1].get("prompts")
    assert evaluated(harmed) == evaluated(calm), "no evaluation is lost"
    assert digest_of_trajectories(harmed) == digest_of_trajectories(calm)
    lost = any(cell.column == "SIGKILL" and cell.process in ("driver", "reward") for cell in cells_of(name))
    named = {event["name"] for event in check_trace(harmed)}
    assert "killed, or lost" in named or not lost


def go_on_with_pauses(chain: Chain) -> None:
    """SIGSTOP, and SIGCONT after a while: the run goes on where it was."""
    first = chain.next_step()
    code, output = chain.go_on(
        [
            {"do": "stall", "process": process, "phase": phase, "step": first + number, "seconds": seconds}
            for number, (process, phase, seconds) in enumerate(PAUSED)
        ],
        IMPATIENT,
    )
    assert code == 0, output
    took = {record["step"]: record["step_seconds"] for record in read_steps(chain.run_folder)}
    for number, (process, phase, seconds) in enumerate(PAUSED):
        assert took[first + number] > 0.9 * seconds, f"{process} was not stopped in {phase}"


def evaluated(folder: Path) -> set[int]:
    """Steps with an evaluation on record."""
    records = read_steps(folder)
    return {record["step"] for record in records if any(name.startswith("eval/") for name in record["metrics"])}


@pytest.mark.parametrize("name", ["colocated"] if "colocated" in DRAWN_ROWS else [])
def test_the_row_with_oversampling_leaves_groups_out_and_samples_others(name: str, chains: Chains) -> None:
    calm, _ = chains(name)
    metrics = [record["metrics"] for record in read_steps(calm)]
    assert any(m["rollout/filtered_groups"] for m in metrics), "nothing was filtered"
    assert any(m.get("rollout/filtered_by_function_groups") for m in metrics), "the function left nothing out"
    assert any(m["rollout/surplus_groups"] for m in metrics), "nothing was sampled again"
    assert any(m["rollout/rounds"] > 1 for m in metrics), "one round was always enough"
    assert evaluated(calm) == set(range(2, steps_of(name) + 1, 2))
