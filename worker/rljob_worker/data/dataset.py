"""The stream of prompts: sources mixed by weight, each shuffled every epoch, with an exact cursor."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rljob_api import derived
from rljob_api.how_many import all_of, how_many
from rljob_api.spec import DataSource, RLJobSpec
from rljob_worker.data.evaluate import held_out_settings
from rljob_worker.data.mixing import Mixture, random_bits
from rljob_worker.data.renderer import Renderer, ScoredRows
from rljob_worker.data.row_store import RowStore, most_mended
from rljob_worker.data.sources import LoadedSource, evaluation_sources, load_source, load_sources
from rljob_worker.data.turns import Schema
from rljob_worker.errors import UserError
from rljob_worker.types import IntArray, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("rljob.data")

Tools = Mapping[str, Sequence[Schema]]
"""Schemas of tools, by the place in the manifest of the source whose policy may call them."""
STATE_VERSION = 1
_CACHED_TOKENS = 1_000_000
_TOKEN_BYTES = 64
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class SkippedPrompts:
    """Prompts of one source that were longer than the limit, each counted once."""

    count: int
    limit: int
    """In tokens."""
    examples: tuple[tuple[str, int], ...]
    """(uid, tokens) of the first ones."""

    def __str__(self) -> str:
        examples = ", ".join(f"{uid} with {tokens}" for uid, tokens in self.examples)
        skipped = how_many(
            self.count, f"prompt longer than {self.limit} tokens was", f"prompts longer than {self.limit} tokens were"
        )
        return f"{skipped} skipped, such as {examples}"


class PromptSource:
    """Endless prompts for training, in an order that depends on the job's seed and the data alone.

    Sources are mixed as `Mixture` has it, so that every batch has the same mix. Within a source, every epoch is a
    permutation of its rows. `state()` is a small JSON value; a source restored from it continues with exactly the
    prompts that would have come.

    `max_prompt_tokens` is the model's own limit; the smaller of it and `spec.data.maxPromptTokens` holds, and with
    tools what `episodes.maxTokens` leaves. Longer prompts are skipped and reported. `tools`: their schemas, by the
    source's place in the manifest. Raises UserError for data that cannot be used.
    """

    def __init__(
        self,
        spec: RLJobSpec,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int | None = None,
        tools: Tools | None = None,
    ):
        limits = [limit for limit in (spec.data.max_prompt_tokens, max_prompt_tokens) if limit is not None]
        loaded = load_sources(spec)
        self._skips = rows_to_skip(spec.data.skip, {source.name: len(source.rows) for source in loaded})
        renderers = [
            Renderer(
                source,
                tokenizer,
                spec.reward,
                (tools or {}).get(source.field, ()),
                spec.model.max_pixels,
                rows_of(source.name, self._skips),
            )
            for source in loaded
        ]
        self._seed, self._shuffle = spec.seed, spec.data.shuffle
        self._streams = [
            _Stream(renderer, spec.seed, spec.data.shuffle, _limit(spec, renderer.loaded.source, limits))
            for renderer in renderers
        ]
        sources = [renderer.loaded.source for renderer in renderers]
        self._mixture = Mixture(sources, spec.rollout.prompts_per_step, spec.seed)
        self._scored = [
            ScoredRows.of(stream.loaded, spec.reward, left_out=rows_of(stream.name, self._skips))
            for stream in self._streams
        ]
        for stream in self._streams:
            stream.check_some_fit(self._skips)
        self._row_store: RowStore | None = None
        self.mended: tuple[str, ...] = ()
        """Rows that have another content since the cursor was saved that was restored."""

    def skips(self, uid: str) -> bool:
        """Whether a prompt is to be left out (`spec.data.skip`)."""
        return uid in self._skips

    def remember_rows(self, store: RowStore) -> None:
        """Keep what each row is now, so that a run continued later can tell which of them are others."""
        self._row_store = store
        for stream in self._streams:
            store.write(stream.loaded)

    def compare_rows(self, store: RowStore) -> None:
        """Tell rows that are others since a cursor was saved by what `store` has of them."""
        self._row_store = store

    @property
    def rows(self) -> dict[str, int]:
        """Rows of each source."""
        return {stream.name: len(stream.loaded.rows) for stream in self._streams}

    def next_prompts(self, n: int) -> list[Prompt]:
        """The next `n` prompts. Drawing a then b prompts gives the same as drawing a + b."""
        order = self._mixture.order([stream.drawn for stream in self._streams], n)
        prompts = [iter(stream.take(int((order == i).sum()))) for i, stream in enumerate(self._streams)]
        return [next(prompts[i]) for i in order]

    def prompts_of(self, uids: Sequence[str]) -> list[Prompt]:
        """The prompts with these `Prompt.uid`s, without moving the cursor; ValueError names one that is not there."""
        streams = {stream.name: stream for stream in self._streams}
        prompts = []
        for uid in uids:
            name, _, row = uid.rpartition("/")
            if name not in streams or not row.isdecimal() or int(row) >= len(streams[name].loaded.rows):
                raise ValueError(f"there is no prompt {uid!r} in the data")
            prompts += streams[name].prompts([int(row)])
        return prompts

    def skipped(self) -> dict[str, SkippedPrompts]:
        """By source, the prompts skipped so far for their length; sources without any are left out."""
        return {stream.name: stream.skipped for stream in self._streams if stream.skipped.count}

    def state(self) -> dict[str, Any]:
        """The cursor, as a JSON value."""
        return {
            "version": STATE_VERSION,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "sources": [stream.state() for stream in self._streams],
        }

    def columns(self) -> dict[str, frozenset[str]]:
        """By a source's place in the manifest: the columns that a reward is given beside prompt, response and label."""
        return {stream.loaded.field: stream.loaded.reward_columns() for stream in self._streams}

    def first(self) -> dict[str, Prompt]:
        """The first prompt of each source, by the source's place in the manifest."""
        return {stream.loaded.field: stream.prompts([0])[0] for stream in self._streams}

    def scored(self) -> list[ScoredRows]:
        """Each source with its reward and the rows that are used."""
        return list(self._scored)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. UserError names the source whose data, weight or name is another one.

        Single rows may have another content where `remember_rows` kept what they were: `mended` names them.
        """
        self.mended = self.check(state)
        for stream, saved in zip(self._streams, state["sources"]):
            stream.restore(saved)

    def check(self, state: dict[str, Any]) -> tuple[str, ...]:
        """UserError where the cursor is not one of this job on this data; returns the rows that were mended since."""
        for key, field, mine in (
            ("version", "the state's version", STATE_VERSION),
            ("seed", "spec.seed", self._seed),
            ("shuffle", "spec.data.shuffle", self._shuffle),
        ):
            if state.get(key) != mine:
                raise UserError(f"{field} is {mine}, but the data cursor was saved with {state.get(key)}")
        names = [saved["name"] for saved in state["sources"]]
        if names != [stream.name for stream in self._streams]:
            raise UserError(
                f"spec.data: the data cursor was saved with the sources {', '.join(names)}, "
                f"but the job has {', '.join(stream.name for stream in self._streams)}"
            )
        return tuple(
            f"{stream.name}/{row}"
            for stream, saved in zip(self._streams, state["sources"])
            for row in stream.check_same_data(saved, self._row_store)
        )


def rows_to_skip(wanted: Sequence[int | str], rows: Mapping[str, int]) -> frozenset[str]:
    """The `Prompt.uid`s that `spec.data.skip` names.

    Args:
        wanted: the field's value.
        rows: how many each source has.
    """
    found = set()
    for place, row in enumerate(wanted):
        field = f"spec.data.skip[{place}]: {row}"
        name, _, number = str(row).rpartition("/")
        if not name and len(rows) > 1:
            raise UserError(f"{field}: there are several sources: NAME/{number}, of {', '.join(rows)}")
        name = name or next(iter(rows))
        if name not in rows or int(number) >= rows[name]:
            there = ", ".join(f"{source}/0 to {source}/{count - 1}" for source, count in rows.items())
            raise UserError(f"{field}: there is no such row; there are {there}")
        found.add(f"{name}/{int(number)}")
    return frozenset(found)


def rows_of(source: str, uids: Iterable[str]) -> frozenset[int]:
    """The rows of one source among these."""
    named = (uid.rpartition("/") for uid in uids)
    return frozenset(int(row) for name, _, row in named if name == source)


def load_evaluation_prompts(
    spec: RLJobSpec,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int | None = None,
    scored: list[ScoredRows] | None = None,
    tools: Tools | None = None,
) -> list[Prompt]:
    """The prompts of `spec.evaluation`, set by set and in file order.

    Those longer than `max_prompt_tokens` are reported, not used. `scored` is filled with what `PromptSource.scored`
    gives. `tools` as of `PromptSource`. Empty without `spec.evaluation`. Raises UserError for
    data that cannot be used.
    """
    prompts = []
    for field, source in evaluation_sources(spec):
        loaded = load_source(source, field)
        assert spec.evaluation is not None
        rows = ScoredRows.of(loaded, spec.reward, held_out_settings(spec.evaluation, source.name).max_prompts)
        renderer = Renderer(loaded, tokenizer, spec.reward, (tools or {}).get(field, ()), spec.model.max_pixels)
        limits = [] if max_prompt_tokens is None else [max_prompt_tokens]
        prompts += _held_out(renderer, rows.count, _limit(spec, source, limits))
        if scored is not None:
            scored.append(rows)
    return prompts


def _held_out(renderer: Renderer, count: int, limit: int | None) -> list[Prompt]:
    loaded = renderer.loaded
    prompts = renderer.render(range(count))
    if limit is None:
        return prompts
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
    if not fitting:
        raise UserError(_none_fits(loaded, limit))
    if len(fitting) < len(prompts):
        long = [(prompt.uid, len(prompt.token_ids)) for prompt in prompts if len(prompt.token_ids) > limit]
        logger.warning("%s: %s", loaded.field, SkippedPrompts(len(long), limit, tuple(long[:_EXAMPLES])))
    return fitting


def _limit(spec: RLJobSpec, source: DataSource, limits: Sequence[int]) -> int | None:
    """Tokens of a source's longest prompt: also what leaves room for an answer, where an episode begins with it."""
    if source.environment is not None and source.seeds is None and spec.episodes is not None:
        limits = [*limits, spec.episodes.max_tokens - derived.max_tokens_per_turn(spec)]
    return min(limits, default=None)


