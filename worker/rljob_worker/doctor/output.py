"""The report for people: a table on a terminal, a line for each finding elsewhere, a few for a pod's status."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rljob_api.how_many import how_many
from rljob_api.looks import BAD, FAINT, GOOD, HEADING, WAITING
from rljob_api.safe_text import visible
from rljob_worker.doctor.findings import Finding, Report, Status

_STYLE = {Status.OK: GOOD, Status.WARNING: WAITING, Status.PROBLEM: BAD, Status.NOT_APPLICABLE: FAINT}
_SHORT = {Status.OK: "ok", Status.WARNING: "warning", Status.PROBLEM: "problem", Status.NOT_APPLICABLE: "-"}
TERMINATION_BYTES = 1000
"""`kubectl rljob why` shows about so much of a pod's message; Kubernetes keeps 4096 bytes."""


def show(report: Report, console: Console) -> None:
    """Print the report."""
    if console.is_terminal:
        console.print(_table(report))
    else:
        for finding in report.findings:
            console.print(line(finding, report.cluster), highlight=False, markup=False, soft_wrap=True)
    console.print(summary(report), highlight=False, markup=False, soft_wrap=True)


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style=HEADING)
    headings = ["", *(["node"] if report.cluster else []), "what", "found", "wanted", "how to fix"]
    for heading in headings:
        table.add_column(heading, no_wrap=heading == "", overflow="fold")
    for finding in report.findings:
        node = [finding.node or "all"] if report.cluster else []
        cells = [*node, finding.name, finding.found, finding.wanted, finding.fix]
        table.add_row(Text(_SHORT[finding.status], _STYLE[finding.status]), *(Text(visible(cell)) for cell in cells))
    return table


def line(finding: Finding, with_node: bool) -> str:
    """One finding on one line."""
    node = f"{finding.node or 'all nodes'}: " if with_node else ""
    parts = [f"{_SHORT[finding.status]:<8} {node}{finding.name}: {finding.found}"]
    parts += [f"wanted: {finding.wanted}"] if finding.wanted else []
    parts += [f"fix: {finding.fix}"] if finding.fix else []
    return visible(" ".join("; ".join(parts).split("\n")))


def summary(report: Report) -> str:
    """The last line: how many of what, and what was looked at."""
    counts = [
        how_many(report.count(Status.PROBLEM), "problem"),
        how_many(report.count(Status.WARNING), "warning"),
        f"{report.count(Status.OK)} ok",
        f"{report.count(Status.NOT_APPLICABLE)} not applicable",
    ]
    where = (
        f"{how_many(len(report.nodes), 'node')} of the cluster"
        if report.cluster
        else f"this node alone ({report.nodes[0]})"
    )
    return f"{', '.join(counts)}; looked at {where}"


def termination_message(report: Report, limit: int = TERMINATION_BYTES) -> str:
    """The problems, as short as a pod's status needs them: each gets an equal share of the room."""
    problems = [finding for finding in report.findings if finding.status is Status.PROBLEM]
    if not problems:
        return summary(report)
    start = f"the doctor found {len(problems)} problem{'s' * (len(problems) > 1)}"
    share = max((limit - len(start) - 2) // len(problems) - 3, 1)
    texts = [f"{f.name}: {f.found}, wanted {f.wanted}; {f.fix}" for f in problems]
    said = " | ".join(_cut(visible(text), share) for text in texts)
    return _cut(f"{start}: {said}", limit)


def _cut(text: str, limit: int) -> str:
    """Text of at most `limit` bytes in UTF-8."""
    raw = text.encode()
    return text if len(raw) <= limit else raw[: max(limit - 3, 0)].decode(errors="ignore") + "..."[:limit]
