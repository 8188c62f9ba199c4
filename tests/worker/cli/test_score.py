"""`rljob score`: a job's rewards over labels and over responses, in the bounds of a run."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_worker.cli.main import main

AT_LAST = 250
"""Seconds for a process to import what it needs, or to end: many times what either takes."""

REWARDS = """
import time
from pathlib import Path

def strict(response, label, level):
    if level == 2:
        raise ValueError("no such level")
    if level == 3:
        time.sleep(60)
    return {"score": float(response == label), "level": level}

def sizes(samples):
    return [float(len(samples)) for _ in samples]

def hangs(response):
    Path("hanging").write_text("")
    time.sleep(600)
"""
MODEL = {
    "random": {
        "config": {
            "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64,
        }
    }
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(REWARDS)
    rows = [{"prompt": f"ask {level}", "label": f"say {level}", "level": level} for level in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held.jsonl").write_text('{"prompt": "ask 1", "label": "one two"}\n')
    (tmp_path / "bare.jsonl").write_text('{"prompt": "ask 1"}\n')
    return tmp_path


def manifest(folder: Path, **spec: Any) -> str:
    path = folder / "job.yaml"
    job = {
        "apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "tried"},
        "spec": {
            "steps": 1, "model": MODEL, "data": {"path": str(folder / "rows.jsonl")}, "reward": {"name": "exact"},
            "rollout": {"promptsPerStep": 2, "samplesPerPrompt": 2, "maxResponseTokens": 8},
            "resources": {"profile": "cpu", "nodes": 1},
        } | spec,
    }  # fmt: skip
    path.write_text(yaml.safe_dump(job))
    return str(path)


def scored(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["score", *arguments, "--json"]) == code, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_labels_of_several_sources_with_their_own_rewards(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    strict = {"python": f"{folder / 'my.py'}:strict", "timeoutSeconds": 1}
    job = manifest(
        folder,
        data={
            "sources": [
                {"path": str(folder / "rows.jsonl"), "reward": strict},
                {"path": str(folder / "bare.jsonl"), "labelKey": None, "reward": {"name": "format"}},
            ]
        },
        reward={"parts": [{"name": "exact"}, {"name": "length", "weight": 0.5, "args": {"limit": 6}}]},
        evaluation={"data": {"path": str(folder / "held.jsonl")}, "everySteps": 1},
    )
    assert main(["score", job, "--json", "--max-errors", "1"]) == 1
    said = capsys.readouterr()
    assert "spec.data.sources[1] (bare): left out: labelKey is null" in said.err
    found = json.loads(said.out)
    rows, held = found["sets"]
    assert rows["scores"] == {"count": 3, "mean": 1.0, "deviation": 0.0, "least": 1.0, "most": 1.0}
    assert rows["parts"]["level"]["mean"] == pytest.approx(5 / 3)
    file = folder / "rows.jsonl"
    assert rows["onError"] == "Fail"
    assert [error["place"] for error in rows["errors"]] == [f"{file}, row 2", f"{file}, row 3"]
    assert rows["errors"][0]["error"].startswith("ValueError: no such level")
    assert rows["errors"][1]["error"] == "no result within reward.timeoutSeconds (1 s)"
    assert held["parts"]["exact"]["mean"] == 1.0
    # Two words and the end token.
    assert held["parts"]["length"]["mean"] == pytest.approx(-3 / 6)
    assert held["scores"]["mean"] == pytest.approx(0.75)
    assert found["failures"] == ["spec.data.sources[0] (rows): 2 errors, more than --max-errors 1"]


def test_the_text_tells_what_errors_mean(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    reward = {"python": f"{folder / 'my.py'}:strict", "onError": "Score", "errorScore": -1, "timeoutSeconds": 1}
    assert main(["score", manifest(folder, reward=reward), "--rows", "3", "--min-mean", "1.5"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"spec.data (rows): 3 responses of {folder / 'rows.jsonl'}"
    assert said[1].startswith("  scored 2  errors 1  in ")
    assert said[2] == "  score  mean 1  std 0  min 1  max 1"
    assert said[4] == "  part level  2 values  mean 0.5  std 0.5  min 0  max 1"
    assert said[5] == "  onError: Score: in a run each of these 1 gets errorScore -1"
    assert said[6].startswith(f"  {folder / 'rows.jsonl'}, row 2: ValueError: no such level (")
    assert said[-1] == "failed: spec.data (rows): the mean is 1, below --min-mean 1.5"


def test_responses_of_a_step_are_scored_by_group(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    def row(uid: str, sample: int, ordinal: int, **more: Any) -> dict[str, Any]:
        return {"prompt_uid": uid, "sample": sample, "ordinal": ordinal, "response": "say", "reward": 2.0} | more

    rows = [row("rows/1", 0, 5), row("rows/0", 0, 6), row("rows/1", 1, 5), row("rows/1", 0, 9, reward=None)]
    file = folder / "step-000001.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(one) + "\n" for one in rows).encode()))
    job = manifest(folder, reward={"python": f"{folder / 'my.py'}:sizes", "batch": True})
    [found] = scored(capsys, job, "--responses", str(file))["sets"]
    assert found["distribution"] == [{"low": 1.0, "high": 1.0, "count": 2}, {"low": 2.0, "high": 2.0, "count": 2}]
    assert found["compared"] == 3
    assert found["other"] == [{"place": f"{file}, line 2", "recorded": 2.0, "score": 1.0}]


def test_a_response_has_the_tokens_that_were_recorded(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    file = folder / "made.jsonl"
    row = {"prompt_uid": "rows/1", "response": "say 1", "response_tokens": 4, "finish_reason": "length"}
    file.write_text(json.dumps(row) + "\n\n" + json.dumps({"prompt_uid": "rows/1", "response": "say 1"}) + "\n")
    job = manifest(folder, reward={"name": "length", "args": {"limit": 8}})
    [found] = scored(capsys, job, "--responses", str(file))["sets"]
    assert [one["low"] for one in found["distribution"]] == [-4 / 8, -3 / 8]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "a JSON object is needed, not list"),
        ('{"prompt_uid": "rows/0"}', "has no 'response'"),
        ('{"response": "x"}', "has no 'prompt_uid'"),
        ('{"prompt_uid": "rows/0", "response": 7}', "'response' is int: text is needed"),
        ('{"prompt_uid": "rows/0", "response": "x", "reward": true}', "'reward' is bool: a number is needed"),
        ('{"prompt_uid": "rows/0", "response": "x", "reward": NaN}', "'reward' is not finite"),
        ('{"prompt_uid": "rows/0", "response": "x", "response_tokens": -1}', "are 0 or more"),
        ('{"prompt_uid": "rows/5", "response": "x"}', "there is no prompt 'rows/5' in the job's data"),
        ('{"prompt_uid": "rows/0", "response": "x", "prompt": "other"}', "the prompt 'rows/0' of the data is another"),
    ],
)
def test_a_wrong_line_is_named(capsys: pytest.CaptureFixture[str], folder: Path, line: str, said: str) -> None:
    file = folder / "made.jsonl"
    file.write_text('{"prompt_uid": "rows/0", "response": "x"}\n' + line + "\n")
    assert main(["score", manifest(folder), "--responses", str(file)]) == 2
    message = capsys.readouterr().err
    assert f"{file}, line 2" in message
    assert said in message


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08", None])
def test_a_file_without_responses(capsys: pytest.CaptureFixture[str], folder: Path, content: bytes | None) -> None:
    file = folder / "made.jsonl"
    if content is not None:
        file.write_bytes(content)
    assert main(["score", manifest(folder), "--responses", str(file)]) == 2
    assert f"--responses: {file}" in capsys.readouterr().err


def test_nothing_to_score(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"prompt": "ask", "label": "no number"}\n')
    assert main(["score", manifest(folder, reward={"name": "gsm8k"})]) == 1
    assert "failed: spec.data (rows): nothing could be scored" in capsys.readouterr().out
    job = manifest(folder, data={"path": str(folder / "bare.jsonl"), "labelKey": None}, reward={"name": "format"})
    assert main(["score", job]) == 2
    assert "spec.data.labelKey: null" in capsys.readouterr().err


def test_an_interrupt_ends_all_and_no_engine_was_imported(folder: Path) -> None:
    reward = {"python": f"{folder / 'my.py'}:hangs", "timeoutSeconds": 600, "writePaths": [str(folder)]}
    job = manifest(folder, reward=reward)
    code = (
        "import sys; from rljob_worker.cli.main import main; code = main(sys.argv[1:]); "
        "print([name for name in ('ray', 'vllm', 'megatron') if name in sys.modules]); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "score", job]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + AT_LAST
        while not (folder / "hanging").exists() and process.poll() is None:
            assert time.monotonic() < deadline, "the reward was not called"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=AT_LAST)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert out == "[]\n"
    assert "Traceback" not in errors