class _Stream:
    """One source's endless sequence of prompts."""

    def __init__(self, renderer: Renderer, seed: int, shuffle: bool, limit: int | None):
        self.loaded = renderer.loaded
        self.name = renderer.loaded.name
        self.reward = renderer.reward
        self.drawn = 0
        self.skipped = SkippedPrompts(0, limit or 0, ())
        self._renderer, self._seed, self._shuffle, self._limit = renderer, seed, shuffle, limit
        self._epoch = self._position = 0
        self._order: tuple[int, IntArray] | None = None
        self._cache: dict[int, Prompt] = {}
        self._cached_tokens = 0

    @property
    def weights(self) -> list[list[float]] | None:
        """Weights that change over the steps, each as [first step, value], as JSON has them."""
        given = self.loaded.source.weights
        return None if given is None else [[one.first_step, one.value] for one in given]

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts that fit; UserError when a whole epoch has none."""
        taken: list[Prompt] = []
        passed = 0
        while len(taken) < n:
            for epoch, prompt in self._advance(n - len(taken)):
                if self._limit is None or len(prompt.token_ids) <= self._limit:
                    taken.append(prompt)
                    passed = 0
                    continue
                passed += 1
                if epoch == 0:
                    self._report(prompt)
            if passed >= len(self.loaded.rows):
                raise UserError(_none_fits(self.loaded, self._limit or 0))
        self.drawn += n
        return taken

    def check_some_fit(self, skips: frozenset[str]) -> None:
        """UserError when no prompt of the source is short enough and not skipped. Does not move the cursor."""
        own = [uid for uid in skips if uid.rpartition("/")[0] == self.name]
        if len(own) == len(self.loaded.rows):
            raise UserError(f"{self.loaded.field}: spec.data.skip leaves no row of {self.loaded.origin}")
        if self._limit is None:
            return
        rows = [row for row in self._epoch_order(0).tolist() if f"{self.name}/{row}" not in skips]
        for start in range(0, len(rows), 64):
            if any(len(p.token_ids) <= self._limit for p in self.prompts(rows[start : start + 64])):
                return
        raise UserError(_none_fits(self.loaded, self._limit))

    def state(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rows": len(self.loaded.rows),
            "fingerprint": self.loaded.fingerprint,
            "weight": self.loaded.source.weight,
            **({} if self.weights is None else {"weights": self.weights}),
            "epoch": self._epoch,
            "position": self._position,
            "drawn": self.drawn,
            "skipped": self.skipped.count,
            "skippedExamples": [list(example) for example in self.skipped.examples],
        }

    def check_same_data(self, saved: dict[str, Any], store: RowStore | None = None) -> list[int]:
        """UserError where the source is another one; returns the rows of it that were mended."""
        changed = f"{self.loaded.field}: the data of source {self.name!r} ({self.loaded.origin}) changed"
        if saved["rows"] != len(self.loaded.rows):
            raise UserError(
                f"{changed} since the data cursor was saved: {how_many(saved['rows'], 'row')} then, "
                f"{len(self.loaded.rows)} now"
            )
        mended: list[int] | None = []
        if saved["fingerprint"] not in (self.loaded.fingerprint, self.loaded.earlier):
            mended = None if store is None else store.mended(self.loaded, saved["fingerprint"])
        if mended is None:
            raise UserError(
                f"{changed} since the data cursor was saved: as many rows, but other content or another chat template; "
                f"single rows may be mended, at most {most_mended(saved['rows'])} of these"
            )
        if saved["weight"] != self.loaded.source.weight:
            raise UserError(
                f"{self.loaded.field}.weight: is {self.loaded.source.weight}, "
                f"but the data cursor was saved with {saved['weight']}"
            )
        if saved.get("weights") != self.weights:
            raise UserError(
                f"{self.loaded.field}.weights: is {self.weights}, but the data cursor was saved with "
                f"{saved.get('weights')}"
            )
        return mended

    def restore(self, saved: dict[str, Any]) -> None:
        self._epoch, self._position, self.drawn = saved["epoch"], saved["position"], saved["drawn"]
        examples = tuple((uid, tokens) for uid, tokens in saved["skippedExamples"])
        self.skipped = SkippedPrompts(saved["skipped"], self._limit or 0, examples)

    def _advance(self, n: int) -> list[tuple[int, Prompt]]:
        """The next `n` rows with their epochs, whatever their length."""
        epochs: list[int] = []
        rows: list[int] = []
        while len(rows) < n:
            order = self._epoch_order(self._epoch)[self._position : self._position + n - len(rows)].tolist()
            epochs += [self._epoch] * len(order)
            rows += order
            self._position += len(order)
            if self._position == len(self.loaded.rows):
                self._epoch, self._position = self._epoch + 1, 0
        return list(zip(epochs, self.prompts(rows)))

    def _epoch_order(self, epoch: int) -> IntArray:
        if self._order is None or self._order[0] != epoch:
            rows = len(self.loaded.rows)
            order = (
                np.argsort(random_bits(rows, self._seed, self.name, epoch), kind="stable")
                if self._shuffle
                else np.arange(rows)
            )
            self._order = epoch, order
        return self._order[1]

    def prompts(self, rows: list[int]) -> list[Prompt]:
        missing = sorted({row for row in rows if row not in self._cache})
        rendered = dict(zip(missing, self._renderer.render(missing)))
        prompts = [rendered.get(row) or self._cache[row] for row in rows]
        if self._cached_tokens < _CACHED_TOKENS:
            self._cache |= rendered
            self._cached_tokens += sum(map(_size, rendered.values()))
        return prompts

    def _report(self, prompt: Prompt) -> None:
        count, examples = self.skipped.count + 1, self.skipped.examples
        if count == 1:
            logger.warning(
                "%s: prompt %s has %d tokens, more than the limit of %d: it is skipped, as all longer ones will be",
                self.loaded.field, prompt.uid, len(prompt.token_ids), self.skipped.limit,
            )  # fmt: skip
        if len(examples) < _EXAMPLES:
            examples += ((prompt.uid, len(prompt.token_ids)),)
        self.skipped = SkippedPrompts(count, self.skipped.limit, examples)


def _size(prompt: Prompt) -> int:
    """In tokens; a picture's bytes count as so many of what a token takes."""
    return len(prompt.token_ids) + sum(picture.patches.nbytes for picture in prompt.pictures) // _TOKEN_BYTES


def _none_fits(loaded: LoadedSource, limit: int) -> str:
    prompts = all_of(len(loaded.rows), f"prompt of {loaded.origin} is", f"prompts of {loaded.origin} are")
    return (
        f"{loaded.field}: {prompts} longer than {limit} tokens, "
        "the smaller of data.maxPromptTokens and the engine's length (the model's, or engineArgs.max_model_len) less "
        "maxResponseTokens; raise what bounds them, or shorten the prompts"
    )
