"""A plan as tables for people and as JSON for programs."""

from __future__ import annotations

from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rljob_api.json_types import JsonObject
from rljob_worker.planning.remedies import Change, Remedies
from rljob_worker.planning.tables import KEPT_FREE, MemoryPlan, MemoryTable, PhaseMemory

_ORDER = (
    "weights",
    "shared weights",
    "gradients",
    "optimizer",
    "critic",
    "teacher",
    "gathered",
    "merged",
    "activations",
    "logits",
    "work",
    "engine weights",
    "KV cache",
    "engine work",
    "judge",
    "judge cache",
    "staging slots",
    "communicators",
    "runtime",
    "tensors",
    "backup",
    "reference",
    "snapshot",
    "routed experts",
    "processes",
    KEPT_FREE,
)

_SMALL_MARGIN = 0.05
"""Part of a memory below which what is left is no reassurance."""


def as_renderable(
    plan: MemoryPlan, remedies: Remedies | None, hint: Change | None, assumed: list[str]
) -> RenderableType:
    """Tables, the verdict, what to change, and what was assumed."""
    unit, size = _unit(plan)
    parts: list[RenderableType] = []
    for table in plan.tables:
        parts += [_table(table, unit, size), Text(_verdict(table, unit, size)), Text()]
    lines = [*_longest(plan), *_cache(plan, hint), *_handed_over(plan), *_advice(remedies, unit, size)]
    parts += [Text(line) for line in lines]
    parts += [Text(), Text("assumed:"), *(Text(f"- {line}") for line in assumed)]
    return Group(*parts)


def as_json(plan: MemoryPlan, remedies: Remedies | None, hint: Change | None, assumed: list[str]) -> JsonObject:
    """The same as plain values; bytes."""
    return {
        "fits": plan.fits,
        "missing_bytes": plan.missing,
        "longest_sequence": plan.longest,
        "tables": [
            {
                "title": table.title,
                "limit": table.limit,
                "peak_phase": table.peak.phase,
                "peak": table.peak.total,
                "over": table.over,
                "phases": {row.phase: {"total": row.total, **row.components} for row in table.phases},
            }
            for table in plan.tables
        ],
        "kv_cache": {
            "bytes_per_token": plan.engine.kv_bytes_per_token,
            "bytes": plan.engine.kv_cache,
            "needed": plan.engine.kv_needed,
            "wanted": plan.engine.kv_wanted,
            "longest_sequences": plan.engine.sequences,
            "hint": None if hint is None else hint.setting,
        },
        "handed_over": plan.handed_over,
        "remedies": None
        if remedies is None
        else {
            "alone": [change.setting for change in remedies.alone],
            "together": [change.setting for change in remedies.together],
            "missing_bytes": remedies.missing,
        },
        "assumptions": assumed,
    }


def _unit(plan: MemoryPlan) -> tuple[str, int]:
    largest = max(table.peak.total for table in plan.devices)
    return ("GiB", 2**30) if largest >= 8 * 2**30 else ("MiB", 2**20)


def _table(memory: MemoryTable, unit: str, size: int) -> Table:
    used = {name for row in memory.phases for name in row.components}
    columns = [name for name in _ORDER if name in used]
    table = Table(title=f"{memory.title}, {unit}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("phase", no_wrap=True)
    for name in [*columns, "total"]:
        table.add_column("\n".join(name.split()), justify="right", vertical="bottom")
    for row, phases in _alike(memory.phases):
        cells = [_number(row.components.get(name), size) for name in columns]
        style = "bold" if row.total == memory.peak.total else None
        table.add_row(phases, *cells, _number(row.total, size), style=style)
    return table


def _alike(rows: list[PhaseMemory]) -> list[tuple[PhaseMemory, str]]:
    """Runs of phases with the same memory as one row."""
    runs = [list(run) for _, run in groupby(rows, key=lambda row: row.components)]
    return [(run[0], run[0].phase if len(run) == 1 else f"{run[0].phase} to {run[-1].phase}") for run in runs]


def _number(nbytes: int | None, size: int) -> str:
    if nbytes is None:
        return ""
    return f"{nbytes / size:.2f}" if size == 2**30 else f"{nbytes / size:.0f}"


def _verdict(table: MemoryTable, unit: str, size: int) -> str:
    peak = f"peak {_number(table.peak.total, size)} {unit} in {table.peak.phase}"
    if table.limit is None:
        return peak
    left = table.limit - table.peak.total
    verdict = f"does not fit, {_number(-left, size)} {unit} missing"
    if left >= 0:
        verdict = f"fits, {_number(left, size)} {unit} left"
        if left < _SMALL_MARGIN * table.limit:
            verdict += ", which gaps between blocks may take"
    return f"{peak} of {_number(table.limit, size)} {unit}: {verdict}"


def _longest(plan: MemoryPlan) -> list[str]:
    if plan.longest is None:
        return []
    return [f"longest sequence that a trainer's device can train on, by itself in a micro-batch: {plan.longest} tokens"]


def _handed_over(plan: MemoryPlan) -> list[str]:
    if plan.handed_over == plan.of_model:
        return []
    share = plan.handed_over / plan.of_model
    return [f"engines get {plan.handed_over / 2**20:.1f} MiB in a step: {share:.2%} of the model's weights"]


def _cache(plan: MemoryPlan, hint: Change | None) -> list[str]:
    engine = plan.engine
    held = f"KV cache {engine.kv_bytes_per_token} bytes a token and device: room for {engine.sequences:.1f} sequences"
    if plan.engine_short:
        return [f"{held} of the longest length; vLLM does not start below 1"]
    share = engine.kv_cache / engine.kv_wanted
    said = [f"{held} of the longest length, {min(share, 1):.0%} of what a step's sequences would fill at their longest"]
    return said if hint is None else [*said, f"  --set {hint.setting} would fit too ({hint.cost})"]


def _advice(remedies: Remedies | None, unit: str, size: int) -> list[str]:
    if remedies is None:
        return []
    if remedies.alone:
        return ["", "any one of these makes it fit, most harmless first:", *map(_line, remedies.alone)]
    if remedies.together:
        return ["", "together these make it fit:", *map(_line, remedies.together)]
    missing = f"{_number(remedies.missing, size)} {unit}"
    return [
        "",
        f"nothing that was tried makes it fit, {missing} are missing after all: more devices or a smaller model",
    ]


def _line(change: Change) -> str:
    return f"  --set {change.setting}  ({change.cost})"
