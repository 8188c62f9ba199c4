"""Mode Async that does not wait for groups at the bound: what is too old is left out or sampled again, and counted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import ONE_AND_ONE, manifest, run
from support.samples import unless_drawn
from support.step_lines import read_steps

from rljob_worker.checkpoints.journal import journal_files, read_journal
from rljob_worker.records.trajectories import read_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, MOST = 16, 1
"""Among the first 16 prompts three are late for three steps and three for one; the last one is not."""
GROUPS, SAMPLES = 1, 2
# Of six prompts the reward of one comes when others have been trained on for three steps, and that of two when another
# has been: by then all tokens are too old, or those that were sampled before the last update of the engine.
REWARD = """\
import asyncio
import time
from pathlib import Path

LOG = Path("{log}")
STEPS_LATE = {{0: 3, 1: 1, 2: 1}}
waiting = []

def steps():
    return LOG.read_bytes().count(b"\\n") if LOG.exists() else 0

async def score(response, prompt, **_):
    # One group at a time, or two would wait for one another; at the end there is none to wait for.
    wanted = steps() + (STEPS_LATE.get(sum(map(ord, prompt)) % 6, 0) if not {{*waiting}} - {{prompt}} else 0)
    patience = time.monotonic() + 10
    waiting.append(prompt)
    while steps() < wanted and time.monotonic() < patience:
        await asyncio.sleep(0.02)
    waiting.remove(prompt)
    return len(set(response)) % 3
"""


@pytest.fixture(
    scope="module",
    params=[pytest.param(limit, marks=unless_drawn(f"groups at the bound: {limit}")) for limit in ("Mask", "Discard")],
)
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("limit")
    (folder / "run").mkdir()
    (folder / "late_for_some.py").write_text(REWARD.format(log=folder / "run" / "steps.jsonl"))
    model = yaml.safe_load(manifest(folder).read_text())["spec"]["model"]
    # The engine's weights are updated while it samples a response: all are long.
    model["random"]["config"]["max_position_embeddings"] = 256
    spec: dict[str, Any] = {
        "steps": STEPS,
        "mode": "Async",
        "model": model,
        "training": {"precision": "fp32", "optimizer": {"lr": 1.0e-3}},
        "rollout": {
            "promptsPerStep": GROUPS,
            "samplesPerPrompt": SAMPLES,
            "maxResponseTokens": 200,
            "ignoreEos": True,
            "staleness": {"max": MOST, "order": "ReadyFirst", "onLimit": request.param},
        },
        "algorithm": {"anchor": "Rollout"},
        "resources": ONE_AND_ONE,
        "checkpoint": {"everySteps": 2, "keep": 2},
        "records": {"trajectoriesEverySteps": 1, "journal": True},
        # It looks at the run's own records, which no reward is given unless it is named.
        "reward": {"python": "late_for_some:score", "timeoutSeconds": 20, "readPaths": [str(folder / "run")]},
        "environment": {"pythonPath": [str(folder)]},
    }
    code, output = run("run", manifest(folder, **spec), "--output", folder / "run")
    assert code == 0, output
    return request.param, folder / "run"


def test_each_prompt_is_trained_on_once_and_nothing_is_learned_from_a_token_that_is_too_old(
    ended: tuple[str, Path],
) -> None:
    limit, folder = ended
    code, output = run("audit", folder)
    assert code == 0, output
    records = read_steps(folder)
    trained = [n for record in records for first, end in record["prompts"]["trained"] for n in range(first, end)]
    assert sorted(trained) == list(range(STEPS * GROUPS))
    totals = dict.fromkeys(("masked_tokens", "discarded_groups", "discarded_tokens", "response_tokens"), 0.0)
    generated = 0.0
    for record in records:
        metrics = record["metrics"]
        assert metrics["rollout/staleness/max"] <= MOST
        masked = 0
        for sample in read_trajectories(folder, record["step"])[1]:
            assert sum(span["tokens"] for span in sample["spans"]) == sample["response_tokens"]
            assert sample["reward"] == len(set(sample["response"])) % 3, "the reward of what was dropped"
            for span in sample["spans"]:
                assert span.get("masked", False) == (record["step"] - 1 - span["version"] > MOST)
                masked += span["tokens"] if span.get("masked") else 0
        assert metrics["rollout/masked_tokens"] == masked
        generated += metrics["rollout/generated_tokens"]
        totals = {name: value + metrics[f"rollout/{name}"] for name, value in totals.items()}
    assert totals["discarded_groups"], "no group was too old"
    assert bool(totals["masked_tokens"]) == (limit == "Mask")
    assert generated == totals["response_tokens"] + totals["discarded_tokens"], "tokens that nobody counted"


def test_a_step_with_tokens_that_were_left_out_is_trained_again_to_its_record(ended: tuple[str, Path]) -> None:
    limit, folder = ended
    masked = [step for step, path in journal_files(folder).items() if read_journal(path).oldest_trained]
    assert bool(masked) == (limit == "Mask")
    if masked:
        for checkpoint in (folder / "checkpoints").iterdir():
            checkpoint.rename(folder.parent / checkpoint.name)
        code, output = run("replay", folder, "--step", str(STEPS))
        assert code == 0, output
        assert re.search(r"trained again: \d+ steps; (\d+) of \1 metrics as in the records", output), output
