"""Write the chart's Grafana dashboards into helm/rljob/files/dashboards: `python helm/dashboards.py [--check]`.

One function makes a panel of each kind; the lists below say what is on a dashboard. Every query takes the job's labels
only: the series of a new leader have another `pod` label, and a graph must not break where the leader changes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rljob_api.generate import write_or_check
from rljob_api.phases import SWITCH_PHASES

FOLDER = "helm/rljob/files/dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
JOB = 'namespace="$namespace", rljob="$rljob"'
FLEET = 'namespace=~"$namespace"'

Panel = dict[str, Any]
Query = tuple[str, str]
"""PromQL and the legend of its series."""


def _panel(kind: str, title: str, description: str, queries: Sequence[Query], unit: str, width: int) -> Panel:
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "gridPos": {"w": width, "h": 4 if kind == "stat" else 8},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": {},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for i, (expression, legend) in enumerate(queries)
        ],
    }


def graph(
    title: str, description: str, *queries: Query, unit: str = "short", width: int = 12, stacked: bool = False
) -> Panel:
    """Lines over time; stacked: areas that add up."""
    panel = _panel("timeseries", title, description, queries, unit, width)
    custom: dict[str, Any] = {"lineWidth": 1, "showPoints": "never", "spanNulls": False}
    if stacked:
        custom |= {"fillOpacity": 70, "stacking": {"mode": "normal"}}
    panel["fieldConfig"]["defaults"] |= {"custom": custom, "min": 0}
    panel["options"] = {
        "legend": {"displayMode": "table", "placement": "right", "calcs": ["lastNotNull", "mean"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel


def signed(panel: Panel) -> Panel:
    """Let a graph go below zero."""
    del panel["fieldConfig"]["defaults"]["min"]
    return panel


def number(
    title: str, description: str, *queries: Query, unit: str = "short", width: int = 4, name: bool = False
) -> Panel:
    """The newest value; `name`: the series' name instead."""
    panel = _panel("stat", title, description, queries, unit, width)
    calculation = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    panel["options"] = {"reduceOptions": calculation, "textMode": "name" if name else "value", "colorMode": "none"}
    return panel


def table(title: str, description: str, query: str, unit: str = "short", width: int = 12) -> Panel:
    """Jobs with a value each, the largest first."""
    panel = _panel("table", title, description, [(query, "")], unit, width)
    panel["targets"][0] |= {"format": "table", "instant": True}
    panel["transformations"] = [
        {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": {"Value": title}}},
        {"id": "sortBy", "options": {"sort": [{"field": title, "desc": True}]}},
    ]
    return panel


def variable(name: str, query: str, *, many: bool = False) -> dict[str, Any]:
    """A choice among the values of a label."""
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": many,
        "includeAll": many,
        **({"allValue": ".*", "current": {"text": "All", "value": "$__all"}} if many else {}),
    }


def choice(name: str, label: str, kind: str, options: str, first: str) -> dict[str, Any]:
    """A value that the reader picks from a list (`custom`), or types (`textbox`)."""
    return {
        "name": name,
        "label": label,
        "type": kind,
        "query": options,
        "current": {"text": first, "value": first},
    }


def dashboard(
    uid: str, title: str, description: str, variables: list[dict[str, Any]], panels: list[Panel]
) -> dict[str, Any]:
    """Lay the panels out from left to right, in rows."""
    x = y = height = 0
    for number_, panel in enumerate(panels, 1):
        place = panel["gridPos"]
        if x + place["w"] > WIDTH:
            x, y, height = 0, y + height, 0
        place |= {"x": x, "y": y}
        x, height = x + place["w"], max(height, place["h"])
        panel["id"] = number_
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["rljob"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "1m",
        "templating": {"list": [source, *variables]},
        "panels": panels,
    }


