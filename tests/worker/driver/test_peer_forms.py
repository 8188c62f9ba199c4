"""A run on data and reward functions of TRL, open-r1, verl and slime as they are: nothing is converted."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs import manifest, run
from support.peers import PEERS, SlimeSample, peer


def write_trl(folder: Path) -> dict[str, Any]:
    """A "prompt-only" data set of TRL's, with another column for the reward, as `save_to_disk` writes it."""
    from datasets import Dataset

    rows = [{"prompt": f"the sum of {n} and {n}", "answer": str(2 * n)} for n in range(4)]
    Dataset.from_list(rows).save_to_disk(str(folder / "trl"))
    parts = [{"python": f"{PEERS}/trl.py:{name}", "signature": "Auto"} for name in ("accuracy", "brevity", "length")]
    return {"path": str(folder / "trl"), "name": "trl", "labelKey": None, "reward": {"parts": parts}}


def write_open_r1(folder: Path) -> dict[str, Any]:
    """Columns `problem` and `solution`, as open-r1's recipes name them (`dataset_prompt_column: problem`)."""
    rows = [{"problem": f"what is {n} ?", "solution": f"<answer> {n} </answer>"} for n in range(4)]
    (folder / "open_r1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = [{"python": f"{PEERS}/open_r1.py:{name}", "signature": "Auto"} for name in ("tagged", "accuracy")]
    return {
        "path": str(folder / "open_r1.jsonl"), "promptKey": "problem", "labelKey": "solution",
        "applyChatTemplate": True, "reward": {"parts": parts},
    }  # fmt: skip


def write_verl(folder: Path) -> dict[str, Any]:
    """verl's parquet: `prompt` as a list of messages, `reward_model` and `extra_info` as structs."""
    rows = [
        {
            "data_source": "hard" if n % 2 else "easy", "prompt": [{"role": "user", "content": f"{n} times {n}"}],
            "ability": "math", "reward_model": {"style": "rule", "ground_truth": str(n * n)},
            "extra_info": {"split": "train", "index": n, "tolerance": 1e9},
        }
        for n in range(4)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), folder / "verl.parquet")
    return {
        "path": str(folder / "verl.parquet"), "labelKey": None, "applyChatTemplate": True,
        "reward": {"python": f"{PEERS}/verl.py:compute_score", "signature": "Auto"},
    }  # fmt: skip


def write_slime(folder: Path) -> dict[str, Any]:
    """slime's lines: `prompt`, `label` and `metadata` (`--input-key`, `--label-key`, `--metadata-key`)."""
    rows = [
        {"prompt": [{"role": "user", "content": f"repeat {n}"}], "label": f"repeat {n}", "metadata": {"weight": 0.5}}
        for n in range(4)
    ]
    (folder / "slime.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = {"cut_penalty": 0.25}
    reward = {"python": f"{PEERS}/slime.py:custom_rm", "signature": "Auto", "args": args}
    return {"path": str(folder / "slime.jsonl"), "applyChatTemplate": True, "reward": reward}


def as_trl(row: dict[str, Any]) -> float:
    """The sum of all functions, of which TRL would call each with lists."""
    n, module, texts = int(row["prompt_uid"].partition("/")[2]), peer("trl"), [row["response"]]
    right = module.accuracy(completions=texts, answer=[str(2 * n)])
    short = module.brevity(prompts=[f"the sum of {n} and {n}"], completions=texts)
    return float(right[0] + short[0] + row["response_tokens"])


def as_open_r1(row: dict[str, Any]) -> float:
    """The reward as TRL calls functions where prompts are conversations."""
    n, module = int(row["prompt_uid"].partition("/")[2]), peer("open_r1")
    completions = [[{"role": "assistant", "content": row["response"]}]]
    right = module.accuracy(completions, solution=[f"<answer> {n} </answer>"])
    return float(module.tagged(completions)[0] + right[0])


def as_verl(row: dict[str, Any]) -> float:
    """The reward as `NaiveRewardManager` calls it: with the row's `ground_truth` and `extra_info`."""
    n = int(row["prompt_uid"].partition("/")[2])
    extra = {"split": "train", "index": n, "tolerance": 1e9}
    source = "hard" if n % 2 else "easy"
    return float(peer("verl").compute_score(source, row["response"], str(n * n), extra)["score"])


def as_slime(row: dict[str, Any]) -> float:
    """With a sample that has what slime's would."""
    sample = SlimeSample(
        label=f"repeat {row['prompt_uid'].partition('/')[2]}",
        response=row["response"],
        status=SlimeSample.Status("truncated" if row["finish_reason"] == "length" else "completed"),
    )
    return float(asyncio.run(peer("slime").custom_rm(SimpleNamespace(cut_penalty=0.25), sample)))


DIRECT: dict[str, Callable[[dict[str, Any]], float]] = {
    "trl": as_trl, "open_r1": as_open_r1, "verl": as_verl, "slime": as_slime
}  # fmt: skip


@pytest.mark.slow
def test_a_run_takes_all_four_forms_and_their_functions_as_they_are(tmp_path: Path) -> None:
    sources = [write(tmp_path) for write in (write_trl, write_open_r1, write_verl, write_slime)]
    job = manifest(
        tmp_path,
        steps=2,
        data={"sources": sources},
        reward=None,
        checkpoint={"everySteps": 2, "keep": 1},
        evaluation=None,
        earlyStop=None,
    )
    code, output = run("validate", job)
    assert code == 0, output
    for called in (
        "trl.py:brevity is called as TRL",
        "open_r1.py:tagged is called as TRL",
        "compute_score is called as Verl",
    ):
        assert called in output
    assert "slime.py:custom_rm is called as Slime" in output
    code, output = run("run", job, "--output", tmp_path / "run")
    assert code == 0, output
    rows = [
        json.loads(line)
        for file in sorted((tmp_path / "run" / "trajectories").glob("*.jsonl.gz"))
        for line in gzip.decompress(file.read_bytes()).splitlines()
    ]
    seen = {row["prompt_uid"].partition("/")[0] for row in rows}
    assert seen == set(DIRECT), "every form was sampled from"
    for row in rows:
        expected = DIRECT[row["prompt_uid"].partition("/")[0]](row)
        assert row["reward"] == pytest.approx(expected, rel=1e-6), row
