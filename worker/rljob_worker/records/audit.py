"""Whether a run took each prompt exactly once: step records held against one another, checkpoints and samples. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob_api.wire.prompts_of_step import PromptsOfStep, Ranges
from rljob_api.wire.step_record import Changed, StepRecord
from rljob_worker.flow import Decision, Frontier
from rljob_worker.flow.frontier import LEDGER_KEYS
from rljob_worker.records.steps import effective_steps

_SHOWN = 8


@dataclass(slots=True)
class PromptAudit:
    """Audit of the prompts in the records, step by step.

    Attributes:
        findings: what is wrong, a sentence each.
        steps: how many are accounted for.
        not_numbered: how many steps at the beginning are of a version that did not number prompts.
        ledgers: by step, the ledger after it: what the checkpoint of that step must say.
    """

    findings: list[str] = field(default_factory=list)
    steps: int = 0
    not_numbered: int = 0
    trained: int = 0
    filtered: int = 0
    skipped: int = 0
    open: set[int] = field(default_factory=set)
    next: int = 0
    ledgers: dict[int, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Changes at a resume, a sentence each."""
    _closed: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Ordinal -> the step that closed it, and how."""

    def add(self, record: StepRecord) -> None:
        """The next step of the history."""
        step, prompts = record.step, record.prompts
        if step != (done := self.steps + self.not_numbered) + 1:
            self.findings.append(f"step {step}: its record follows that of step {done}")
            # Said once; what follows is held against this step.
            self.not_numbered += step - 1 - done
        if prompts is None:
            self._without_prompts(step)
            return
        self.steps += 1
        if self.steps == 1 and self.not_numbered:
            self._began_unnumbered(prompts)
        if prompts.next < self.next:
            self.findings.append(f"step {step}: prompts were drawn up to {prompts.next}, after {self.next} before it")
        available = self.open | set(range(self.next, prompts.next))
        fates = ("trained", prompts.trained), ("filtered", prompts.filtered), ("skipped", prompts.skipped)
        for fate, ranges in fates:
            available -= self._close(step, fate, ranges, available)
        still_open = _numbers(prompts.open)
        self._differ(step, "were drawn, and neither trained, filtered, skipped nor left open", available - still_open)
        self._differ(step, "are called open but were closed before or never drawn", still_open - available)
        self.open, self.next = still_open, prompts.next
        self.ledgers[step] = {
            "next": self.next,
            "open": sorted(still_open),
            LEDGER_KEYS[Decision.TRAINED]: self.trained,
            LEDGER_KEYS[Decision.FILTERED]: self.filtered,
            LEDGER_KEYS[Decision.SKIPPED]: self.skipped,
        }

    def check_checkpoint(self, step: int, cursor: Mapping[str, Any]) -> None:
        """Hold the ledger in a checkpoint's data cursor against the records."""
        ledger, expected = cursor.get("ledger"), self.ledgers.get(step)
        if expected is None:
            return
        if ledger is None:
            self.findings.append(f"checkpoint of step {step}: it has no ledger of prompts, but the step's record has")
            return
        try:
            state = Frontier.restore(ledger).state()
        except ValueError as error:
            self.findings.append(f"checkpoint of step {step}: {error}")
            return
        wrong = [name for name, value in expected.items() if state[name] != value]
        self.findings += [
            f"checkpoint of step {step}: {name} is {_short(state[name])}, but {_short(expected[name])} by the records"
            for name in wrong
        ]

    def check_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Hold a step's trajectories against its record."""
        if step not in self.ledgers:
            return
        open_ = set(self.ledgers[step]["open"])
        wrong = set()
        for sample in samples:
            ordinal, decision = sample.get("ordinal"), sample.get("decision")
            if ordinal is None or decision is None:
                continue
            expected = "surplus" if ordinal in open_ else None
            closed = self._closed.get(ordinal)
            if closed is not None and closed[0] == step:
                expected = closed[1]
            if decision != expected:
                wrong.add(ordinal)
        self._differ(step, "have another decision in the trajectories than in the record", wrong)

    def _without_prompts(self, step: int) -> None:
        if self.steps:
            self.findings.append(f"step {step}: its record does not say what became of its prompts")
            self.steps += 1
        else:
            self.not_numbered += 1

    def _began_unnumbered(self, prompts: PromptsOfStep) -> None:
        """Whatever was drawn before the first numbered step was trained on: versions without numbers did so."""
        first = min((r.start for r in (*prompts.trained, *prompts.filtered, *prompts.open)), default=prompts.next)
        self.next = self.trained = first

    def _close(self, step: int, fate: str, ranges: Ranges, available: set[int]) -> set[int]:
        numbers = _numbers(ranges)
        for ordinal in sorted(numbers - available)[:_SHOWN]:
            before = self._closed.get(ordinal)
            why = "never drawn" if before is None else f"{before[1]} by step {before[0]} already"
            self.findings.append(f"step {step}: prompt {ordinal} was {fate}, but {why}")
        self._closed.update(dict.fromkeys(numbers, (step, fate)))
        setattr(self, fate, getattr(self, fate) + len(numbers))
        return numbers

    def _differ(self, step: int, what: str, ordinals: set[int]) -> None:
        if ordinals:
            self.findings.append(f"step {step}: prompts {_short(sorted(ordinals))} {what}")


def audit_prompts(records: Sequence[StepRecord]) -> PromptAudit:
    """Follow the prompts through a run's records, in the order of the file."""
    audit = PromptAudit()
    for record in effective_steps(records):
        if record.is_step and record.applied:
            audit.add(record)
            audit.notes += changes_of(record)
    return audit


def changes_of(record: StepRecord) -> list[str]:
    """Changes by the resume before a step, a sentence each."""
    changed, step = record.changed or Changed(), record.step
    found = []
    if changed.rounding:
        found.append(f"step {step}: bits may differ from here on: {', '.join(changed.rounding)} changed at a resume")
    if changed.fields:
        found.append(f"step {step}: some samples may differ from here on: {', '.join(changed.fields)} changed")
    if changed.rows:
        found.append(f"step {step}: rows of the data were mended before it: {', '.join(changed.rows)}")
    return found


def _numbers(ranges: Ranges) -> set[int]:
    return {ordinal for part in ranges for ordinal in part}


def _short(value: Any) -> str:
    if not isinstance(value, list) or len(value) <= _SHOWN:
        return str(value)
    return f"{value[:_SHOWN]} and {len(value) - _SHOWN} more"
