"""Replay: a step's samples sampled again by the weights of then, which are trained again from a checkpoint.

The tokens that trained those weights are the journal's; only the step's own are sampled. Noise belongs to a sample's
seed and a token's place, so that it does not matter which engine samples it, beside what, or in how many pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rljob_api.wire.step_record import StepRecord
from rljob_worker.checkpoints.journal import JournalStep, journal_files, read_journal
from rljob_worker.checkpoints.reader import Checkpoints, Found
from rljob_worker.errors import UserError
from rljob_worker.flow import Episode, Group, SpanKind
from rljob_worker.flow.episode import stream_seed
from rljob_worker.records.audit import changes_of
from rljob_worker.records.steps import effective_steps, read_steps
from rljob_worker.types import FloatArray, GenerationRequest, IntArray, Prompt

_COMPARED = "train/"
"""Metrics of a step that was trained again; the others are of what a replay does not do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps of a replay.

    Attributes:
        step: whose samples are sampled again.
        begins_with: the checkpoint that it begins with; None: the starting weights.
        trained: steps that are trained again, one after the other.
        records: theirs.
    """

    step: JournalStep
    begins_with: Found | None
    trained: tuple[JournalStep, ...]
    records: Mapping[int, StepRecord]
    changes: tuple[str, ...] = ()
    """Changes after a step that is computed again: it is computed with the newest values."""

    @property
    def start(self) -> int:
        """Step of the checkpoint that it begins with; 0: the starting weights."""
        return 0 if self.begins_with is None else self.begins_with.state.step


def plan_replay(run_folder: Path, checkpoints: Checkpoints, step: int) -> Plan:
    """Plan to sample a step again.

    Args:
        run_folder: the run's folder.
        checkpoints: the run's.
        step: the step.

    Raises:
        UserError: the journal lacks a step, or has one of an attempt that a later one replaced.
    """
    files, records = (
        journal_files(run_folder),
        {record.step: record for record in effective_steps(read_steps(run_folder))},
    )
    if not files:
        raise UserError(f"{run_folder}: no journal; spec.records.journal: true keeps one")
    if step not in files:
        raise UserError(
            f"{run_folder}: no journal of step {step}; there are those of steps {min(files)} to {max(files)}"
        )
    wanted = read_journal(files[step])
    oldest, newest = wanted.versions[0], wanted.versions[-1]
    begins_with = checkpoints.find_whole(until=oldest)
    start = 0 if begins_with is None else begins_with.state.step
    between = range(start + 1, newest + 1)
    if missing := [number for number in between if number not in files]:
        raise UserError(
            f"{run_folder}: step {step} has tokens of weights {oldest} to {newest}; the newest checkpoint before them "
            f"is that of step {start}, and the journal lacks step {missing[0]}, which would have to be trained again"
        )
    trained = tuple(read_journal(files[number]) for number in between)
    for one in (*trained, wanted):
        record = records.get(one.number)
        if record is not None and record.attempt != one.attempt:
            raise UserError(
                f"{files[one.number]}: of attempt {one.attempt}; the run's step {one.number} is of attempt "
                f"{record.attempt}, which went on from an earlier checkpoint"
            )
    first = start + 1 if trained else step
    later = [record for number, record in sorted(records.items()) if number > first]
    return Plan(wanted, begins_with, trained, records, tuple(one for of in later for one in changes_of(of)))


@dataclass(slots=True)
class Comparison:
    """Tokens sampled again beside the journal's.

    Attributes:
        tokens: sampled again.
        equal: tokens that are the same.
        same_log_probs: of those, log-probabilities that are the same to the bit.
        largest: greatest difference of the others.
        first: where the first other token is; empty: there is none.
        metrics: how many metrics of steps trained again are the records'.
        other_metrics: step and name of those that are not.
    """

    tokens: int = 0
    equal: int = 0
    same_log_probs: int = 0
    largest: float = 0.0
    first: str = ""
    metrics: int = 0
    other_metrics: list[str] = field(default_factory=list)

    def add(self, where: str, recorded: tuple[IntArray, FloatArray], again: tuple[IntArray, FloatArray]) -> None:
        """Compare a span: [n] tokens and [n] log-probabilities of the journal, and as many or fewer sampled again.

        What follows a token that is another one is no comparison any more and counts as not equal.
        """
        n = min(len(recorded[0]), len(again[0]))
        same = recorded[0][:n] == again[0][:n]
        until = n if same.all() else int(np.argmin(same))
        self.tokens += len(recorded[0])
        self.equal += until
        ours, theirs = recorded[1][:until], again[1][:until]
        self.same_log_probs += int((ours.view(np.int32) == theirs.view(np.int32)).sum())
        self.largest = max(self.largest, float(np.abs(ours - theirs).max(initial=0.0)))
        if until < len(recorded[0]) and not self.first:
            found = str(again[0][until]) if until < len(again[0]) else "nothing"
            self.first = f"{where}, token {until}: {recorded[0][until]} in the journal, {found} now"

    def add_metrics(self, step: int, recorded: Mapping[str, float | None], again: Mapping[str, float]) -> None:
        """Compare what training said of a step then and now."""
        for name in sorted(name for name in again if name.startswith(_COMPARED) and recorded.get(name) is not None):
            if recorded[name] == again[name]:
                self.metrics += 1
            else:
                self.other_metrics.append(f"step {step} {name}: {recorded[name]!r} then, {again[name]!r} now")

    @property
    def whole(self) -> bool:
        """Whether everything came out as it was, but for the rounding of log-probabilities."""
        return self.equal == self.tokens and not self.other_metrics


@dataclass(frozen=True, slots=True)
class AskedSpan:
    """A span that is sampled again.

    Attributes:
        where: for people.
        request: to the engine.
        recorded: [n] tokens and [n] log-probabilities of the journal.
    """

    where: str
    request: GenerationRequest
    recorded: tuple[IntArray, FloatArray]


def asked_spans(one: Group, prompt: Prompt, version: int) -> list[AskedSpan]:
    """Spans of a group that `version` sampled; UserError where its prompt has other tokens now."""
    if prompt.environment is None and one.prompt_tokens != prompt.token_ids:
        raise UserError(
            f"spec.data: prompt {prompt.uid} has other tokens than in the journal: data, template or tokenizer"
        )
    return [
        AskedSpan(
            f"{prompt.uid} sample {episode.sample}, weights {version}",
            replace(_request(episode, number, place, one), pictures=prompt.pictures),
            (stream.ids[span.start : span.stop], stream.log_probs[span.start : span.stop]),
        )
        for episode in one.episodes
        for number, stream in enumerate(episode.streams)
        for place, span in enumerate(stream.spans)
        if span.version == version
    ]


def _request(episode: Episode, number: int, place: int, group: Group) -> GenerationRequest:
    """Request that gives a span of a stream again, the one in this place: the tokens before its answer, and those of
    the answer."""
    stream = episode.streams[number]
    span = stream.spans[place]
    start = next(one.stop for one in reversed(stream.spans[:place]) if one.kind is not SpanKind.SAMPLED)
    # The last span of a response ended by itself; answers of a turn have limits of their own.
    ends_alone = episode.opening is None and span.stop == len(stream)
    return GenerationRequest(
        tuple(stream.ids[:start].tolist()),
        stream_seed(group.seed + episode.sample, number),
        tuple(stream.ids[start : span.start].tolist()),
        group.ordinal,
        None if ends_alone else span.stop - start,
    )
