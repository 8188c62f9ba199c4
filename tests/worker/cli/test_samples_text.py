from __future__ import annotations

from typing import Any

import pytest

from rljob_worker.cli.samples import sample_text


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
