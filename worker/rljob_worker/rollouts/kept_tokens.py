"""Choice of the tokens of a step that are kept, their texts, and their log-probabilities from engine and trainers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rljob_api.spec import RecordsSpec
from rljob_worker.flow import Decision, Episode, Group
from rljob_worker.records.token_files import SampleTokens, digest
from rljob_worker.records.trajectories import kept_samples
from rljob_worker.types import FloatArray, IntArray, StepMetrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TOKENS = 32_768
"""Tokens of a step: at most some 2 MiB as text, and a third of that in its file."""
_LONGEST_TEXT = 200
"""Characters of a token's text."""
_UNKNOWN = "\ufffd"


@dataclass(frozen=True, slots=True)
class Kept:
    """A sample whose first tokens are kept."""

    episode: Episode
    count: int
    """Tokens, of those that were sampled."""
    number: int | None
    """Number of its first stream in the batch that the step trains on; None: it is not in it."""


def choose(groups: Sequence[Group], records: RecordsSpec, step: int, most: int = MOST_TOKENS) -> list[Kept]:
    """The samples of a step's trajectory file as far as `most` tokens reach, in its order; the last may be cut.

    Args:
        groups: of the step, in the order in which those that are trained on are in its batch.
        records: which samples are written.
        step: number of the step.
        most: tokens.
    """
    if not records.trajectories_every_steps or step % records.trajectories_every_steps:
        return []
    chosen, number = [], 0
    for group, samples in zip(groups, kept_samples([len(group.episodes) for group in groups], records)):
        trained = group.decision is Decision.TRAINED
        for index, episode in enumerate(group.episodes):
            count = min(most, episode.sampled_length) if index < samples else 0
            if count:
                chosen.append(Kept(episode, count, number if trained else None))
                most -= count
            number += len(episode.streams) if trained else 0
    return chosen


def reported(kept: Sequence[Kept]) -> int:
    """The streams at the beginning of the step's batch that the trainers are asked for."""
    return max((one.number + len(one.episode.streams) for one in kept if one.number is not None), default=0)


def tokens_of(kept: Sequence[Kept], tokenizer: PreTrainedTokenizerBase) -> list[SampleTokens]:
    """Texts and the engine's log-probabilities of tokens of scored samples, whose own texts are known."""
    found = []
    for one in kept:
        ids, engine, lengths = _answers(one.episode)
        # A token that follows another one of its answer is read behind it.
        follows = [place > 0 for length in lengths for place in range(length)]
        found.append((ids[: one.count].tolist(), follows[: one.count], engine[: one.count].tolist()))
    texts = iter(
        _texts([token for ids, _, _ in found for token in ids], [one for _, f, _ in found for one in f], tokenizer)
    )
    return [
        SampleTokens(
            one.episode.ordinal,
            one.episode.sample,
            digest(one.episode.text or ""),
            list(itertools.islice(texts, len(ids))),
            values,
        )
        for one, (ids, _, values) in zip(kept, found)
    ]


def _answers(episode: Episode) -> tuple[IntArray, FloatArray, list[int]]:
    """Tokens of all answers in the order of turns, their log-probabilities, and the length of each answer."""
    if episode.opening is None:
        response = episode.generation
        return response.token_ids, response.log_probs, [len(response.token_ids)]
    streams, answers = episode.streams, episode.answers
    ids = np.concatenate([streams[number].ids[places] for number, places in answers])
    log_probs = np.concatenate([streams[number].log_probs[places] for number, places in answers])
    return ids, log_probs, [len(places) for _, places in answers]


def _texts(ids: Sequence[int], follows: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Text that each token adds to the text of the one before it, where it follows that one; of bytes that are no whole
    character U+FFFD."""
    singles = sorted({*ids})
    alone = dict(zip(singles, _decoded(tokenizer, [[token] for token in singles])))
    pairs = sorted({pair for pair, second in zip(itertools.pairwise(ids), follows[1:]) if second})
    both = dict(zip(pairs, _decoded(tokenizer, [list(pair) for pair in pairs])))
    texts = []
    for number, token in enumerate(ids):
        text = _added(alone[ids[number - 1]], both[ids[number - 1], token]) if follows[number] else ""
        texts.append((text or alone[token])[:_LONGEST_TEXT])
    return texts


def _added(before: str, both: str) -> str:
    """Text that a token adds to the one before; empty where that is not clear."""
    if both.startswith(before):
        return both[len(before) :]
    return both if _UNKNOWN in before else ""


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[list[int]]) -> list[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decode = tokenizer.batch_decode if backend is None else backend.decode_batch
    return list(decode(ids, skip_special_tokens=False))


def with_trainers(
    tokens: Sequence[SampleTokens], kept: Sequence[Kept], reports: Sequence[StepMetrics]
) -> list[SampleTokens]:
    """The same with what the trainers reported of the samples that they trained on."""
    said: dict[int, FloatArray] = {}
    for report in reports:
        if report.log_probs is not None:
            said.update(report.log_probs.by_sample())
    return [
        of_one
        if (trainers := _said(one, said)) is None
        else replace(of_one, differences=(trainers - np.array(of_one.engine, np.float32)).tolist())
        for one, of_one in zip(kept, tokens, strict=True)
    ]


def _said(one: Kept, by_stream: dict[int, FloatArray]) -> FloatArray | None:
    """Log-probabilities by the trainers of a sample's kept tokens, in the order of its turns; None where some lack, as
    of a sample with tokens that are left out (`onLimit: Mask`), or are not finite, as in a step whose update was
    refused for that."""
    if one.number is None:
        return None
    left = [by_stream.get(one.number + number) for number in range(len(one.episode.streams))]
    if sum(len(values) for values in left if values is not None) != one.episode.sampled_length:
        return None
    parts = []
    for number, places in one.episode.answers:
        if (values := left[number]) is None:
            return None
        parts.append(values[: len(places)])
        left[number] = values[len(places) :]
    found = np.concatenate(parts)[: one.count]
    return found if np.isfinite(found).all() else None
