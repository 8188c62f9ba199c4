"""The algorithms that the worker has, as far as the API must know them: their names and what they ask of a job.

They are declared where their formulas are, in `rljob_worker.algorithms`, which nothing here may import. What is known
here is in algorithms.json beside this file; `make generate` writes it from the worker's registry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

FACTS_FILE = "crds/rljob_api/algorithms.json"


DEFAULT = "grpo"
"""The algorithm of a job that names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmFacts:
    """Requirements of an algorithm on a job; checked by the CRD and by the command line alike (`rljob_api.rules`)."""

    name: str
    """`spec.algorithm.name`."""
    min_group_size: int = 1
    """Least `rollout.samplesPerPrompt`: 2 where the samples of a prompt are compared with each other."""
    requires_on_policy: bool = False
    """Whether every optimizer update needs samples of the policy that it starts from: one update a step."""
    needs_critic: bool = False
    """Whether a critic is trained beside the policy, whose values its advantages come from."""
    needs_teacher: bool = False
    """Whether the policy is brought towards another model: `algorithm.distill`."""
    requires_filter: bool = False
    """Whether groups that carry no signal must be sampled away: `rollout.oversampling`."""
    clip_low: float = 0.2
    """`spec.algorithm.clipLow` where it is left out; so are the next ones."""
    clip_high: float = 0.2
    normalize_by_std: bool = False
    whiten_advantages: bool = False
    aggregation: str = "TokenMean"
    without_effect: tuple[str, ...] = ()
    """Attributes of `spec.algorithm` that change nothing: a value other than the default is refused."""


def _known() -> Mapping[str, AlgorithmFacts]:
    entries = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    facts = (AlgorithmFacts(**entry | {"without_effect": tuple(entry.get("without_effect", ()))}) for entry in entries)
    return MappingProxyType({entry.name: entry for entry in facts})


ALGORITHMS = _known()
"""Name -> facts; the default of `spec.algorithm.name` first."""
