from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from engine_process import RemoteEngine
from interruptions import gone_on_with, rounding, whole
from rollout_models import FIRST_WORD, MAX_RESPONSE, group_requests, spec_json

from rljob_worker.engine.reports import DraftCounts
from rljob_worker.types import Cut, Generation, GenerationRequest, Quota, SamplingParams
from rljob_worker.upstream.vllm_drafts import _of_rows, kept_rows

GUESSES = {"draftTokens": 4, "minMatch": 1, "maxMatch": 3}


def test_tokens_count_up_to_the_first_that_differs_from_its_draft() -> None:
    #        three drafts: two right    none    one, right  two, the first wrong
    tokens = torch.tensor([5, 6, 9, 1, 2, 3, 4, 8, 7, 7])
    drafts = torch.tensor([5, 6, 7, 3, 9, 7])
    rows, kept = kept_rows(tokens, drafts, [3, 0, 1, 2])
    found = [tokens[row[count]].tolist() for row, count in zip(rows, kept)]
    assert found == [[5, 6, 9], [2], [3, 4], [8]]
    assert rows.shape == kept.shape == (4, 4)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_a_loop_over_requests_finds(seed: int) -> None:
    random = np.random.default_rng(seed)
    counts = [int(count) for count in random.integers(0, 5, 7)]
    counts[int(random.integers(7))] = 3
    tokens = random.integers(0, 2, sum(counts) + 7)
    drafts = random.integers(0, 2, sum(counts))
    expected, row, draft = [], 0, 0
    for count in counts:
        taken = [int(tokens[row])]
        for place in range(count):
            if tokens[row + place] != drafts[draft + place]:
                break
            taken.append(int(tokens[row + place + 1]))
        expected.append(taken)
        row, draft = row + count + 1, draft + count
    rows, kept = kept_rows(torch.from_numpy(tokens), torch.from_numpy(drafts), counts)
    assert [torch.from_numpy(tokens)[of[count]].tolist() for of, count in zip(rows, kept)] == expected


@dataclass
class Metadata:
    """The part of vLLM's `SamplingMetadata` that differs by request."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    bad_words_token_ids: dict[int, list[list[int]]]
    output_token_ids: list[list[int]]
    top_p: torch.Tensor | None = None


def test_each_row_of_a_request_has_its_parameters() -> None:
    # What is never sampled: of the first request token 3, of the last one tokens 0 and 2.
    forbidden = {0: [[3]], 2: [[0], [2]]}
    given = Metadata(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5, 6, 7]), forbidden, [[], [1], [1, 2]])
    rows: Any = _of_rows(cast(Any, given), [2, 0, 1])
    assert rows.temperature.tolist() == [1, 1, 1, 2, 3, 3]
    assert rows.top_k.tolist() == [5, 5, 5, 6, 7, 7]
    assert rows.bad_words_token_ids == {0: [[3]], 1: [[3]], 2: [[3]], 4: [[0], [2]], 5: [[0], [2]]}
    assert rows.output_token_ids == [[], [], [], [1], [1, 2], [1, 2]]
    # vLLM gives what was said only where something asks for it.
    nothing: Any = _of_rows(cast(Any, replace(given, bad_words_token_ids={}, output_token_ids=[])), [2, 0, 1])
    assert (nothing.bad_words_token_ids, nothing.output_token_ids) == ({}, [])


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[list[RemoteEngine]]:
    """An engine that guesses and one that does not, of weights that nothing has replaced."""
    made = [
        RemoteEngine(spec_json(model, maxNumSeqs=32, **more), model, model.parent / f"guessing-{index}.log")
        for index, more in enumerate(({"speculative": GUESSES}, {}))
    ]
    for one in made:
        one.send("start")
    for one in made:
        one.wait()
    yield made
    for one in made:
        one.close()


@pytest.fixture
def guessing(pair: list[RemoteEngine]) -> RemoteEngine:
    return pair[0]


@pytest.fixture
def engine(pair: list[RemoteEngine]) -> RemoteEngine:
    return pair[1]


def repeating_requests() -> list[GenerationRequest]:
    """Prompts of words that come again, so that there is something to guess from."""
    return [
        GenerationRequest(tuple(FIRST_WORD + (i * 7 + j % (2 + i)) % 60 for j in range(12)), 1000 + 8 * i + sample)
        for i in range(6)
        for sample in range(4)
    ]


def same(ours: list[Generation], plain: list[Generation]) -> bool:
    """Whether tokens and ends are equal, and log-probabilities but for rounding: a step has more rows."""
    return all(
        np.array_equal(a.token_ids, b.token_ids)
        and (a.finish_reason, a.stop_text) == (b.finish_reason, b.stop_text)
        and np.allclose(a.log_probs, b.log_probs, rtol=0, atol=max(1e-5, rounding()))
        for a, b in zip(ours, plain, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=MAX_RESPONSE, ignore_eos=True),
        SamplingParams(max_tokens=MAX_RESPONSE, temperature=0.4),
        SamplingParams(max_tokens=MAX_RESPONSE, temperature=0.5, top_p=0.9, top_k=8),
        SamplingParams(max_tokens=MAX_RESPONSE, temperature=0.0),
        SamplingParams(max_tokens=MAX_RESPONSE, temperature=0.4, stop=("w7 w", "w31"), stop_token_ids=(9, 10, 11)),
    ],
    ids=["as trained", "cool", "truncated", "greedy", "stops"],
)
def test_drafts_change_no_token(engine: RemoteEngine, guessing: RemoteEngine, sampling: SamplingParams) -> None:
    requests = [*repeating_requests(), *group_requests(4, 2)]
    guessing.call("take_draft_counts")
    assert same(whole(guessing, requests, sampling), whole(engine, requests, sampling))
    counts: DraftCounts = guessing.call("take_draft_counts")
    assert 0 < counts.accepted <= counts.proposed
    assert guessing.call("take_draft_counts") == DraftCounts()


@pytest.mark.slow
def test_a_cut_generation_goes_on_to_the_same_tokens_with_or_without_drafts(
    engine: RemoteEngine, guessing: RemoteEngine
) -> None:
    sampling = SamplingParams(max_tokens=MAX_RESPONSE, temperature=0.4, stop_token_ids=(9, 10, 11))
    requests = [
        GenerationRequest(one.prompt_token_ids, one.seed, group=place // 4)
        for place, one in enumerate(repeating_requests())
    ]
    cut = Cut((Quota(1, frozenset(range(6))),))
    expected = whole(engine, requests, sampling)
    for begins, goes_on in ((guessing, engine), (engine, guessing)):
        begun = begins.call("generate", requests, sampling, 0, cut=cut)
        assert not all(one.finish_reason for one in begun), "nothing was left to go on with"
        assert same(gone_on_with(goes_on, requests, begun, sampling), expected)
