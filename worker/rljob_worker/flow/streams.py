"""The tokens of one generation, append-only, and where each of them came from."""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rljob_worker.types import BoolArray, FloatArray, IntArray

NO_VERSION = -1
"""In `TokenStream.versions`: a token that no weights sampled."""
_INT64: np.dtype[np.int64] = np.dtype(np.int64)
_FLOAT32: np.dtype[np.float32] = np.dtype(np.float32)
_NOT_SAMPLED = np.array([np.nan], _FLOAT32).tobytes()
_new, _set = object.__new__, object.__setattr__


class SpanKind(StrEnum):
    """Origin of a span's tokens."""

    PROMPT = "prompt"
    SAMPLED = "sampled"
    """The policy. Only these are trained on."""
    OBSERVED = "observed"
    """An environment, in answer to the policy."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens of one origin.

    Attributes:
        start: index of its first token in the stream.
        stop: index after its last one.
        turn: number of the policy's answer that it belongs to; the prompt belongs to turn 0.
        version: weights that sampled it; None for what was not sampled.

    Raises:
        ValueError: the span is empty, or has a version where nothing was sampled, or none where something was.
    """

    kind: SpanKind
    start: int
    stop: int
    turn: int = 0
    version: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"span [{self.start}, {self.stop}) is empty or begins before the stream")
        if self.turn < 0:
            raise ValueError(f"span [{self.start}, {self.stop}): turn {self.turn} is negative")
        if (self.version is None) is (self.kind is SpanKind.SAMPLED):
            raise ValueError(f"a {self.kind} span with version {self.version}; only sampled ones have one, and must")
        if self.version is not None and self.version < 0:
            raise ValueError(f"span [{self.start}, {self.stop}): version {self.version} is negative")

    def __len__(self) -> int:
        return self.stop - self.start

    def older_than(self, oldest: int) -> bool:
        """Whether weights before version `oldest` sampled it: then its tokens are left out of the loss."""
        return self.version is not None and self.version < oldest

    def continues(self, other: Span) -> bool:
        """Whether it is the rest of `other`: side by side and of the same origin."""
        same = self.kind is other.kind and self.turn == other.turn and self.version == other.version
        return same and other.stop == self.start


