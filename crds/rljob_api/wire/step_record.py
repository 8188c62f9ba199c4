"""The step record: a line of `steps.jsonl`, and what `/v1/steps` answers (docs/running.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rljob_api import metrics as m
from rljob_api.reward_parts import LEFT_OUT_KEY, PREFIX
from rljob_api.wire.prompts_of_step import PromptsOfStep
from rljob_api.wire.values import WireError, block, number, seconds, text, whole

UNNUMBERED = -1
MemoryReports = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Bytes by process (`trainer-3`), phase and field of its report."""
RankSpans = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]
"""By process and phase, begin and end of each call in seconds since the step began."""


@dataclass(frozen=True, slots=True)
class WeightSync:
    """A step's weight sync; None: not said."""

    version: int | None = None
    """Weight version that the engines have now."""
    bytes: float | None = None
    """Bytes of the model."""
    staging_bytes: float | None = None
    """Bytes of a node's staging slots."""
    tensors: int | None = None
    verified: bool = True
    mode: str | None = None
    send: Mapping[str, float] = field(default_factory=dict)
    receive: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the slowest trainer and engine, by part."""

    @classmethod
    def parse(cls, content: Mapping[str, Any], where: str) -> Self:
        """Read the block as JSON gives it; WireError names the field."""
        get = content.get
        version, size, staging, tensors = get("version"), get("bytes"), get("staging_bytes"), get("tensors")
        return cls(
            None if version is None else whole(version, f"{where}: version"),
            None if size is None else number(size, f"{where}.bytes"),
            None if staging is None else number(staging, f"{where}.staging_bytes"),
            None if tensors is None else whole(tensors, f"{where}: tensors"),
            get("verified", True) is not False,
            get("mode"),
            get("send") or {},
            get("receive") or {},
        )

    def to_json(self) -> dict[str, Any]:
        """The block, without what is not known."""
        values = {
            "version": self.version,
            "bytes": self.bytes,
            "staging_bytes": self.staging_bytes,
            "tensors": self.tensors,
            "verified": self.verified,
            "mode": self.mode,
            "send": self.send or None,
            "receive": self.receive or None,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Changed:
    """Changes by a resume: the step is the first that was computed with them."""

    rounding: Sequence[str] = ()
    """Fields of the manifest since which bits may differ from those of a run without the change."""
    fields: Sequence[str] = ()
    """Others that decide on some samples."""
    rows: Sequence[str] = ()
    """Rows of the data with other content, as `NAME/ROW`."""

    @classmethod
    def parse(cls, content: Any, where: str) -> Self:
        """Read the block as JSON gives it; WireError names the field."""
        get = block(content, where).get
        return cls(*(_texts(get(name, []), f"{where}.{name}") for name in ("rounding", "fields", "rows")))

    def to_json(self) -> dict[str, Any]:
        """The block, without what is empty."""
        named = {"rounding": self.rounding, "fields": self.fields, "rows": self.rows}
        return {name: list(values) for name, values in named.items() if values}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One executed step. Keys that this version does not know are left out, optional ones may be missing."""

    step: int
    """0: the evaluation before the first step, which is no step itself (`is_step`)."""
    attempt: int
    """Attempt of the run folder: each start of a driver has another one."""
    time: float
    """Unix seconds of its end."""
    step_seconds: float
    phases: Mapping[str, float]
    """Wall-clock seconds by phase; disjoint. Where engines have devices of their own: the trainers'."""
    other: float
    """`step_seconds` less all phases; may be a rounding error below 0."""
    switch_seconds: float
    """Seconds, of the step's, spent on handing the devices over."""
    metrics: Mapping[str, float | None]
    """By slime's names; null: not measured, or not finite. Other programs' are checked by `metric`."""
    nested: Sequence[str] = ()
    """Metrics that contain phases and must not be added to them."""
    applied: bool = True
    """False: the update was refused, so that the step is not completed."""
    stopped_early: str = ""
    """Why the run ends with this step, `spec.earlyStop`; empty: it does not."""
    recovered: bool = False
    """It was kept beside a checkpoint and written by the attempt after."""
    weights: WeightSync | None = None
    """None: there was no weight sync."""
    prompts: PromptsOfStep | None = None
    """None: the step was not completed, or its record is of a version that did not count prompts."""
    changed: Changed | None = None
    """Changes by the resume before it; None: none that it could find."""
    memory: MemoryReports = field(default_factory=dict)
    """Memory as it stands in the record; `memory_states` looks into it."""
    busy_seconds: Mapping[str, float] = field(default_factory=dict)
    """By process."""
    overlapped: Mapping[str, float] = field(default_factory=dict)
    """Seconds of work that ran beside a phase."""
    lanes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Phases of lanes beside the trainers', like `engine`: in each they are disjoint, and sum with what is left of
    `step_seconds` to it. Empty where all phases are in one lane."""
    ranks: RankSpans = field(default_factory=dict)
    """When each process was at work, as it stands in the record; `rank_spans` looks into it. Work before the first step
    is in its record, with times below 0; records of older versions have none."""
    index: int = UNNUMBERED
    """Position in the file; `UNNUMBERED` before it stands there."""
    rerun: bool = False
    """The step was executed before, by an attempt that died."""

    @classmethod
    def parse(cls, content: Any) -> Self:
        """Read a record as JSON gives it.

        Raises:
            WireError: a field that has to be there is missing, or is no such value; names the record and the field.
        """
        if not isinstance(content, dict):
            raise WireError(f"a step record must be an object, not {type(content).__name__}")
        index = whole(content.get("index"), "a step record: index")
        return cls._parse(content, f"step record {index}", index)

    @classmethod
    def parse_draft(cls, content: Any) -> Self:
        """Read a record that has no place in the file yet; WireError as `parse`."""
        return cls._parse(block(content, "a step's draft"), "a step's draft", UNNUMBERED)

    @classmethod
    def _parse(cls, content: Mapping[str, Any], where: str, index: int) -> Self:
        get = content.get
        step = whole(get("step"), f"{where}: step")
        phases = _phases(get("phases"), f"{where}: phases")
        weights = block(get("weights"), f"{where}: weights")
        record = cls(
            step=step,
            attempt=whole(get("attempt"), f"{where}: attempt"),
            time=number(get("time"), f"{where}: time"),
            step_seconds=seconds(get("step_seconds"), f"{where}: step_seconds"),
            phases=phases,
            other=number(get("other"), f"{where}: other"),
            switch_seconds=seconds(get("switch_seconds", 0.0), f"{where}: switch_seconds"),
            metrics=block(get("metrics"), f"{where}: metrics"),
            nested=get("nested", ()),
            applied=get("applied", True) is not False,
            stopped_early=text(get("stopped_early", ""), f"{where}: stopped_early"),
            recovered=get("recovered", False) is True,
            weights=WeightSync.parse(weights, f"{where}: weights") if weights else None,
            prompts=PromptsOfStep.parse(get("prompts"), f"{where}: prompts") if get("prompts") else None,
            changed=Changed.parse(get("changed"), f"{where}: changed") if get("changed") else None,
            memory=block(get("memory"), f"{where}: memory"),
            busy_seconds=block(get("busy_seconds", {}), f"{where}: busy_seconds"),
            overlapped=block(get("overlapped", {}), f"{where}: overlapped"),
            lanes={
                name[:80]: _phases(of_lane, f"{where}: lanes.{name[:80]}")
                for name, of_lane in block(get("lanes", {}), f"{where}: lanes").items()
            },
            ranks=block(get("ranks", {}), f"{where}: ranks"),
            index=index,
            rerun=get("rerun", False) is True,
        )
        for name in (m.REWARD_KEY, m.RESPONSE_LENGTH_KEY, m.LOGPROB_KEY, LEFT_OUT_KEY):
            record.metric(name)
        record.reward_parts()
        record.environment_failures()
        return record

    def to_json(self) -> dict[str, Any]:
        """The record in the order of its keys; without index and rerun while it is not numbered."""
        content = {
            "step": self.step,
            "attempt": self.attempt,
            "time": self.time,
            "step_seconds": self.step_seconds,
            "phases": self.phases,
            "other": self.other,
            "switch_seconds": self.switch_seconds,
            "nested": list(self.nested),
            "applied": self.applied,
            "recovered": self.recovered,
            "metrics": self.metrics,
            "weights": {} if self.weights is None else self.weights.to_json(),
            "memory": self.memory,
            "busy_seconds": self.busy_seconds,
            "overlapped": self.overlapped,
        }
        if self.lanes:
            content["lanes"] = self.lanes
        if self.ranks:
            content["ranks"] = self.ranks
        if self.prompts is not None:
            content["prompts"] = self.prompts.to_json()
        if self.changed is not None:
            content["changed"] = self.changed.to_json()
        if self.stopped_early:
            content["stopped_early"] = self.stopped_early
        return content if self.index == UNNUMBERED else {**content, "index": self.index, "rerun": self.rerun}

    @property
    def is_step(self) -> bool:
        """Whether it is of a step: whatever counts, adds up or times steps leaves others out."""
        return self.step > 0

    @property
    def where(self) -> str:
        """Name in messages."""
        return "a step's draft" if self.index == UNNUMBERED else f"step record {self.index}"

    def lane_other(self, lane: str) -> float:
        """Seconds of the step outside every phase of a lane."""
        return self.step_seconds - sum(self.lanes[lane].values())

    def metric(self, name: str) -> float | None:
        """A metric, None where it was not measured; WireError where it is no number."""
        value = self.metrics.get(name)
        return None if value is None else number(value, f"{self.where}: metrics.{name}")

    def scalars(self) -> dict[str, float]:
        """Values that are drawn over the steps, by name; without unmeasured ones, as the times of a step at step 0."""
        own = {"perf/other_time": self.other, "perf/switch_time": self.switch_seconds} if self.is_step else {}
        return {name: value for name, value in {**self.metrics, **own}.items() if value is not None}

    @property
    def reward(self) -> float | None:
        """Mean raw reward of the samples."""
        return self.metric(m.REWARD_KEY)

    def reward_parts(self) -> dict[str, float | None]:
        """Mean of each named part of the reward over the samples that have it; WireError where one is no number."""
        return {name.removeprefix(PREFIX): self.metric(name) for name in self.metrics if name.startswith(PREFIX)}

    @property
    def reward_parts_left_out(self) -> float:
        """Number of names of parts that the driver made no metric of."""
        return self.metric(LEFT_OUT_KEY) or 0.0

    def environment_failures(self) -> dict[str, float]:
        """Failures of environments, by class; empty without episodes, WireError where it is no count."""
        found = {kind: self.metric(name) for kind, name in m.ENVIRONMENT_FAILURE_KEYS.items()}
        counts = {kind: value for kind, value in found.items() if value is not None}
        for kind, value in counts.items():
            if value < 0:
                raise WireError(f"{self.where}: metrics.{m.ENVIRONMENT_FAILURE_KEYS[kind]} must not be negative")
        return counts

    @property
    def response_length(self) -> float | None:
        """Mean length of the responses in tokens."""
        return self.metric(m.RESPONSE_LENGTH_KEY)

    @property
    def log_prob_abs_diff(self) -> float | None:
        """Mean absolute difference between the trainer's and the engine's log-probabilities, in nats."""
        return self.metric(m.LOGPROB_KEY)

    def memory_states(self) -> dict[tuple[str, str, str], float]:
        """Bytes by (process, rank, state) after the last phase that says so.

        Raises:
            WireError: `memory` is not as the driver promises.
        """
        for process, reports in self.memory.items():
            if not isinstance(reports, dict) or not all(isinstance(report, dict) for report in reports.values()):
                raise WireError(f"{self.where}: memory.{process[:80]} must hold an object for each phase")
        states = m.memory_states(self.memory)
        return {
            (p, rank, state): float(number(value, f"{self.where}: memory.{p}-{rank}"))
            for p, rank, state, value in states
        }

    def rank_spans(self) -> Iterator[tuple[str, str, float, float]]:
        """Process, phase, begin and end of each call, in Unix seconds by the driver's clock.

        Raises:
            WireError: `ranks` is not as the driver promises.
        """
        began = self.time - self.step_seconds
        for process, phases in self.ranks.items():
            try:
                for phase, spans in phases.items():
                    for begin, end in spans:
                        if not -1e9 < begin <= end < 1e9:
                            raise ValueError
                        yield process, phase, began + begin, began + end
            except (AttributeError, TypeError, ValueError):
                where = f"{self.where}: ranks.{process[:80]}"
                raise WireError(f"{where} must hold begins and ends for each phase") from None


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise WireError(f"{where} must be a list")
    return tuple(text(one, where) for one in value)


def _phases(value: Any, where: str) -> Mapping[str, float]:
    phases = block(value, where)
    for name, value in phases.items():
        # The whole check is only called for the odd one: this runs for each phase of each step of each job.
        if type(value) is not float or not 0.0 <= value < 1e6:
            seconds(value, f"{where}.{name[:80]}")
    return phases