def _per_step(selector: str) -> str:
    """Mean seconds a step over the graph's interval: what was spent, divided by the steps that were executed."""
    return (
        f"sum by (phase) (increase(rljob_phase_seconds_sum{{{JOB}{selector}}}[$window])) / on () group_left () "
        f"(sum(increase(rljob_step_seconds_count{{{JOB}}}[$window])) > 0)"
    )


def _share(phases: str) -> str:
    """What part of the steps' seconds these phases took."""
    return (
        f'sum(increase(rljob_phase_seconds_sum{{{JOB}, phase=~"{phases}"}}[$window]))'
        f" / sum(increase(rljob_step_seconds_sum{{{JOB}}}[$window]))"
    )


WINDOW = choice("window", "Mean over", "custom", "5m,15m,1h,6h", "15m")
TARGET = choice("target", "Switch target (s)", "textbox", "5", "5")


def job_dashboard() -> dict[str, Any]:
    """One job: where each step's seconds go, and what the training does."""
    panels = [
        number(
            "Phase",
            "Phase of the job's life cycle.",
            (f"max by (phase) (rljob_status_phase{{{JOB}}} == 1)", "{{phase}}"),
            name=True,
        ),
        number("Step", "Last completed step.", (f"max(rljob_step{{{JOB}}})", "step")),
        number("Steps", "Steps that the job will run.", (f"max(rljob_target_steps{{{JOB}}})", "steps")),
        number(
            "Time left",
            "Steps that are left, at the mean of the chosen window.",
            (
                f"(max(rljob_target_steps{{{JOB}}}) - max(rljob_step{{{JOB}}}))"
                f" * sum(increase(rljob_step_seconds_sum{{{JOB}}}[$window]))"
                f" / (sum(increase(rljob_step_seconds_count{{{JOB}}}[$window])) > 0)",
                "left",
            ),
            unit="s",
        ),
        number("Reward", "Mean raw reward of the last step.", (f"max(rljob_reward_mean{{{JOB}}})", "reward")),
        number(
            "Useful",
            "Share of the device-hours that went into steps that count.",
            (
                f'sum(rljob_goodput_device_seconds{{{JOB}, state="useful"}})'
                f" / sum(rljob_goodput_device_seconds{{{JOB}}})",
                "useful",
            ),
            unit="percentunit",
        ),
        graph(
            "Seconds of a step by phase",
            "Phases are disjoint: with `other` they add up to the step.",
            (_per_step(""), "{{phase}}"),
            unit="s",
            width=24,
            stacked=True,
        ),
        graph(
            "Switch",
            "Seconds of a step that sharing the devices takes: what sleeps, wakes and hands the weights over. The line "
            "is the target set above.",
            (_per_step(f', phase=~"{"|".join(SWITCH_PHASES)}"'), "{{phase}}"),
            ("vector($target)", "target"),
            unit="s",
        ),
        graph(
            "Rollout and training",
            "Shares of the step's seconds: which of the two a faster step has to come from.",
            (_share("rollout"), "rollout"),
            (_share("actor_train|log_probs|ref_log_probs"), "training"),
            unit="percentunit",
        ),
        signed(
            graph(
                "Reward",
                "Mean raw reward of each step, and of the named parts that a reward function returns.",
                (f"max(rljob_reward_mean{{{JOB}}})", "reward"),
                (f"max by (part) (rljob_reward_part{{{JOB}}})", "{{part}}"),
            )
        ),
        graph(
            "Response length",
            "Mean length of each step's responses.",
            (f"max(rljob_response_length_mean{{{JOB}}})", "tokens"),
        ),
        graph(
            "Log-probability difference",
            "Mean absolute difference between trainer and engine: it grows when the engine generates with other "
            "weights or other numerics than the trainer's.",
            (f"max(rljob_logprob_abs_diff{{{JOB}}})", "nats"),
        ),
        graph(
            "Weights handed over",
            "Bytes of the last weight sync.",
            (f"max(rljob_weights_sync_bytes{{{JOB}}})", "bytes"),
            unit="bytes",
        ),
        graph(
            "Memory of the trainers",
            "The largest of all ranks, by state: what is used awake, what is paused and backed up asleep.",
            (f'max by (state) (rljob_device_memory_bytes{{{JOB}, process="trainer"}})', "{{state}}"),
            unit="bytes",
        ),
        graph(
            "Memory of the engines",
            "The largest of all ranks, by state.",
            (f'max by (state) (rljob_device_memory_bytes{{{JOB}, process="engine"}})', "{{state}}"),
            unit="bytes",
        ),
        graph(
            "Restarts and lost work",
            "Attempts that failed, by reason, and steps that had to be run again.",
            (f"max by (reason) (rljob_restarts_total{{{JOB}}}) > 0", "{{reason}}"),
            (f"max(rljob_lost_steps_total{{{JOB}}})", "steps lost"),
        ),
        graph(
            "Checkpoints",
            "Seconds that steps waited for a checkpoint in the chosen window.",
            (f'sum(increase(rljob_phase_seconds_sum{{{JOB}, phase="checkpoint"}}[$window]))', "seconds"),
            unit="s",
        ),
    ]
    variables = [
        variable("namespace", "label_values(rljob_status_phase, namespace)"),
        variable("rljob", 'label_values(rljob_status_phase{namespace="$namespace"}, rljob)'),
        WINDOW,
        TARGET,
    ]
    return dashboard("rljob-job", "RLJob / job", "Where one job's seconds go.", variables, panels)