@dataclass(frozen=True, slots=True, eq=False)
class TokenStream:
    """Tokens, the engine's log-probabilities of them, and spans; n tokens.

    A value: `append` gives another stream that has this one as its beginning. Nothing is ever tokenised a second time.

    Attributes:
        ids: [n] int64.
        log_probs: [n] float32, of the distribution that was sampled from; NaN where nothing was sampled, so that no
            computation can take such a number for one.
        spans: one after the other from 0 to n; the first is the prompt. Neighbours differ in origin.

    Raises:
        ValueError: the arrays are not of one length or not of these types, or the spans do not cover them.
    """

    ids: IntArray
    log_probs: FloatArray
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.shape != self.log_probs.shape:
            raise ValueError(f"{self.ids.shape} tokens with {self.log_probs.shape} log-probabilities")
        if (self.ids.dtype, self.log_probs.dtype) != (_INT64, _FLOAT32):
            raise ValueError(f"tokens of {self.ids.dtype} with log-probabilities of {self.log_probs.dtype}")
        if self.spans and self.spans[0].kind is not SpanKind.PROMPT:
            raise ValueError("a stream begins with its prompt")
        finite = np.isfinite(self.log_probs).tobytes()
        end, before = 0, None
        for span in self.spans:
            if span.start != end:
                break
            end = span.stop
            if before is not None and span.turn < before.turn:
                raise ValueError("a span belongs to an earlier turn than the one before it")
            if before is not None and span.continues(before):
                raise ValueError("two neighbouring spans have the same origin")
            _check_finite(finite[span.start : span.stop], span.kind)
            before = span
        if end != len(self.ids) or not self.spans or before is not self.spans[-1]:
            ends = [span.stop for span in self.spans]
            raise ValueError(f"{len(self.ids)} tokens are not covered by spans that end at {ends}")
        self.ids.setflags(write=False)
        self.log_probs.setflags(write=False)

    @classmethod
    def of_prompt(cls, ids: Sequence[int] | IntArray) -> TokenStream:
        """A stream that nothing has answered yet; ValueError for a prompt without tokens."""
        tokens = np.array(ids, dtype=np.int64)
        return cls(tokens, _not_sampled(len(tokens)), (Span(SpanKind.PROMPT, 0, len(tokens)),))

    def append_sampled(
        self, ids: Sequence[int] | IntArray, log_probs: Sequence[float] | FloatArray, *, version: int
    ) -> TokenStream:
        """This stream and what weights of `version` sampled after it: k ids and k finite log-probabilities."""
        last = self.spans[-1]
        turn = last.turn + 1 if last.kind is SpanKind.OBSERVED else last.turn
        values = np.asarray(log_probs, _FLOAT32)
        _check_finite(np.isfinite(values).tobytes(), SpanKind.SAMPLED)
        return self._append(ids, values.tobytes(), turn, version)

    def append_observed(self, ids: Sequence[int] | IntArray) -> TokenStream:
        """This stream and what an environment answered to it."""
        return self._append(ids, _NOT_SAMPLED * len(ids), self.spans[-1].turn, None)

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TokenStream)
            and self.spans == other.spans
            and self.ids.tobytes() == other.ids.tobytes()
            and self.log_probs.tobytes() == other.log_probs.tobytes()
        )

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.spans[0].stop

    @property
    def sampled(self) -> BoolArray:
        """[n]: which tokens the policy sampled: the loss mask."""
        return self.versions != NO_VERSION

    @property
    def versions(self) -> IntArray:
        """[n] int64: weights that sampled each token; `NO_VERSION` where none did."""
        of_spans = [NO_VERSION if span.version is None else span.version for span in self.spans]
        return np.repeat(np.array(of_spans, dtype=np.int64), [len(span) for span in self.spans])

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum([span.stop - span.start for span in self.spans if span.kind is SpanKind.SAMPLED])

    def tokens_by_version(self) -> Counter[int]:
        """Number of tokens that weights of each version sampled."""
        counts: Counter[int] = Counter()
        for span in self.spans:
            if span.version is not None:
                counts[span.version] += len(span)
        return counts

    @property
    def oldest_version(self) -> int | None:
        """The lowest version that sampled a token; None where nothing was sampled yet."""
        return min((span.version for span in self.spans if span.version is not None), default=None)

    @property
    def newest_version(self) -> int | None:
        """The highest version that sampled a token; None where nothing was sampled yet."""
        return max((span.version for span in self.spans if span.version is not None), default=None)

    def begins_with(self, other: TokenStream) -> bool:
        """Whether `other` is an earlier state of this stream."""
        n = len(other)
        return (
            np.array_equal(self.ids[:n], other.ids)
            and self.log_probs[:n].tobytes() == other.log_probs.tobytes()
            and np.array_equal(self.versions[:n], other.versions)
        )

    def as_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` takes back to the same bits."""
        return {
            "ids": packed(self.ids, "<i8"),
            "log_probs": packed(self.log_probs[self.sampled], "<f4"),
            "spans": [[span.kind.value, span.stop, span.turn, span.version] for span in self.spans],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TokenStream:
        """Stream from `as_json`; ValueError when it is not such a value."""
        try:
            starts = [0, *(stop for _, stop, _, _ in value["spans"])]
            spans = tuple(
                Span(SpanKind(kind), start, stop, turn, version)
                for start, (kind, stop, turn, version) in zip(starts, value["spans"])
            )
            ids = unpacked(value["ids"], "<i8").astype(np.int64)
            log_probs = _not_sampled(len(ids))
            for span in spans:
                if span.kind is SpanKind.SAMPLED:
                    log_probs[span.start : span.stop] = 0.0
            log_probs[np.isfinite(log_probs)] = unpacked(value["log_probs"], "<f4")
            return cls(ids, log_probs, spans)
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise ValueError(f"not a token stream: {error}") from error

    def _append(self, ids: Sequence[int] | IntArray, log_probs: bytes, turn: int, version: int | None) -> TokenStream:
        """With what weights of `version` sampled, or what an environment answered.

        The rest holds already, and each answer of a rollout comes by here.
        """
        count = len(ids)
        if not count:
            return self
        start, last = len(self.ids), self.spans[-1]
        added = _span(start, start + count, turn, version)
        spans = (*self.spans[:-1], replace(last, stop=added.stop)) if added.continues(last) else (*self.spans, added)
        # Bytes are put together in half the time that arrays are, and nobody can write to an array of them.
        whole = np.asarray(ids).astype(_INT64, casting="same_kind", copy=False)
        tokens = np.frombuffer(self.ids.tobytes() + whole.tobytes(), _INT64)
        values = np.frombuffer(self.log_probs.tobytes() + log_probs, _FLOAT32)
        if len(values) != added.stop:
            raise ValueError(f"{count} tokens with {len(log_probs) // _FLOAT32.itemsize} log-probabilities")
        stream = _new(TokenStream)
        _set(stream, "ids", tokens)
        _set(stream, "log_probs", values)
        _set(stream, "spans", spans)
        return stream


@lru_cache(maxsize=4096)
def _span(start: int, stop: int, turn: int, version: int | None) -> Span:
    """A span of an answer or an observation; a group's responses have many equal ones."""
    return Span(SpanKind.OBSERVED if version is None else SpanKind.SAMPLED, start, stop, turn, version)


def _check_finite(finite: bytes, kind: SpanKind) -> None:
    """Check a span's tokens, 0 or 1 each: an array's `all` would be a third of a short response's way to a stream."""
    if (b"\0" if kind is SpanKind.SAMPLED else b"\1") in finite:
        raise ValueError("log-probabilities must be finite where tokens were sampled, and NaN elsewhere")


def packed(values: npt.NDArray[Any], dtype: str) -> str:
    """Base64 of the compressed bytes: a tenth of what as many numbers would take as text."""
    return base64.b64encode(zlib.compress(values.astype(dtype).tobytes(), 1)).decode()


def unpacked(text: str, dtype: str) -> npt.NDArray[Any]:
    """Content of a `packed` text, flat; ValueError or zlib.error when it is no such text."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), dtype=dtype)


def _not_sampled(count: int) -> FloatArray:
    return np.full(count, np.nan, dtype=np.float32)
