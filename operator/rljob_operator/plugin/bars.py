"""The phases of the last steps as bars."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_api.looks import PHASE_COLORS
from rljob_api.phases import PHASES, SWITCH_PHASES
from rljob_api.safe_text import visible_line
from rljob_api.wire.step_record import StepRecord
from rljob_operator.plugin.terminal import Style, seconds

OTHER = "other"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_GLYPHS = {
    **{"rollout": "█", "actor_train": "▓", "critic_train": "▓"},
    **{"values": "▒", "ref_log_probs": "▒", "teacher_log_probs": "▒", "log_probs": "▒"},
    **{"reward": "▚", "checkpoint": "▞"},
}
_ASCII = str.maketrans("█▓▒░▚▞▟·", "#=+-r:e.", _EIGHTHS[1:])


@dataclass(frozen=True, slots=True)
class Step:
    """A step's record as far as it is drawn."""

    number: int
    seconds: float
    phases: Mapping[str, float]
    """Seconds by phase, without `other`."""
    rerun: bool = False

    @classmethod
    def from_record(cls, record: StepRecord) -> Step:
        """Part of one of the driver's records that is drawn."""
        phases = {visible_line(name): seconds for name, seconds in record.phases.items()}
        return cls(record.step, record.step_seconds, phases, record.rerun)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by phase in the order of the loop, unknown ones after the known, `other` last."""
        order = [*PHASES, *(name for name in self.phases if name not in PHASES)]
        parts = {name: self.phases[name] for name in order if self.phases.get(name)}
        return {**parts, OTHER: max(self.seconds - sum(parts.values()), 0.0)}


def draw_steps(steps: Sequence[Step], style: Style) -> list[str]:
    """One bar for each step, as long as its seconds; the longest fills the line."""
    if not steps:
        return []
    label = max(len(str(step.number)) for step in steps) + 1
    longest = max(step.seconds for step in steps)
    room = style.width - label - 13
    lines = []
    for step in steps:
        mark = "*" if step.rerun else " "
        bar = _stacked(step.parts, longest, room, style)
        lines.append(f"  {step.number:>{label - 1}}{mark} {seconds(step.seconds):>8}  {bar}".rstrip())
    if any(step.rerun for step in steps):
        lines.append("  * was run again after a restart")
    return lines


def draw_phases(steps: Sequence[Step], style: Style) -> list[str]:
    """The legend: each phase with its seconds in the last step, the median over the steps, its share, and a bar."""
    if not steps:
        return []
    last = steps[-1].parts
    order = [name for name in (*PHASES, *_unknown(steps)) if any(name in step.parts for step in steps)]
    medians = {name: statistics.median([step.parts.get(name, 0.0) for step in steps]) for name in [*order, OTHER]}
    whole = sum(step.seconds for step in steps) or 1.0
    shares = {name: sum(step.parts.get(name, 0.0) for step in steps) / whole for name in medians}
    width = max(len(name) for name in medians)
    room, largest = style.width - width - 35, max(shares.values()) or 1.0
    lines = [f"    {'phase':<{width}} {'last':>8} {'median':>8}   share"]
    for name, median in medians.items():
        bar = style.paint(_bar(shares[name] / largest * room, style), _colour(name))
        row = f"{name:<{width}} {seconds(last.get(name, 0.0)):>8} {seconds(median):>8}  {shares[name]:6.1%}  "
        lines.append(f"  {_cell(name, style)} {row}{bar}".rstrip())
    switch = [sum(step.phases.get(name, 0.0) for name in SWITCH_PHASES) for step in steps]
    share = sum(switch) / whole
    row = f"{'switch':<{width}} {seconds(switch[-1]):>8} {seconds(statistics.median(switch)):>8}  {share:6.1%}"
    glyph = "" if style.colour else f"  (all {_cell('sleep', style)})"
    return [*lines, f"    {row}{glyph}"]


def progress_bar(done: float, style: Style, room: int) -> str:
    """A share between 0 and 1 as a bar in brackets."""
    cells = round(min(max(done, 0.0), 1.0) * room)
    full, rest = ("█", "·") if style.unicode else ("#", ".")
    return f"[{style.paint(full * cells, PHASE_COLORS['rollout'])}{rest * (room - cells)}]"


def _unknown(steps: Sequence[Step]) -> list[str]:
    return sorted({name for step in steps for name in step.phases} - set(PHASES))


def _stacked(parts: Mapping[str, float], longest: float, room: int, style: Style) -> str:
    """Cells are given out by rounding the running sum, so that the bar's length is right whatever its parts are."""
    bar, total, filled = "", 0.0, 0
    for name, value in parts.items():
        total += value
        cells = round(total / longest * room) - filled if longest else 0
        filled += cells
        bar += _cell(name, style, cells)
    return bar


def _cell(name: str, style: Style, count: int = 1) -> str:
    """With colours the blocks are all full; without them the shade shows the kind of phase."""
    glyph = "·" if name == OTHER else "▟" if name == "eval" else _GLYPHS.get(name, "░")
    if style.colour:
        return style.paint("█" * count, _colour(name))
    return (glyph if style.unicode else glyph.translate(_ASCII)) * count


def _colour(name: str) -> str:
    return PHASE_COLORS.get(name, "bright_black")


def _bar(cells: float, style: Style) -> str:
    if not style.unicode:
        return "#" * round(cells)
    whole, eighths = divmod(round(cells * 8), 8)
    return "█" * whole + (_EIGHTHS[eighths] if eighths else "")
