"""Rules about partial rollout, tail batching, speculative decoding, and the engine's arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rljob_api.engine_arguments import value_faults
from rljob_api.rules.core import Rule
from rljob_api.rules.findings import Check, Finding
from rljob_api.spec import (
    RLJobSpec,
    RolloutSpec,
    SpeculativeSpec,
)
from rljob_api.spec.rollout import RESERVED_ENGINE_ARGS, RolloutAssignment

_ENGINE_ARGUMENT = re.compile("[a-z][a-z0-9_]*")

PARTIAL_AND_TAIL = (
    Rule(
        on=RolloutSpec,
        field="partial.factor",
        wrong="so many groups could not all be trained on within staleness.max (default: 1)",
        allowed="at most staleness.max + 1",
        check=lambda r: r.partial is None or r.partial.factor <= ((r.staleness and r.staleness.max) or 1) + 1,
        cel="!has(self.partial)"
        " || self.partial.factor <= 1.0 +"
        " (has(self.staleness) && self.staleness.max > 0 ? double(self.staleness.max) : 1.0)",
    ),
    Rule(
        on=RolloutSpec,
        field="tail",
        wrong="a response either goes on in the next step or waits for a step of its own",
        allowed="one of partial and tail",
        check=lambda r: r.tail is None or r.partial is None,
        cel="!has(self.tail) || !has(self.partial)",
    ),
    Rule(
        on=RolloutSpec,
        field="tail.deferLongest",
        wrong="more steps than not would be for deferred groups",
        allowed="at most 0.5",
        check=lambda r: r.tail is None or r.tail.defer_longest <= 0.5,
        # As a bound of the schema it would be 0: the API server cuts the fraction off a bound of a whole number.
        cel="!has(self.tail) || self.tail.deferLongest <= 0.5",
    ),
    Rule(
        on=RolloutSpec,
        field="assignment",
        wrong="where a step ends must not depend on which engine is faster",
        allowed="Fixed with partial and tail",
        check=lambda r: (r.partial is None and r.tail is None) or r.assignment == RolloutAssignment.FIXED,
        cel="(!has(self.partial) && !has(self.tail)) || self.assignment == 'Fixed'",
    ),
    Rule(
        on=RolloutSpec,
        field="oversampling.factor",
        wrong="partial.factor or tail.deferLongest says how many groups grow at once",
        allowed="1, or left out, with partial and tail",
        check=lambda r: (r.partial is None and r.tail is None) or r.oversampling is None or r.oversampling.factor == 1,
        cel="(!has(self.partial) && !has(self.tail)) || !has(self.oversampling) || self.oversampling.factor == 1.0",
    ),
    Rule(
        on=RLJobSpec,
        field="algorithm.tis",
        wrong="tokens of earlier weights are corrected one by one",
        allowed="enabled with level Token, as by default, with rollout.partial",
        check=lambda s: s.rollout.partial is None or (s.algorithm.tis.enabled and s.algorithm.tis.level == "Token"),
        cel="!has(self.rollout.partial) || !has(self.algorithm) || !has(self.algorithm.tis)"
        " || (self.algorithm.tis.enabled && self.algorithm.tis.level == 'Token')",
    ),
)


SPECULATIVE = (
    Rule(
        on=SpeculativeSpec,
        field="minMatch",
        wrong="is more than maxMatch",
        allowed="at most maxMatch",
        check=lambda s: s.min_match <= s.max_match,
        cel="self.minMatch <= self.maxMatch",
    ),
    Rule(
        on=RolloutSpec,
        field="minP",
        wrong="vLLM does not apply it to what was guessed",
        allowed="0, or left out, with speculative",
        check=lambda r: r.speculative is None or r.min_p == 0,
        cel="!has(self.speculative) || self.minP == 0.0",
    ),
)


def _engine_arg(name: str, instead: str) -> Rule:
    return Rule(
        on=RolloutSpec,
        field=f"engineArgs.{name}",
        wrong="RLJob sets this engine argument itself",
        allowed=instead if instead.startswith("leave it out") else f"spec.{instead} instead",
        check=lambda r: name not in r.engine_args,
        cel="false",
        at_field=True,
    )


ENGINE_ARGS = tuple(_engine_arg(name, instead) for name, instead in RESERVED_ENGINE_ARGS.items())


def _engine_arguments(rollout: Any) -> Iterator[Finding]:
    for name in rollout.engine_args:
        if not _ENGINE_ARGUMENT.fullmatch(name):
            yield Finding(("engineArgs", name), "is no name of an engine argument", "like max_model_len, with '_'")
    for name, wrong, allowed in value_faults(rollout.engine_args):
        yield Finding(("engineArgs", name), wrong, allowed)


ARGUMENT_CHECKS: dict[type, tuple[Check, ...]] = {RolloutSpec: (_engine_arguments,)}
