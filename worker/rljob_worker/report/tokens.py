"""Fate of the tokens that a run sampled, and the age of those that it trained on."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rljob_api import metrics as m
from rljob_api.how_many import how_many
from rljob_api.wire.step_record import StepRecord

_NOT_TRAINED = {
    "rollout/filtered_tokens": "filtered",
    "rollout/surplus_tokens": "surplus, sampled again",
    "rollout/deferred_tokens": "deferred, sampled again",
    "rollout/discarded_tokens": "too old, sampled again",
    "rollout/masked_tokens": "too old, left out of the loss",
}
_NOT_SCORED = ("rollout/deferred_tokens", "rollout/discarded_tokens")
"""Not among the tokens of the step's responses."""
_CARRIED = "rollout/carried_tokens"
_AGE = re.compile(r"rollout/staleness/tokens_(\d+)", re.ASCII)


def token_rows(records: Sequence[StepRecord]) -> list[list[str]]:
    """Rows (what, tokens, share in percent); none where every token was trained on by the weights that sampled it."""
    measured = {name for record in records for name in record.metrics}
    fates = {label: _total(records, name) for name, label in _NOT_TRAINED.items() if name in measured}
    ages = {int(match[1]): _total(records, match[0]) for match in map(_AGE.fullmatch, measured) if match}
    if not fates and not ages:
        return []
    scored = _total(records, m.RESPONSE_TOKENS_KEY)
    beside = sum(_total(records, name) for name in _NOT_SCORED)
    by_fate = {"trained on": scored + beside - sum(fates.values()), **fates}
    if _CARRIED in measured:
        by_fate["carried, after the last step"] = records[-1].metric(_CARRIED) or 0.0
    by_age = {f"of those trained on: {how_many(age, 'update')} old": ages[age] for age in sorted(ages)}
    return [*_shares(by_fate), *_shares(by_age)]


def _total(records: Sequence[StepRecord], name: str) -> float:
    return sum(record.metric(name) or 0.0 for record in records)


def _shares(tokens: dict[str, float]) -> list[list[str]]:
    whole = sum(tokens.values()) or 1.0
    return [[name, f"{count:,.0f}", f"{100 * count / whole:.1f} %"] for name, count in tokens.items()]
