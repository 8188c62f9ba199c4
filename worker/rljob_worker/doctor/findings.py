"""Findings of checks, and the report on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rljob_api.json_types import JsonObject

FORMAT = 1
"""Version of the JSON document; fields are added under the same number, never changed or removed."""


class Status(StrEnum):
    """Result of a check, the worst last."""

    NOT_APPLICABLE = "not applicable"
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    """Subject of the check; stable, so that programs can find it."""
    status: Status
    found: str
    wanted: str = ""
    fix: str = ""
    """Remedy; empty unless it is a warning or a problem."""
    node: str = ""
    """Host name; empty: all nodes together."""


def ok(name: str, found: str, wanted: str = "") -> Finding:
    """Everything is as it should be."""
    return Finding(name, Status.OK, found, wanted)


def warning(name: str, found: str, wanted: str, fix: str) -> Finding:
    """It may work, or work badly."""
    return Finding(name, Status.WARNING, found, wanted, fix)


def problem(name: str, found: str, wanted: str, fix: str) -> Finding:
    """A job would fail."""
    return Finding(name, Status.PROBLEM, found, wanted, fix)


def not_applicable(name: str, why: str) -> Finding:
    """Nothing to judge here, and why."""
    return Finding(name, Status.NOT_APPLICABLE, why)


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, and what they are about."""

    kind: str
    """`npu`, `cuda` or `cpu`."""
    profile: str | None
    """Hardware profile of the job; None where no job was given."""
    nodes: tuple[str, ...]
    """Host names of the nodes that were looked at."""
    cluster: bool
    """Whether all nodes of a Ray cluster were looked at, or this one alone."""
    findings: tuple[Finding, ...]

    def count(self, status: Status) -> int:
        """Number of findings with this result."""
        return Counter(finding.status for finding in self.findings)[status]

    def result(self) -> Status:
        """The worst of all findings; `ok` where nothing was judged."""
        order = list(Status)
        return (
            max((f.status for f in self.findings), key=order.index, default=Status.OK) if self._judged() else Status.OK
        )

    def exit_code(self, *, strict: bool) -> int:
        """0, or 1 for problems; with `strict` for warnings too."""
        failing = (Status.PROBLEM, Status.WARNING) if strict else (Status.PROBLEM,)
        return int(self.result() in failing)

    def document(self) -> JsonObject:
        """The report as JSON; docs/doctor.md says what each field means."""
        return {
            "format": FORMAT,
            "kind": self.kind,
            "profile": self.profile,
            "scope": "cluster" if self.cluster else "node",
            "nodes": list(self.nodes),
            "result": self.result().value,
            "counts": {status.value: self.count(status) for status in Status},
            "findings": [
                {
                    "name": f.name,
                    "status": f.status.value,
                    "node": f.node or None,
                    "found": f.found,
                    "wanted": f.wanted,
                    "fix": f.fix,
                }
                for f in self.findings
            ],
        }

    def _judged(self) -> bool:
        return any(finding.status is not Status.NOT_APPLICABLE for finding in self.findings)


def on_node(node: str, findings: Sequence[Finding]) -> list[Finding]:
    """The findings with the node that they are about."""
    return [replace(finding, node=node) for finding in findings]
