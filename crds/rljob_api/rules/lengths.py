"""Lengths of prompts, responses and batches, beside what an engine and the data allow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob_api.derived import data_sources, max_sequences
from rljob_api.how_many import how_many
from rljob_api.rules.findings import Check, Finding
from rljob_api.rules.places import parts_of
from rljob_api.spec import RLJobSpec


def _length(spec: Any) -> Iterator[Finding]:
    """An engine's own length, which prompts and responses have to fit into."""
    length = spec.rollout.engine_args.get("max_model_len")
    if type(length) is not int:
        return
    wanted = {"rollout.maxResponseTokens": spec.rollout.max_response_tokens}
    if spec.evaluation is not None and spec.evaluation.max_response_tokens is not None:
        wanted["evaluation.maxResponseTokens"] = spec.evaluation.max_response_tokens
    field = max(wanted, key=lambda name: wanted[name])
    generated = [s.synthetic.prompt_symbols for _, s in data_sources(spec) if s.synthetic is not None]
    random = spec.model.random
    # A word is a token there; elsewhere prompts are known once they are tokenised.
    prompt = max(generated, default=1) if random is not None and random.tokenizer.kind == "Word" else 1
    at = ("rollout", "engineArgs", "max_model_len")
    if length < wanted[field] + prompt:
        least = wanted[field] + prompt
        yield Finding(at, f"leaves no room for prompts beside {field} ({wanted[field]})", f"at least {least}")
    elif spec.episodes is not None and length < spec.episodes.max_tokens:
        yield Finding(at, "is less than episodes.maxTokens", f"at least {spec.episodes.max_tokens}")
    elif spec.data.max_prompt_tokens is not None and length < spec.data.max_prompt_tokens + wanted[field]:
        least = spec.data.max_prompt_tokens + wanted[field]
        yield Finding(at, f"is less than data.maxPromptTokens and {field} together", f"at least {least}")


def _batch(spec: Any) -> Iterator[Finding]:
    """vLLM's scheduler takes a token of each sequence in a step."""
    tokens = spec.rollout.max_batched_tokens
    if tokens is not None and tokens < (sequences := max_sequences(spec)):
        wrong = f"is less than the {how_many(sequences, 'sequence')} that an engine runs at once (rollout.maxNumSeqs)"
        yield Finding(("rollout", "maxBatchedTokens"), wrong, f"at least {sequences}")


def _generated(spec: Any) -> Iterator[Finding]:
    """Generated prompts, whose words are tokens of a random model's tokenizer, and the bound on prompts."""
    random, most = spec.model.random, spec.data.max_prompt_tokens
    if random is None or random.tokenizer.kind != "Word" or most is None:
        return
    for place, source in data_sources(spec):
        if source.synthetic is not None and source.synthetic.prompt_symbols > most:
            wrong = f"every prompt would be skipped: data.maxPromptTokens is {most}"
            yield Finding((*parts_of(place), "synthetic", "promptSymbols"), wrong, f"at most {most}")


LENGTH_CHECKS: dict[type, tuple[Check, ...]] = {RLJobSpec: (_length, _batch, _generated)}
