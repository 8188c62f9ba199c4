"""Rules about data with pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rljob_api import derived
from rljob_api.algorithms import ALGORITHMS
from rljob_api.rules.core import Rule
from rljob_api.spec import DataSource, DataSpec, EvaluationSet, LoraHandover, RLJobSpec, SyntheticData, TrainingBackend

_COLORS = 13


def _with_pictures(field: str, wrong: str, allowed: str, check: Callable[[Any], bool]) -> Rule:
    """A rule of jobs whose data have pictures; sources are too many for CEL to look through."""
    return Rule(
        on=RLJobSpec,
        field=field,
        wrong=f"{wrong} (data.imageKey, NameColor)",
        allowed=allowed,
        check=lambda spec: check(spec) or next(derived.pictures(spec), None) is None,
        cel=None,
    )


def _source_rules(on: type[DataSource]) -> tuple[Rule, ...]:
    return (
        Rule(
            on=on,
            field="imageKey",
            wrong="rows of a file have pictures, and generated ones or an environment's observations have not",
            allowed="only beside path, without environment",
            check=lambda source: source.image_key is None or (source.path is not None and source.environment is None),
            cel="!has(self.imageKey) || (has(self.path) && !has(self.environment))",
        ),
        Rule(
            on=on,
            field="environment",
            wrong="pictures are seen at the beginning of one answer alone, and NameColor has some",
            allowed="another task, or no environment",
            check=lambda source: (
                source.environment is None or source.synthetic is None or source.synthetic.task != "NameColor"
            ),
            cel="!has(self.environment) || !has(self.synthetic) || !has(self.synthetic.task)"
            " || self.synthetic.task != 'NameColor'",
        ),
    )


PICTURES = (
    *(rule for source in (DataSource, DataSpec, EvaluationSet) for rule in _source_rules(source)),
    Rule(
        on=SyntheticData,
        field="symbols",
        wrong="NameColor knows fewer colours",
        allowed=f"at most {_COLORS} with task NameColor",
        check=lambda data: data.task != "NameColor" or data.symbols <= _COLORS,
        cel=f"!has(self.task) || self.task != 'NameColor' || !has(self.symbols) || self.symbols <= {_COLORS}",
    ),
    _with_pictures(
        "training.contextParallel",
        "ranks that divide a row would each have some of a picture's tokens",
        "1, or data without pictures",
        lambda spec: spec.training.context_parallel == 1,
    ),
    _with_pictures(
        "training.backend",
        "Megatron trains the language half of a model alone, without pictures",
        "FSDP, or data without pictures",
        lambda spec: spec.training.backend == TrainingBackend.FSDP,
    ),
    _with_pictures(
        "training.lora.handover",
        "engines compute with adapters apart in models of text alone",
        "Merged, or data without pictures",
        lambda spec: spec.training.lora is None or spec.training.lora.handover == LoraHandover.MERGED,
    ),
    _with_pictures(
        "algorithm.name",
        "a critic does not see pictures",
        "an algorithm without a critic, or data without pictures",
        lambda spec: not ALGORITHMS[spec.algorithm.name].needs_critic,
    ),
    _with_pictures(
        "algorithm.name",
        "a teacher does not see pictures",
        "an algorithm without a teacher, or data without pictures",
        lambda spec: not ALGORITHMS[spec.algorithm.name].needs_teacher,
    ),
)
