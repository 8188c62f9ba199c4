"""Streams against a plain list of (kind, id, log-probability, turn, version) for each token."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_worker.flow import Episode, Finish, Group, Span, SpanKind, TokenStream

IDS = st.lists(st.integers(0, 2**31), min_size=1, max_size=6)
LOG_PROBS = st.floats(-50, 0, width=32)
SAMPLED = st.tuples(st.lists(st.tuples(st.integers(0, 999), LOG_PROBS), max_size=6), st.integers(0, 3))
OBSERVED = st.lists(st.integers(0, 999), max_size=6)
ACTIONS = st.lists(st.one_of(SAMPLED, OBSERVED), max_size=8)


@dataclass
class Tokens:
    """The model: every token by itself."""

    rows: list[tuple[SpanKind, int, float | None, int, int | None]] = field(default_factory=list)

    def add(self, kind: SpanKind, ids: list[int], log_probs: list[float | None], version: int | None) -> None:
        turn = self.rows[-1][3] if self.rows else 0
        if kind is SpanKind.SAMPLED and self.rows[-1][0] is SpanKind.OBSERVED:
            turn += 1
        self.rows += [(kind, i, p, turn, version) for i, p in zip(ids, log_probs)]


def grow(prompt: list[int], actions: list) -> tuple[list[TokenStream], Tokens]:
    """All states of a stream, and the model's last one."""
    model = Tokens()
    model.add(SpanKind.PROMPT, prompt, [None] * len(prompt), None)
    states = [TokenStream.of_prompt(prompt)]
    for action in actions:
        if isinstance(action, tuple):
            pairs, version = action
            ids, log_probs = [i for i, _ in pairs], [p for _, p in pairs]
            states.append(states[-1].append_sampled(ids, log_probs, version=version))
            model.add(SpanKind.SAMPLED, ids, log_probs, version)
        else:
            states.append(states[-1].append_observed(action))
            model.add(SpanKind.OBSERVED, action, [None] * len(action), None)
    return states, model


@given(prompt=IDS, actions=ACTIONS)
def test_what_is_derived_from_spans_is_what_each_token_says(prompt: list[int], actions: list) -> None:
    states, model = grow(prompt, actions)
    stream = states[-1]
    rows = model.rows
    assert stream.ids.tolist() == [row[1] for row in rows]
    assert stream.sampled.tolist() == [row[0] is SpanKind.SAMPLED for row in rows]
    assert stream.versions.tolist() == [-1 if row[4] is None else row[4] for row in rows]
    assert stream.num_sampled == sum(row[0] is SpanKind.SAMPLED for row in rows)
    assert stream.oldest_version == min((row[4] for row in rows if row[4] is not None), default=None)
    assert stream.prompt_length == len(prompt)
    by_span = [(s.kind, s.turn, s.version) for s in stream.spans for _ in range(len(s))]
    assert by_span == [(kind, turn, version) for kind, _, _, turn, version in rows]
    for value, row in zip(stream.log_probs.tolist(), rows):
        assert np.isnan(value) if row[2] is None else value == row[2]


@given(prompt=IDS, actions=ACTIONS)
def test_streams_only_grow_and_come_back_from_json_bit_for_bit(prompt: list[int], actions: list) -> None:
    states, _ = grow(prompt, actions)
    for earlier, later in itertools.pairwise(states):
        assert later.begins_with(earlier)
    assert TokenStream.from_json(json.loads(json.dumps(states[-1].as_json()))) == states[-1]


@given(prompt=IDS, pairs=st.lists(st.tuples(st.integers(0, 99), LOG_PROBS), min_size=2, max_size=8), data=st.data())
def test_a_response_in_parts_is_the_response_in_one(prompt: list[int], pairs: list, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(pairs)))
    ids, log_probs = [i for i, _ in pairs], [p for _, p in pairs]
    start = TokenStream.of_prompt(prompt)
    parts = start.append_sampled(ids[:cut], log_probs[:cut], version=4).append_sampled(
        ids[cut:], log_probs[cut:], version=4
    )
    assert parts == start.append_sampled(ids, log_probs, version=4)
    assert len(parts.spans) == 2


def test_two_versions_are_two_spans_of_one_turn() -> None:
    stream = TokenStream.of_prompt([1, 2]).append_sampled([3], [-1.0], version=4).append_sampled([5], [-2.0], version=6)
    assert stream.spans[1:] == (Span(SpanKind.SAMPLED, 2, 3, 0, 4), Span(SpanKind.SAMPLED, 3, 4, 0, 6))
    assert not stream.begins_with(TokenStream.of_prompt([1, 2]).append_sampled([3], [-1.0], version=5))


def changed(**change: object) -> dict:
    """The JSON value of a stream with three tokens, of which one was sampled."""
    return TokenStream.of_prompt([1, 2]).append_sampled([3], [-1.0], version=0).as_json() | change


def test_its_arrays_cannot_be_written() -> None:
    stream = TokenStream.of_prompt([1])
    with pytest.raises(ValueError, match="read-only"):
        stream.ids[0] = 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenStream.of_prompt([]), "empty"),
        (lambda: Span(SpanKind.SAMPLED, 0, 1), "version None"),
        (lambda: Span(SpanKind.PROMPT, 0, 1, 0, 3), "version 3"),
        (lambda: Span(SpanKind.SAMPLED, 0, 1, 0, -2), "version -2 is negative"),
        (lambda: TokenStream.of_prompt([1]).append_sampled([2], [np.nan], version=0), "must be finite"),
        (lambda: TokenStream.of_prompt([1]).append_sampled([2], [-np.inf], version=0), "must be finite"),
        (lambda: TokenStream.of_prompt([1]).append_sampled([2, 3], [-1.0], version=0), "log-probabilities"),
        (lambda: TokenStream(np.arange(3), np.zeros(3, np.float32), ()), "not covered"),
        (lambda: TokenStream.from_json({"ids": [1]}), "not a token stream"),
        (lambda: TokenStream.from_json(changed(spans=[["prompt", 1, 0, None]])), "covered"),
        (lambda: TokenStream.from_json(changed(ids="AAAA")), "not a token stream"),
        (lambda: TokenStream.from_json(changed(ids="\u00e9")), "not a token stream"),
        (lambda: TokenStream.from_json(changed(log_probs=changed()["ids"])), "not a token stream"),
    ],
)
def test_what_is_no_stream_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def episode(sample: int, *versions: int, ordinal: int = 7, finish: Finish | None = Finish.STOP) -> Episode:
    stream = TokenStream.of_prompt([1])
    for version in versions:
        stream = stream.append_sampled([2], [-1.0], version=version)
    return Episode(ordinal, sample, stream, finish)


def test_tokens_that_are_no_whole_numbers_are_not_cut() -> None:
    with pytest.raises(TypeError, match="same_kind"):
        TokenStream.of_prompt([1]).append_sampled(np.array([1.5]), [-0.5], version=0)


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    group = Group(7, 3, (episode(0, 5, 6), episode(1, 4, 6), episode(2)))
    assert (group.oldest_version, group.staleness(6), group.complete) == (4, 2, True)
    untouched = Group(7, 3, (episode(0, finish=None),))
    assert (untouched.oldest_version, untouched.complete) == (3, False)


@pytest.mark.parametrize("episodes", [(), (episode(1),), (episode(0), episode(0)), (episode(0, ordinal=8),)])
def test_a_group_has_the_samples_of_one_prompt(episodes: tuple[Episode, ...]) -> None:
    with pytest.raises(ValueError, match="group of prompt 7"):
        Group(7, 0, episodes)
