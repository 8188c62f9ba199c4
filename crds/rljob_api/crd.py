"""The CustomResourceDefinition."""

from __future__ import annotations

from typing import Any

from rljob_api.job import GROUP, KIND, PLURAL, VERSION, RLJob
from rljob_api.rules import rules_on
from rljob_api.schema import (
    rule_entry,
    structural_schema,
    transition_entries,
    without_item_defaults,
    without_repeated_texts,
)
from rljob_api.spec import RLJobSpec
from rljob_api.status import RLJobStatus

_LAST = ".status.progress.lastStep"

_COLUMNS: tuple[tuple[str, str, str, int, str], ...] = (
    ("Phase", "string", ".status.phase", 0, "Summary of the conditions."),
    ("Step", "integer", ".status.progress.step", 0, "Completed steps."),
    ("Steps", "integer", ".spec.steps", 0, "Steps of the job."),
    ("ETA", "string", ".status.progress.eta", 0, "Estimated time until the last step ends."),
    ("Reward", "number", ".status.progress.rewardMean", 0, "Mean reward of the last step."),
    ("Step-Seconds", "number", ".status.progress.stepSeconds", 0, "Median seconds of the recent steps."),
    ("Restarts", "integer", ".status.restarts", 0, "Restarts that counted."),
    ("Age", "date", ".metadata.creationTimestamp", 0, "Time since creation."),
    ("Sleep", "number", f"{_LAST}.phaseSeconds.sleep", 1, "Seconds of the last sleep."),
    ("Update-Weights", "number", f"{_LAST}.phaseSeconds.update_weights", 1, "Seconds of the last weight hand-over."),
    ("Wake-Up", "number", f"{_LAST}.phaseSeconds.wake_up", 1, "Seconds of the last wake-up."),
    ("Switch", "number", f"{_LAST}.switchSeconds", 1, "Seconds that sharing the devices took in the last step."),
    ("Queue", "string", ".status.queue", 1, "Queue of the job."),
    ("Profile", "string", ".spec.resources.profile", 1, "Hardware profile."),
    ("Checkpoint", "integer", ".status.progress.lastCheckpoint.step", 1, "Step that a restart continues from."),
)


def custom_resource_definition() -> dict[str, Any]:
    """Return the CRD as a document (apiextensions.k8s.io/v1)."""
    root: dict[str, Any] = {
        "type": "object",
        "description": (RLJob.__doc__ or "").strip(),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": without_item_defaults(without_repeated_texts(structural_schema(RLJobSpec))),
            "status": structural_schema(RLJobStatus),
        },
        "x-kubernetes-validations": [
            *(rule_entry(rule) for rule in rules_on(RLJob) if rule.cel is not None),
            *transition_entries(),
        ],
    }
    columns = [
        {"name": name, "type": kind, "jsonPath": path, "priority": priority, "description": description}
        for name, kind, path, priority, description in _COLUMNS
    ]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["rlj"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": root},
                    "subresources": {
                        "status": {},
                        # `kubectl scale`: more or fewer nodes with engines, within the job's bounds.
                        "scale": {
                            "specReplicasPath": ".spec.resources.rollout.nodes",
                            "statusReplicasPath": ".status.cluster.engineNodes",
                        },
                    },
                    "additionalPrinterColumns": columns,
                }
            ],
        },
    }
