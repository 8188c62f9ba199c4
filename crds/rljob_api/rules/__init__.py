"""Rules between fields. Each is written once: its CEL goes into the CRD, its check runs where a manifest is read."""

from __future__ import annotations

from rljob_api.base import ApiModel
from rljob_api.rules.core import Rule
from rljob_api.rules.learning import ENGINE_ARGS, LEARNING, MODEL_AND_DATA
from rljob_api.rules.placement import CLUSTER, NETWORK, NOT_BUILT, PARALLELISM
from rljob_api.spec import RLJobSpec

__all__ = ["MUTABLE_FIELDS", "RULES", "Rule", "immutable_changes", "rules_on", "transition_rules"]

RULES: tuple[Rule, ...] = (*NOT_BUILT, *PARALLELISM, *MODEL_AND_DATA, *LEARNING, *ENGINE_ARGS, *NETWORK, *CLUSTER)

MUTABLE_FIELDS = (
    "steps",
    "checkpoint",
    "failurePolicy",
    "suspend",
    "activeDeadlineSeconds",
    "ttlSecondsAfterFinished",
)
"""Fields of `spec` that may change after the job was created."""


def rules_on(block: type[ApiModel]) -> list[Rule]:
    """Return the rules between the fields of one block."""
    return [rule for rule in RULES if rule.on is block]


def transition_rules() -> list[tuple[str, str, str]]:
    """Return (field, CEL, message) over `self` and `oldSelf` of `spec` for each field that may not change."""
    rules = []
    for attribute, info in RLJobSpec.model_fields.items():
        name = info.alias or attribute
        if name in MUTABLE_FIELDS:
            continue
        cel = f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})"
        message = f"{name} cannot change after the job was created; allowed to change: {', '.join(MUTABLE_FIELDS)}"
        rules.append((name, cel, message))
    return rules


def immutable_changes(old: RLJobSpec, new: RLJobSpec) -> list[str]:
    """Return the camelCase names of the fields that differ and may not."""
    return [
        info.alias or attribute
        for attribute, info in RLJobSpec.model_fields.items()
        if (info.alias or attribute) not in MUTABLE_FIELDS and getattr(old, attribute) != getattr(new, attribute)
    ]
