"""Reward functions of other frameworks, run unchanged: the numbers are those that a direct call gives."""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.peers import PEERS, SlimeSample, peer

from rljob_worker.cli.main import main
from rljob_worker.errors import UserError
from rljob_worker.rewards.functions import Score, checked_score
from rljob_worker.rewards.signatures import Signature, recognise

MODEL = {
    "random": {
        "config": {
            "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64,
        }
    }
}  # fmt: skip


def spec_of(folder: Path, reward: dict[str, Any], **data: Any) -> str:
    path = folder / "job.yaml"
    spec = {
        "steps": 1, "model": MODEL, "data": {"path": str(folder / "rows.jsonl")} | data, "reward": reward,
        "rollout": {"promptsPerStep": 2, "samplesPerPrompt": 2, "maxResponseTokens": 8},
        "resources": {"profile": "cpu", "nodes": 1},
    }  # fmt: skip
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "peer"}, "spec": spec}
    path.write_text(yaml.safe_dump(job))
    return str(path)


def scored(
    capsys: pytest.CaptureFixture[str], folder: Path, job: str, responses: list[tuple[int, str, str]]
) -> dict[str, Any]:
    """Scores of responses: (row, text, how it ended)."""
    file = folder / "responses.jsonl"
    lines = [
        {"prompt_uid": f"rows/{row}", "response": text, "finish_reason": end, "response_tokens": len(text.split())}
        for row, text, end in responses
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code = main(["score", job, "--responses", str(file), "--json"])
    said = capsys.readouterr()
    assert code in (0, 1), said.err
    [found] = json.loads(said.out)["sets"]
    return dict(found)


def write_rows(folder: Path, *rows: dict[str, Any]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def in_order(found: dict[str, Any]) -> list[float]:
    """Scores, lowest first."""
    return [count["low"] for count in found["distribution"] for _ in range(count["count"])]


def test_trl(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [{"prompt": "one and one", "label": "x", "answer": "2"}, {"prompt": "open", "label": "x", "answer": None}]
    write_rows(tmp_path, *rows)
    parts = [
        {"python": f"{PEERS / 'trl.py'}:{name}", "signature": "Auto", "weight": weight}
        for name, weight in (("accuracy", 1.0), ("brevity", 0.5))
    ]
    responses = [(0, "it is 2", "stop"), (0, "it is a good deal more than 3", "stop"), (1, "whatever you like", "stop")]
    found = scored(capsys, tmp_path, spec_of(tmp_path, {"parts": parts}), responses)
    trl = peer("trl")
    right, short = [], []
    for row, text, _ in responses:
        right += trl.accuracy(completions=[text], answer=[rows[row]["answer"]])
        short += trl.brevity(prompts=[rows[row]["prompt"]], completions=[text])
    assert right == [1.0, 0.0, None]
    expected = sorted((one or 0.0) + 0.5 * other for one, other in zip(right, short))
    assert in_order(found) == pytest.approx(expected)
    # No score is no zero: it is not in the part's mean.
    assert found["parts"]["accuracy"] == {"count": 2, "mean": 0.5, "deviation": 0.5, "least": 0.0, "most": 1.0}


def test_none_of_a_whole_reward_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_rows(tmp_path, {"prompt": "open", "label": "x", "answer": None})
    one = {"python": f"{PEERS / 'trl.py'}:accuracy", "signature": "TRL"}
    for reward, said in (
        (one, "the reward returned None, which is no score, and there is no other"),
        ({"parts": [one]}, "each part returned None, which is no score"),
    ):
        found = scored(capsys, tmp_path, spec_of(tmp_path, reward), [(0, "2", "stop")])
        assert [error["error"] for error in found["errors"]] == [said]


def test_open_r1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    solution = "<answer>4</answer>"
    write_rows(tmp_path, {"problem": "two and two", "solution": solution})
    parts = [{"python": f"{PEERS / 'open_r1.py'}:{name}", "signature": "Auto"} for name in ("tagged", "accuracy")]
    texts = ["<think>hm</think> <answer>4</answer>", "<answer>4</answer>", "<think>hm</think><answer>5</answer>", "4"]
    keys = {"promptKey": "problem", "labelKey": "solution", "applyChatTemplate": True}
    job = spec_of(tmp_path, {"parts": parts}, **keys)
    found = scored(capsys, tmp_path, job, [(0, text, "stop") for text in texts])
    module = peer("open_r1")
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    right = module.accuracy(completions, solution=[solution] * 4)
    expected = [one + other for one, other in zip(module.tagged(completions), right)]
    assert in_order(found) == sorted(expected) == [0.0, 1.0, 1.0, 2.0]


def test_verl(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = {"style": "rule", "ground_truth": "2"}
    rows = [
        {"prompt": "a", "data_source": "hard", "reward_model": model, "extra_info": {"tolerance": 0.5}},
        {"prompt": "b", "data_source": "easy", "reward_model": model, "extra_info": None},
    ]
    write_rows(tmp_path, *rows)
    reward = {"python": f"{PEERS / 'verl.py'}:compute_score", "signature": "Auto"}
    responses = [(0, "x = 2.25", "stop"), (1, "x = 2.25", "stop"), (1, "x = 2", "stop")]
    found = scored(capsys, tmp_path, spec_of(tmp_path, reward, labelKey=None), responses)
    verl = peer("verl")
    results = [
        verl.compute_score(rows[row]["data_source"], text, "2", rows[row]["extra_info"]) for row, text, _ in responses
    ]
    assert in_order(found) == sorted(result["score"] for result in results) == [0.0, 1.0, 2.0]
    # Text beside the score goes into verl's logs alone.
    assert list(found["parts"]) == ["acc"]


def test_what_verl_could_not_use_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_rows(tmp_path, {"prompt": "a", "data_source": "x", "reward_model": {"ground_truth": "2"}, "extra_info": "{}"})
    reward = {"python": f"{PEERS / 'verl.py'}:compute_score", "signature": "Auto"}
    found = scored(capsys, tmp_path, spec_of(tmp_path, reward, labelKey=None), [(0, "x = 2", "stop")])
    [error] = found["errors"]
    assert error["error"].startswith("ValueError: the row's extra_info is str, not an object")


def test_slime(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_rows(tmp_path, {"prompt": "say", "label": "a b", "metadata": {"weight": 0.5}})
    responses = [(0, "a c d", "stop"), (0, "b a b a", "length")]
    reward = {"python": f"{PEERS / 'slime.py'}:custom_rm", "signature": "Auto", "args": {"cut_penalty": 0.25}}
    found = scored(capsys, tmp_path, spec_of(tmp_path, reward), responses)
    slime, args = peer("slime"), SimpleNamespace(cut_penalty=0.25)
    samples = [
        SlimeSample(
            label="a b",
            response=text,
            response_length=len(text.split()),
            status=SlimeSample.Status("truncated" if end == "length" else "completed"),
            metadata={"weight": 0.5},
        )
        for _, text, end in responses
    ]
    expected = [asyncio.run(slime.custom_rm(args, sample)) for sample in samples]
    assert in_order(found) == sorted(expected) == [0.5, 0.75]
    reward["python"] = f"{PEERS / 'slime.py'}:group_rm"
    found = scored(capsys, tmp_path, spec_of(tmp_path, reward), responses)
    assert in_order(found) == sorted(asyncio.run(slime.group_rm(args, samples))) == [0.5, 0.625]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("trl.py:length", [3.0, 9.0]),
        # The last 4 of 8 tokens.
        ("open_r1.py:overlong", [-1.0, 0.0]),
        # One token of the prompt.
        ("slime.py:answered", [3 / 4, 9 / 10]),
    ],
)
def test_tokens_are_those_of_the_response(
    function: str, expected: list[float], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_rows(tmp_path, {"prompt": "say", "label": "a b"})
    responses = [(0, "a b a", "stop"), (0, "a b a b a b a b a", "length")]
    found = scored(
        capsys, tmp_path, spec_of(tmp_path, {"python": f"{PEERS / function}", "signature": "Auto"}), responses
    )
    assert found["errors"] == []
    assert in_order(found) == pytest.approx(expected)


FILES = {
    "none": {"my.py": "from slime.utils.types import Sample\n"},
    "an installed one": {
        "my.py": "from slime.utils.types import Sample\n",
        "slime/utils/types.py": (
            "from enum import Enum\n"
            "class Sample:\n    Status = Enum('Status', {'COMPLETED': 'completed', 'TRUNCATED': 'truncated'})\n"
        ),
    },
    "a module of one's own": {"my.py": "from slime import Sample\n", "slime.py": "class Sample:\n    Status = None\n"},
}
"""Files beside a reward."""
RM = """
def rm(args, sample: Sample) -> float:
    return 1.0 if sample.status == (Sample.Status or sample.Status).TRUNCATED else 0.0
"""


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_slime_is_not_needed_and_is_used_where_it_is(
    files: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + RM if name == "my.py" else text)
    write_rows(tmp_path, {"prompt": "say", "label": "a b"})
    reward = {"python": f"{tmp_path / 'my.py'}:rm", "signature": "Auto"}
    found = scored(capsys, tmp_path, spec_of(tmp_path, reward), [(0, "a", "stop"), (0, "b", "length")])
    assert (found["errors"], in_order(found)) == ([], [0.0, 1.0])


def test_other_modules_of_slime_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_rows(tmp_path, {"prompt": "say", "label": "a b"})
    (tmp_path / "my.py").write_text("import slime.rollout.rm_hub\ndef rm(args, sample): return 0.0\n")
    job = spec_of(tmp_path, {"python": f"{tmp_path / 'my.py'}:rm", "signature": "Auto"})
    assert main(["score", job]) == 2
    assert "does not import: ModuleNotFoundError: No module named 'slime.rollout'" in capsys.readouterr().err


def test_a_function_that_slime_could_not_call_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_rows(tmp_path, {"prompt": "say", "label": "a b"})
    (tmp_path / "my.py").write_text("def three(args, sample, more): return 0.0\n")
    job = spec_of(tmp_path, {"python": f"{tmp_path / 'my.py'}:three", "signature": "Auto"})
    assert main(["score", job]) == 2
    said = capsys.readouterr().err
    assert "three' is called as f(args, sample), which fails: missing a required argument: 'more'" in said


def test_args_of_slime_have_what_the_manifest_gives_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_rows(tmp_path, {"prompt": "say", "label": "a b"})
    reward = {"python": f"{PEERS / 'slime.py'}:custom_rm", "signature": "Slime"}
    found = scored(capsys, tmp_path, spec_of(tmp_path, reward), [(0, "a", "length")])
    [error] = found["errors"]
    assert error["error"].startswith("AttributeError: args.cut_penalty is not there: `args` has what reward.args has")


@pytest.mark.parametrize(
    ("parameters", "takes_any", "expected"),
    [
        ("response label", False, "RLJob"),
        ("prompt response", True, "RLJob"),
        ("completions", True, "TRL"),
        ("completion_ids", True, "TRL"),
        ("prompts completions answer", False, "TRL"),
        ("completions solution", True, "TRL"),
        ("data_source solution_str ground_truth extra_info", False, "Verl"),
        ("solution_str ground_truth", True, "Verl"),
        ("args sample", False, "Slime"),
        ("args samples", True, "Slime"),
    ],
)
def test_a_function_is_recognised_by_its_parameters(parameters: str, takes_any: bool, expected: str) -> None:
    assert recognise("Auto", parameters.split(), takes_any, False, "f.py:f") == Signature(expected)


@pytest.mark.parametrize(
    ("parameters", "takes_any", "said"),
    [
        ("", True, "**kwargs alone, which fit RLJob and TRL and Verl: set reward.signature"),
        ("completions solution_str", False, "which fit TRL and Verl"),
        ("args sample response", False, "which fit RLJob and Slime"),
        ("sample args", False, "which are those of no framework"),
        ("text", False, "which are those of no framework"),
    ],
)
def test_what_fits_none_or_several_is_refused(parameters: str, takes_any: bool, said: str) -> None:
    with pytest.raises(UserError) as raised:
        recognise("Auto", parameters.split(), takes_any, False, "f.py:f")
    assert str(raised.value).startswith("reward.signature: Auto: 'f.py:f' has the parameters ")
    assert said in str(raised.value)


def test_validate_tells_how_a_function_is_called(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_rows(tmp_path, {"prompt": "say", "label": "a b"})
    (tmp_path / "my.py").write_text("def both(completions, solution_str): ...\n")
    reward = {"python": f"{PEERS / 'trl.py'}:brevity", "signature": "Auto"}
    assert main(["validate", spec_of(tmp_path, reward)]) == 0
    assert (
        "trl.py:brevity is called as TRL calls it: its parameters are prompts, completions" in capsys.readouterr().out
    )
    job = spec_of(tmp_path, {"python": f"{tmp_path / 'my.py'}:both", "signature": "Auto"})
    assert main(["validate", job]) == 2
    assert "spec.reward.signature: Auto" in capsys.readouterr().err
    assert main(["score", job]) == 2
    assert "spec.reward.signature: Auto" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["score", "validate"])
def test_a_column_that_is_not_there_is_named(command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_rows(tmp_path, {"prompt": "say", "label": "a b"})
    job = spec_of(tmp_path, {"python": f"{PEERS / 'trl.py'}:accuracy", "signature": "Auto"})
    assert main([command, job]) == 2
    assert "asks for 'answer', which is neither a column of the data nor in reward.args" in capsys.readouterr().err


def test_prompt_and_label_come_under_their_own_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_rows(tmp_path, {"problem": "one and one", "solution": "2"})
    (tmp_path / "my.py").write_text(
        "def given(completions, problem, solution, **kwargs):\n"
        "    return [float(of == 'one and one' and right == '2') for of, right in zip(problem, solution)]\n"
    )
    reward = {"python": f"{tmp_path / 'my.py'}:given", "signature": "Auto"}
    job = spec_of(tmp_path, reward, promptKey="problem", labelKey="solution")
    assert main(["validate", job]) == 0
    capsys.readouterr()
    assert in_order(scored(capsys, tmp_path, job, [(0, "2", "stop")])) == [1.0]


@pytest.mark.parametrize(
    "value",
    [
        0.5, np.float32(0.5), np.array(0.5), np.array([0.5]), torch.tensor(0.5), 
        torch.tensor([0.5], dtype=torch.bfloat16),
        torch.tensor(0.5, requires_grad=True), Decimal("0.5"), Fraction(1, 2), [0.5], (Fraction(1, 2),),
    ],
    ids=repr,
)  # fmt: skip
def test_numbers_that_are_taken(value: Any) -> None:
    assert checked_score(value) == Score(0.5)
    assert checked_score({"score": value}) == Score(0.5)


@pytest.mark.parametrize(
    "value", [None, "0.5", [], [0.5, 0.5], [[0.5, 1]], np.array([0.5, 1.0]), Decimal("NaN"), Decimal("Infinity"), 1j],
    ids=repr,
)  # fmt: skip
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(ValueError, match=r"number|finite"):
        checked_score(value)
