"""State of a run in its folder: `run.json`, `summary.json` and, while the driver listens, `http.json` and
`http.token`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

from rljob_api.wire.values import WireError, block, text, whole

RUN_FILE = "run.json"
SUMMARY_FILE = "summary.json"
ADDRESS_FILE = "http.json"
TOKEN_FILE = "http.token"
"""Names in the run folder."""
OWNER_FILE = "owner.json"
"""Name in a checkpoint folder that is given by `spec.checkpoint.path`: which run writes there."""


class RunOutcome(StrEnum):
    """Outcome of an attempt."""

    SUCCEEDED = "Succeeded"
    STOPPED = "Stopped"
    FAILED = "Failed"


SUMMARY_OF_SUCCESS = f'"outcome": "{RunOutcome.SUCCEEDED}"'
"""Stands in the summary of a run that is done and in no other: what a shell can look for."""


@dataclass(frozen=True, slots=True)
class ResumeChanges:
    """Fields of the manifest that an attempt changed, of those by which steps can differ."""

    attempt: int
    """The first with the change."""
    rounding: Sequence[str] = ()
    fields: Sequence[str] = ()

    @classmethod
    def parse(cls, content: Any) -> Self:
        """Read one as JSON gives it; WireError names the field."""
        get = block(content, "changes").get
        lists = ([text(one, f"changes.{name}") for one in get(name, [])] for name in ("rounding", "fields"))
        return cls(whole(get("attempt"), "changes.attempt"), *lists)


@dataclass(frozen=True, slots=True)
class RunDescription:
    """`run.json`: whose run it is."""

    job: dict[str, Any]
    """The manifest as it was validated, without status."""
    attempt: int
    """From 1; each start of a driver has another one."""
    pid: int
    """Process of the driver."""
    nonce: str = ""
    """Text that only this driver wrote: another one means that another driver owns the folder. Empty in run folders
    of versions that had none."""
    epoch: int = 0
    """Number of this driver among those of its checkpoint folder: `attempt`, unless other runs used
    `spec.checkpoint.path` too. 0 where `nonce` is empty."""
    changes: Sequence[ResumeChanges] = ()
    """By attempt."""

    @classmethod
    def parse(cls, content: Any) -> Self:
        """Read the file's content; WireError when it is no description of a run."""
        description = block(content, "it")
        job = dict(block(description.get("job"), "job"))
        block(job.get("spec"), "job.spec")
        text(block(job.get("metadata"), "job.metadata").get("name"), "job.metadata.name")
        attempt = whole(description.get("attempt"), "attempt")
        if not attempt:
            raise WireError("attempt must be 1 or more, not 0")
        nonce = text(description.get("nonce", ""), "nonce")
        epoch = whole(description.get("epoch", 0), "epoch")
        changes = tuple(map(ResumeChanges.parse, description.get("changes", ())))
        return cls(job, attempt, whole(description.get("pid", 0), "pid"), nonce, epoch, changes)

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        content = asdict(self)
        if not self.nonce:
            del content["nonce"], content["epoch"]
        if not self.changes:
            del content["changes"]
        return content

    @property
    def name(self) -> str:
        """Name of the job."""
        return str(self.job["metadata"]["name"])

    @property
    def uid(self) -> str | None:
        """UID of the job in Kubernetes, where it is from there."""
        uid = self.job["metadata"].get("uid")
        return None if uid is None else str(uid)

    @property
    def spec(self) -> dict[str, Any]:
        """Spec of the manifest."""
        return dict(self.job["spec"])


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """Seconds of one phase over the steps that had it."""

    phase: str
    steps: int
    median: float
    p95: float
    total: float
    share: float
    """Share of all steps' seconds."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """`summary.json`: how a run ended."""

    outcome: RunOutcome
    message: str
    """One sentence."""
    attempt: int
    """The attempt that ended."""
    steps: int
    """Completed steps."""
    executed_steps: int
    lost_steps: int
    """Executed steps that a restart made obsolete."""
    lost_seconds: float
    reward_first: float | None
    reward_last: float | None
    step_seconds_median: float | None
    switch_seconds_median: float | None
    phases: Sequence[PhaseSummary]
    skipped_prompts: Mapping[str, int] = field(default_factory=dict)
    """Rows that were left out, by source."""
    write_failures: Mapping[str, int] = field(default_factory=dict)
    """Number of times that the attempt that ended could not write what it can go on without, by name."""

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        content = asdict(self)
        if not self.write_failures:
            del content["write_failures"]
        return content


@dataclass(frozen=True, slots=True)
class DriverAddress:
    """`http.json`: where the driver listens."""

    host: str
    port: int

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        return asdict(self)