def fleet_dashboard() -> dict[str, Any]:
    """All jobs: what waits, what is slow, what became slow."""
    jobs = "by (namespace, rljob)"
    panels = [
        graph(
            "Jobs by phase",
            "How many jobs are in each phase of their life cycle.",
            (f"sum by (phase) (max by (namespace, rljob, phase) (rljob_status_phase{{{FLEET}}}))", "{{phase}}"),
            stacked=True,
        ),
        graph(
            "Devices of running jobs",
            "Devices that jobs in phase Running hold.",
            (
                f"sum by (namespace) (max {jobs} (rljob_devices{{{FLEET}}})"
                f' and on (namespace, rljob) (max {jobs} (rljob_status_phase{{{FLEET}, phase="Running"}}) == 1))',
                "{{namespace}}",
            ),
            stacked=True,
        ),
        graph(
            "Device-hours by use",
            "Of all jobs that are there: waiting, starting, in steps that count, in steps that were run again, between "
            "steps.",
            (
                f"sum by (state) (max by (namespace, rljob, state) (rljob_goodput_device_seconds{{{FLEET}}})) / 3600",
                "{{state}}",
            ),
            unit="h",
            stacked=True,
        ),
        graph(
            "Restarts",
            "Attempts that failed and were followed by another, in the chosen window.",
            (f"sum by (reason) (increase(rljob_restarts_total{{{FLEET}}}[$window])) > 0", "{{reason}}"),
        ),
        table(
            "Seconds in the queue",
            "The 20 jobs that have waited longest for devices, over all their attempts.",
            f'topk(20, max {jobs} (rljob_goodput_device_seconds{{{FLEET}, state="queued"}})'
            f" / (max {jobs} (rljob_devices{{{FLEET}}}) > 0))",
            unit="s",
        ),
        table(
            "Seconds of a step",
            "The 20 jobs with the slowest steps, mean over the chosen window.",
            f"topk(20, sum {jobs} (increase(rljob_step_seconds_sum{{{FLEET}}}[$window]))"
            f" / (sum {jobs} (increase(rljob_step_seconds_count{{{FLEET}}}[$window])) > 0))",
            unit="s",
        ),
        table(
            "Slower than before",
            "Phases that took more of a step in the last hour than in the six hours before, as a factor.",
            f"topk(20, rljob:phase_seconds:mean1h{{{FLEET}}} / rljob:phase_seconds:mean6h_before{{{FLEET}}} > 1.1)",
        ),
        table(
            "Seconds since progress",
            "Running jobs by the time since their last step ended.",
            f"topk(20, (time() - max {jobs} (rljob_last_progress_timestamp_seconds{{{FLEET}}}))"
            f' and on (namespace, rljob) (max {jobs} (rljob_status_phase{{{FLEET}, phase="Running"}}) == 1))',
            unit="s",
        ),
    ]
    variables = [variable("namespace", "label_values(rljob_status_phase, namespace)", many=True), WINDOW]
    return dashboard("rljob-fleet", "RLJob / fleet", "All jobs of the chosen namespaces.", variables, panels)


