"""Rows of trajectory files: a response, how it was scored and what became of it."""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

from rljob_worker.flow import Episode, Group, SpanKind
from rljob_worker.types import Picture, Prompt


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
        "prompt": prompt.text if episode.opening is None else episode.opening.observation or prompt.text,
        "label": prompt.label,
        **({"pictures": [_picture(picture) for picture in prompt.pictures]} if prompt.pictures else {}),
        "sample": episode.sample,
        "response": episode.text,
        "response_tokens": episode.sampled_length,
        "finish_reason": episode.finish.value,
        "reward": float(result.score),
        "reward_parts": result.parts,
        "reward_error": result.error,
        **({"reward_notes": result.notes} if result.notes else {}),
        "decision": decision,
        "advantage": advantage,
        "weight_version": weight_version,
        "spans": [
            {"version": span.version, "tokens": len(span)}
            | ({"masked": True} if span.older_than(oldest_trained) else {})
            for stream in episode.streams
            for span in stream.spans
            if span.kind is SpanKind.SAMPLED
        ],
        **({} if episode.opening is None else {"turns": turn_rows(episode), "restarts": episode.restarts}),
    }


def _picture(picture: Picture) -> dict[str, Any]:
    return {
        "width": picture.size[0],
        "height": picture.size[1],
        "patches": list(picture.grid),
        "sha256": picture.digest,
        "thumbnail": base64.b64encode(picture.thumbnail).decode(),
    }


def turn_rows(episode: Episode) -> list[dict[str, Any]]:
    """The turns of an episode: what was answered, with how many tokens, and what came of it; JSON values."""
    sampled, seen, several = Counter[tuple[int, int]](), Counter[int](), len(episode.streams) > 1
    for number, stream in enumerate(episode.streams):
        for span in stream.spans:
            if span.kind is SpanKind.SAMPLED:
                sampled[number, span.turn] += len(span)
    places = []
    for turn in episode.turns:
        # Its number among the answers of its own stream.
        places.append((turn.stream, seen[turn.stream]))
        seen[turn.stream] += 1
    return [
        {
            "action": turn.action,
            "tokens": sampled[place],
            "observation": turn.observation,
            "reward": turn.reward,
            "done": turn.done,
            "values": dict(turn.values),
            "error": turn.error,
            **({"stream": turn.stream} if several else {}),
        }
        for place, turn in zip(places, episode.turns)
    ]
