"""Rows of trajectory files: a response, how it was scored and what became of it."""

from __future__ import annotations

from typing import Any

from rljob_worker.flow import Group, SpanKind
from rljob_worker.types import Prompt


def response_row(
    prompt: Prompt,
    group: Group,
    index: int,
    *,
    decision: str,
    weight_version: int,
    advantage: float | None = None,
    oldest_trained: int = 0,
) -> dict[str, Any]:
    """One response of a scored group, whose texts are known, as a JSON value.

    Args:
        prompt: of the group.
        group: it.
        index: of the response in it.
        decision: what became of the group.
        weight_version: of the weights that the step begins to train with, or that were evaluated.
        advantage: None where it was not trained on.
        oldest_trained: tokens of weights before these were left out of the loss.
    """
    result, episode = group.results[index], group.episodes[index]
    assert episode.finish is not None
    assert episode.text is not None
    return {
        "ordinal": group.ordinal,
        "prompt_uid": prompt.uid,
        "prompt": prompt.text,
        "label": prompt.label,
        "sample": episode.sample,
        "response": episode.text,
        "response_tokens": episode.response_length,
        "finish_reason": episode.finish.value,
        "reward": float(result.score),
        "reward_parts": result.parts,
        "reward_error": result.error,
        "decision": decision,
        "advantage": advantage,
        "weight_version": weight_version,
        "spans": [
            {"version": span.version, "tokens": len(span)}
            | ({"masked": True} if span.version is not None and span.version < oldest_trained else {})
            for span in episode.stream.spans
            if span.kind is SpanKind.SAMPLED
        ],
    }