def operator_dashboard() -> dict[str, Any]:
    """The operator itself."""
    panels = [
        number("Leader", "Replicas that act: one.", ("sum(rljob_operator_leader)", "leaders"), width=6),
        number("Queue", "Jobs that wait to be looked at.", ("max(rljob_operator_queue_depth)", "jobs"), width=6),
        number(
            "Watch age", "Seconds since the most silent watch was heard of.",
            ("max(rljob_operator_watch_age_seconds)", "age"), unit="s", width=6,
        ),
        number(
            "Events dropped", "Kubernetes Events that were not sent in the chosen window.",
            ("sum(increase(rljob_operator_events_dropped_total[$window]))", "events"), width=6,
        ),
        graph(
            "Looks", "Jobs that were looked at, by result.",
            ("sum by (result) (rate(rljob_operator_reconcile_seconds_count[$window]))", "{{result}}"), unit="ops",
        ),
        graph(
            "Seconds of a look", "From looking at a job to having done what follows.",
            ("histogram_quantile(0.5, sum by (le) (rate(rljob_operator_reconcile_seconds_bucket[$window])))", "median"),
            ("histogram_quantile(0.95, sum by (le) (rate(rljob_operator_reconcile_seconds_bucket[$window])))", "95 %"),
            unit="s",
        ),
        graph(
            "Requests to the API server", "By method and status code.",
            ("sum by (method, code) (rate(rljob_operator_api_requests_total[$window]))", "{{method}} {{code}}"),
            unit="reqps",
        ),
        graph(
            "Writes", "Objects written, by kind; Events not counted.",
            ("sum by (kind) (rate(rljob_operator_writes_total[$window]))", "{{kind}}"), unit="wps",
        ),
        graph(
            "Watches", "Seconds since each watch was last heard of.",
            ("max by (resource) (rljob_operator_watch_age_seconds)", "{{resource}}"), unit="s",
        ),
        graph(
            "Watches opened again", "By what ended the one before, in the chosen window.",
            (
                "sum by (resource, cause) (increase(rljob_operator_watch_restarts_total[$window]))",
                "{{resource}} {{cause}}",
            ),
        ),
        graph(
            "Objects known", "Objects in the caches of the replica with the most.",
            ("max by (resource) (rljob_operator_cached_objects)", "{{resource}}"),
        ),
        graph("Waiting", "Jobs that wait to be looked at.", ("max(rljob_operator_queue_depth)", "jobs")),
        graph(
            "Step records not read", "Looks at a job whose step records could not be read or counted, by cause.",
            ("sum by (cause) (increase(rljob_operator_record_errors_total[$window]))", "{{cause}}"),
        ),
    ]  # fmt: skip
    return dashboard("rljob-operator", "RLJob / operator", "What the operator does, and how fast.", [WINDOW], panels)


def files() -> dict[str, str]:
    """Return path below the repository -> text."""
    made = (job_dashboard(), fleet_dashboard(), operator_dashboard())
    return {f"{FOLDER}/{one['uid']}.json": json.dumps(one, indent=1, ensure_ascii=False) + "\n" for one in made}


if __name__ == "__main__":
    sys.exit(write_or_check(files, __doc__))
