"""The documents, alerts and dashboards name only what is exported, and all of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboard_queries import dashboard_queries, dashboards

from rljob_api import metrics as m
from rljob_api.phases import PHASES
from rljob_operator.metrics.lifecycle import REASONS
from rljob_operator.metrics.record import PHASE_LABELS

REPOSITORY = Path(__file__).parents[3]
ALERTS = REPOSITORY / "helm/rljob/files/alerts.yaml"
METRICS = REPOSITORY / "docs/metrics.md"
RUNBOOK = REPOSITORY / "docs/runbook.md"
RULE_TESTS = sorted((Path(__file__).parent / "rules").glob("*_test.yaml"))

SERIES = {
    name
    for metric in m.ALL_METRICS
    for name in (
        [f"{metric.name}_{end}" for end in ("bucket", "sum", "count")]
        if metric.kind is m.Kind.HISTOGRAM
        else [metric.exposed_name]
    )
}
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus, or a release of Prometheus)"
)


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def names_in(text: str) -> set[str]:
    """Metric names; a recorded series has a colon and is none."""
    return set(re.findall(r"(?<![\w:./-])rljob_\w+(?![\w:])", text))


def test_names_are_unique_and_follow_the_conventions() -> None:
    names = [metric.name for metric in m.ALL_METRICS]
    assert len(set(names)) == len(names)
    for metric in m.ALL_METRICS:
        assert re.fullmatch(r"rljob_[a-z_]+[a-z]", metric.name)
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_info", "_created"))
        assert metric.help.endswith(".")
        assert "|" not in metric.help, "it stands in a table"
        assert list(metric.buckets) == sorted(metric.buckets)


def test_the_tables_are_the_registry() -> None:
    text = METRICS.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `rljob")]
    labels = [", ".join(f"`{label}`" for label in metric.labels) for metric in m.ALL_METRICS]
    assert rows == [
        f"| `{metric.exposed_name}` | {metric.kind} | {names} | {metric.unit} | {metric.help} |"
        for metric, names in zip(m.ALL_METRICS, labels, strict=True)
    ]
    assert {*PHASES} < {*PHASE_LABELS}
    for value in (*PHASE_LABELS, *REASONS, *m.MEMORY_STATES.values()):
        assert f"`{value}`" in text, value


def test_queries_and_alerts_use_series_that_there_are() -> None:
    queries = "\n".join(query for _, query in documented_queries())
    expressions = "\n".join(alert["expr"] for alert in alerts())
    assert names_in(queries) <= SERIES
    assert names_in(expressions) <= SERIES
    assert names_in(RUNBOOK.read_text(encoding="utf-8")) <= SERIES | {m.MEMORY_BYTES.name}


QUERIES = dashboard_queries("team", "job")


def test_dashboards_are_those_of_the_generator() -> None:
    command = [sys.executable, str(REPOSITORY / "helm/dashboards.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert [*dashboards()] == ["rljob-fleet", "rljob-job", "rljob-operator"]


def test_dashboards_use_series_that_there_are_and_leave_none_out() -> None:
    queries = "\n".join(QUERIES.values())
    assert names_in(queries) <= SERIES
    recorded = {rule["record"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
                if "record" in rule}  # fmt: skip
    assert set(re.findall(r"rljob:[a-z0-9_:]+", queries)) <= recorded
    assert "vector(0)" not in queries, "a panel without data must be seen to have none"
    shown = {metric.name for metric in m.ALL_METRICS if metric.name in queries}
    not_shown = {
        m.VERIFICATION_FAILURES.name,
        m.CONDITION.name,
        m.CHECKPOINT_FALLBACKS.name,
        m.REWARD_PARTS_LEFT_OUT.name,
        m.WRITE_FAILURES.name,
    }
    assert {metric.name for metric in m.ALL_METRICS} - shown == not_shown


def test_every_panel_says_what_it_shows_and_in_which_unit() -> None:
    for board in dashboards().values():
        assert board["description"]
        names = [panel["title"] for panel in board["panels"]]
        assert len(names) >= 8
        for panel in board["panels"]:
            assert panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert panel["targets"], panel["title"]
        asked = {"$" + name for panel in board["panels"] for target in panel["targets"]
                 for name in re.findall(r"\$(\w+)", target["expr"])}  # fmt: skip
        assert asked <= {"$" + variable["name"] for variable in board["templating"]["list"]}


def test_panels_do_not_overlap() -> None:
    for board in dashboards().values():
        taken: set[tuple[int, int]] = set()
        for place in (panel["gridPos"] for panel in board["panels"]):
            assert place["x"] + place["w"] <= 24
            cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
            assert not cells & taken
            taken |= cells


def test_every_alert_is_explained_where_it_points_to_and_tested() -> None:
    sections = {line[3:].strip() for line in RUNBOOK.read_text(encoding="utf-8").splitlines() if line[:3] == "## "}
    names = {alert["alert"] for alert in alerts()}
    assert names == sections
    tested = {name for path in RULE_TESTS for name in re.findall(r"alertname: (\w+)", path.read_text(encoding="utf-8"))}
    assert names == tested
    for alert in alerts():
        assert alert["annotations"]["runbook_url"] == f"docs/runbook.md#{alert['alert'].lower()}"
        assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert alert["labels"]["severity"] in ("warning", "critical")


def documented_queries() -> list[tuple[int, str]]:
    blocks = re.findall(r"```promql\n(.*?)```", METRICS.read_text(encoding="utf-8"), re.DOTALL)
    return list(enumerate(query.strip() for block in blocks for query in block.split("\n\n")))


@promtool
@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should_and_not_otherwise(path: Path) -> None:
    command = ["promtool", "test", "rules", path.name]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_documented_queries_and_alerts_are_valid(tmp_path: Path) -> None:
    wanted = [*(query for _, query in documented_queries()), *QUERIES.values()]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(wanted)]
    assert len(rules) > 40
    queries = tmp_path / "queries.yaml"
    queries.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    for path in (queries, ALERTS):
        done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
