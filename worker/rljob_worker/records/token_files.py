"""Tokens of the samples in trajectory files, with their log-probabilities: one gzip JSONL file a step beside those."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_worker.errors import UserError
from rljob_worker.host.files import WriteFailures
from rljob_worker.records.step_files import read_step_file, step_files, write_step_file

FOLDER = "tokens"
VERSION = 1
"""Version of the file's format, in its first line."""
_DECIMALS, _DIGITS = 4, 3


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """The sampled tokens of one response, or as many of its first ones as were kept.

    Attributes:
        ordinal: number of its prompt in the data.
        sample: number of the sample within its group.
        response: `digest` of the response, which says that the two files are of one text.
        texts: [n], what each token adds to the text.
        engine: [n], the engine's log-probabilities of the distribution that was sampled from, nats.
        differences: [n], the trainer's log-probabilities before the step's updates minus the engine's, nats; None:
            the step did not train on the sample.
    """

    ordinal: int
    sample: int
    response: int
    texts: Sequence[str]
    engine: Sequence[float]
    differences: Sequence[float] | None = None

    @property
    def trainer(self) -> list[float] | None:
        """[n], the trainer's log-probabilities."""
        if self.differences is None:
            return None
        return [engine + difference for engine, difference in zip(self.engine, self.differences, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """A line of the file: four decimals of a log-probability, three digits of a difference."""
        line = {
            "ordinal": self.ordinal,
            "sample": self.sample,
            "response": self.response,
            "texts": list(self.texts),
            "engine": [round(value, _DECIMALS) for value in self.engine],
        }
        if self.differences is not None:
            line["differences"] = [float(f"{value:.{_DIGITS}g}") for value in self.differences]
        return line

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> SampleTokens:
        """Tokens from `to_json`; KeyError, TypeError or ValueError where it is no such line."""
        texts, engine, differences = line["texts"], _numbers(line["engine"]), line.get("differences")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a token whose text is none")
        if differences is not None:
            differences = _numbers(differences)
        for values in (engine, differences):
            if values is not None and len(values) != len(texts):
                raise ValueError(f"{len(texts)} tokens with {len(values)} numbers")
        return cls(int(line["ordinal"]), int(line["sample"]), int(line["response"]), texts, engine, differences)


def _numbers(values: Sequence[Any]) -> list[float]:
    numbers = [float(value) for value in values]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a log-probability that is not finite")
    return numbers


def digest(response: str) -> int:
    """CRC-32 of a response."""
    return zlib.crc32(response.encode("utf-8", "surrogatepass"))


class StepTokens:
    """The tokens in a step's file; none where it has no file, as in folders of older versions.

    Args:
        samples: of the file.
    """

    def __init__(self, samples: Sequence[SampleTokens] = ()) -> None:
        self._samples = {(one.ordinal, one.sample): one for one in samples}

    def __len__(self) -> int:
        return len(self._samples)

    def of(self, row: Mapping[str, Any]) -> SampleTokens | None:
        """Tokens of a row of the step's trajectory file; None: they were not kept, or are of another response."""
        found = self._samples.get((row.get("ordinal", -1), row["sample"]))
        return found if found is not None and found.response == digest(row["response"]) else None


def write_tokens(run_folder: Path, step: int, samples: Sequence[SampleTokens], failures: WriteFailures) -> Path | None:
    """Write a step's file; None where it cannot be written, which is noted in `failures`, or there is nothing to."""
    if not samples:
        return None
    lines = [{"version": VERSION, "step": step}, *(one.to_json() for one in samples)]
    return write_step_file(run_folder / FOLDER, step, lines, FOLDER, failures)


def read_tokens(run_folder: Path, step: int) -> StepTokens:
    """The tokens of a step's samples.

    Raises:
        UserError: the file is damaged, or of a newer version.
    """
    path = step_files(run_folder / FOLDER).get(step)
    if path is None:
        return StepTokens()
    lines = read_step_file(path)
    try:
        head, *rows = lines
        version = int(head["version"])
        if version > VERSION:
            raise UserError(f"{path}: version {version} of the format; this RLJob reads versions up to {VERSION}")
        return StepTokens([SampleTokens.from_json(row) for row in rows])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged: {type(error).__name__}: {error}") from None
