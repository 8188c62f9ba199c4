from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from record_cases import write_run, write_sample_tokens, write_samples

from rljob_api.safe_text import visible
from rljob_worker.cli.main import main
from rljob_worker.cli.samples import ratio_text, sample_text, step_text, tokens_text
from rljob_worker.records.token_files import SampleTokens


@pytest.mark.parametrize(
    ("spans", "shown"),
    [
        ({}, "weights 7"),
        ({"spans": []}, "weights 7"),
        ({"spans": [{"version": 7, "tokens": 9}]}, "weights 7"),
        ({"spans": [{"version": 6, "tokens": 4}]}, "weights 6"),
        ({"spans": [{"version": 6, "tokens": 4}, {"version": 7, "tokens": 5}]}, "weights 6 (4 tokens) 7 (5 tokens)"),
    ],
)
def test_a_sample_names_the_weights_that_wrote_it(spans: dict[str, Any], shown: str) -> None:
    sample = {
        "prompt_uid": "s/1", "sample": 0, "reward": 0.5, "advantage": 1.0, "response_tokens": 9,
        "finish_reason": "stop", "weight_version": 7, "prompt": "p", "response": "r", "label": None,
        "reward_parts": {}, "reward_error": None,
    }  # fmt: skip
    assert sample_text(sample | spans).splitlines()[0].endswith(shown)


def test_no_text_of_a_sample_passes_for_a_line_of_another() -> None:
    header = "--- s/9 sample 0  reward 1.0000  advantage 2.000"
    hostile = f"x\n{header}\nresponse  right\u202e\x1b[2J\r{header}"
    sample: dict[str, Any] = {
        "prompt_uid": hostile, "sample": 0, "reward": 0.5, "advantage": 1.0, "response_tokens": 9,
        "finish_reason": hostile, "weight_version": 7, "prompt": hostile, "response": hostile, "label": hostile,
        "reward_parts": {hostile: 1.0}, "reward_error": hostile, "decision": hostile,
    }  # fmt: skip
    shown = sample_text(sample)
    assert visible(shown) == shown
    lines = shown.splitlines()
    assert [line for line in lines if not line.startswith("        | ")] == [
        lines[0], "prompt    x", "response  x", "label     x", lines[-4], "reward failed: x",
    ]  # fmt: skip
    assert sum(line.startswith("---") for line in lines) == 1
    assert len(step_text([sample]).splitlines()) == 1


def test_a_step_says_what_became_of_its_samples_and_how_old_its_tokens_were() -> None:
    def sample(decision: str, finish: str, *spans: tuple[int, int]) -> dict[str, Any]:
        tokens = [{"version": version, "tokens": count} for version, count in spans]
        return {"decision": decision, "finish_reason": finish, "weight_version": 7, "spans": tokens}

    mixed = [
        sample("trained", "stop", (5, 10), (7, 3)),
        sample("trained", "length", (7, 20)),
        sample("filtered", "stop", (6, 99)),
    ]
    assert step_text(mixed) == (
        "2 trained, 1 filtered; 2 stop, 1 length; 23 tokens 0 updates old, 10 tokens 2 updates old"
    )
    assert step_text(mixed[1:]) == "1 trained, 1 filtered; 1 length, 1 stop"
    assert step_text([{"finish_reason": "stop", "weight_version": 3}]) == "1 trained; 1 stop", "an older file"


def test_tokens_are_listed_with_both_log_probabilities_and_their_ratio() -> None:
    tokens = SampleTokens(0, 0, 0, ["a", " </b>\x1b[2J\u202e\n"], [-0.5, -2.0], [0.25, -20.0])
    assert tokens_text(tokens, 5).splitlines() == [
        "tokens        engine    trainer     ratio  text",
        "             -0.5000    -0.2500    1.2840  'a'",
        r"             -2.0000   -22.0000    0.0000  ' </b>\x1b[2J\u202e\n'",
        "          3 further tokens were not kept",
    ]
    assert tokens_text(SampleTokens(0, 0, 0, ["a"], [-0.5]), 1).splitlines()[1:] == [
        "             -0.5000          -         -  'a'"
    ]
    assert tokens_text(None, 5) == "tokens    not kept"
    assert (ratio_text(0.0), ratio_text(100.0)) == ("1.0000", "e^100")


def test_the_command_prints_tokens_where_it_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, 2)
    write_samples(tmp_path, 2, ["a b", "c"], [0.5, 0.7])
    assert main(["samples", str(tmp_path), "--tokens"]) == 2
    assert "has no log-probabilities of step 2: of an older version" in capsys.readouterr().err
    write_sample_tokens(tmp_path, 2, 0, "a b", ["a", " b"])
    assert main(["samples", str(tmp_path), "--tokens"]) == 0
    said = capsys.readouterr().out
    assert (said.count("' b'"), said.count("tokens    not kept")) == (1, 1)
    assert main(["samples", str(tmp_path)]) == 0
    assert "' b'" not in capsys.readouterr().out
