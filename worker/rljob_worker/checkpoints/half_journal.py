"""Halves of a run: samples of some steps, and training on them, each in a run folder of its own.

`rollout.json` beside the journal says which weights sampled it, with which tokenizer and algorithm, and what each step
left of the data, so that training on it goes on as the whole run would have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from rljob_api import RLJobSpec
from rljob_worker.checkpoints.journal import JournalStep, journal_files, read_journal
from rljob_worker.checkpoints.reader import Found
from rljob_worker.errors import UserError, no_folder
from rljob_worker.host.files import open_file, read_file, write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "rollout.json"
VERSION = 2
_CHUNK_BYTES = 2**23
_MOST_BYTES = 2**24
_CHECKSUM = "xxh3"
"""Field with the digest of all others, which a file has to have."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_response_tokens", "samples_per_prompt", "prompts_per_step")
"""Fields of `spec.rollout` that decide, beside the algorithm, what is learned from a sample."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of samples; each value is compared by its name."""

    weights: str
    """Digest of the weights that sampled them."""
    weights_named: str
    """The same for people."""
    tokenizer: str
    """Digest of its vocabulary."""
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    """`spec.algorithm`, and of `spec.rollout` how it samples, by their places in the manifest."""


@dataclass(frozen=True, slots=True)
class HalfJournal:
    """Samples of some steps.

    Attributes:
        path: the run folder that holds them.
        origin: what they come from.
        steps: in their order.
        next_ordinals: by step, the first prompt that was not drawn when it was done.
    """

    path: Path
    origin: Origin
    steps: tuple[JournalStep, ...]
    next_ordinals: Mapping[int, int]


def origin_of(spec: RLJobSpec, found: Found | None, model_folder: Path, tokenizer: PreTrainedTokenizerBase) -> Origin:
    """The source of samples that this job takes.

    Args:
        spec: the job.
        found: the checkpoint whose weights sample; None: those of `model_folder`.
        model_folder: the model that the job begins with.
        tokenizer: its.
    """
    if found is None:
        weights, named = _digest_of_folder(model_folder), "the weights that spec.model begins with"
    else:
        files = json.dumps([asdict(one) for one in found.state.files or ()], sort_keys=True)
        weights = xxhash.xxh3_128_hexdigest(files.encode())
        named = f"the weights of step {found.state.step} of {found.folder.parent.parent.name}"
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return Origin(weights, named, xxhash.xxh3_128_hexdigest(vocabulary), _algorithm(spec))


def _algorithm(spec: RLJobSpec) -> dict[str, Any]:
    def lines(place: str, value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return {name: one for key, inner in value.items() for name, one in lines(f"{place}.{key}", inner).items()}
        return {place: value}

    sampling = spec.rollout.model_dump(mode="json", by_alias=True, include=set(_SAMPLING))
    algorithm = spec.algorithm.model_dump(mode="json", by_alias=True)
    return lines("spec.algorithm", algorithm) | lines("spec.rollout", sampling)


def _digest_of_folder(folder: Path) -> str:
    digest = xxhash.xxh3_128()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode())
        with open_file(path) as file:
            while content := file.read(_CHUNK_BYTES):
                digest.update(content)
    return digest.hexdigest()


def write_half(folder: Path, origin: Origin, next_ordinals: Mapping[int, int]) -> None:
    """Write what the steps so far come from."""
    steps = {str(step): {"nextOrdinal": number} for step, number in next_ordinals.items()}
    content: dict[str, Any] = {"version": VERSION, "sameWeights": True, "origin": asdict(origin), "steps": steps}
    write_whole(folder / FILE, json.dumps({**content, _CHECKSUM: _digest(content)}, indent=1))


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def read_half(path: Path) -> HalfJournal:
    """Samples that `--only rollout` wrote; `path` is its run folder, or the journal in it.

    Raises:
        UserError: there are none, or they are damaged.
    """
    folder = path.parent if path.is_file() else path
    try:
        content = json.loads(read_file(folder / FILE, _MOST_BYTES))
        checksum = content.pop(_CHECKSUM)
        if checksum != _digest(content):
            raise ValueError("its content is not what was written (xxh3)")
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}, {VERSION} is known")
        origin = Origin(**content["origin"])
        next_ordinals = {int(step): int(one["nextOrdinal"]) for step, one in content["steps"].items()}
    except (FileNotFoundError, NotADirectoryError):
        wrong = f"{path} holds no {FILE}" if path.is_dir() else no_folder(path)
        raise UserError(f"--from: {wrong}; needed is the run folder of `rljob run --only rollout`") from None
    except KeyError as error:
        raise UserError(f"--from: {folder / FILE}: damaged: it has no {error}") from None
    except (OSError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"--from: {folder / FILE}: damaged: {error}") from None
    files = journal_files(folder)
    if not next_ordinals:
        raise UserError(f"--from: {folder}: no step was sampled")
    if missing := sorted(next_ordinals.keys() - files.keys()):
        raise UserError(f"--from: {folder}: the journal lacks step {missing[0]}")
    steps = tuple(read_journal(files[step]) for step in sorted(next_ordinals))
    return HalfJournal(folder, origin, steps, next_ordinals)


def check_origin(half: HalfJournal, here: Origin, step: int) -> None:
    """Refuse samples that the job cannot train on.

    Args:
        half: the samples.
        here: what the job would have sampled with.
        step: that its training goes on after.

    Raises:
        UserError: naming what is another one.
    """
    there = half.origin
    if half.steps[0].number != step + 1:
        raise UserError(
            f"--from: {half.path} begins with step {half.steps[0].number}, the job goes on with step {step + 1}: "
            f"--checkpoint names the weights that sampled it ({there.weights_named})"
        )
    if there.tokenizer != here.tokenizer:
        raise UserError(f"--from: {half.path} was sampled with another tokenizer than that of spec.model")
    if there.weights != here.weights:
        raise UserError(
            f"--from: {half.path} was sampled by {there.weights_named}; {here.weights_named} are others: --checkpoint "
            "names the ones that sampled it"
        )
    names = sorted(there.algorithm.keys() | here.algorithm.keys())
    other = [
        f"{name}: {json.dumps(there.algorithm.get(name))} there, {json.dumps(here.algorithm.get(name))} here"
        for name in names
        if there.algorithm.get(name) != here.algorithm.get(name)
    ]
    if other:
        raise UserError(f"--from: {half.path} was sampled for another algorithm:\n  " + "\n  ".join(other))
