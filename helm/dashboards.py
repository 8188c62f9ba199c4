"""Write the chart's Grafana dashboards into helm/rljob/files/dashboards: `python helm/dashboards.py [--check]`.

Grafana's own builders (grafana-foundation-sdk) make them; one function here makes a panel of each kind, and the lists
below say what is on a dashboard. Every query takes the job's labels
only: the series of a new leader have another `pod` label, and a graph must not break where the leader changes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TypeVar

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders.prometheus import Dataquery as Question
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DataTransformerConfig,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from rljob_api.generate import write_or_check
from rljob_api.phases import SWITCH_PHASES

FOLDER = "helm/rljob/files/dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
JOB = 'namespace="$namespace", rljob="$rljob"'
FLEET = 'namespace=~"$namespace"'

Query = tuple[str, str]
"""PromQL and the legend of its series."""
Panel = timeseries.Panel | stat.Panel | table.Panel
Variable = dashboard.QueryVariable | dashboard.CustomVariable | dashboard.TextBoxVariable
Kind = TypeVar("Kind", timeseries.Panel, stat.Panel, table.Panel)


def _asked(panel: Kind, title: str, description: str, queries: Sequence[Question], unit: str, width: int) -> Kind:
    panel.title(title).description(description).datasource(SOURCE).unit(unit).span(width)
    panel.height(4 if isinstance(panel, stat.Panel) else 8)
    for i, query in enumerate(queries):
        panel.with_target(query.ref_id(chr(ord("A") + i)).datasource(SOURCE))
    return panel


def _over_time(queries: Sequence[Query]) -> list[Question]:
    return [prometheus.Dataquery().expr(expression).legend_format(legend).range() for expression, legend in queries]


def graph(
    title: str, description: str, *queries: Query, unit: str = "short", width: int = 12, stacked: bool = False,
    signed: bool = False,
) -> timeseries.Panel:  # fmt: skip
    """Lines over time; stacked: areas that add up; signed: they may go below zero."""
    panel = _asked(timeseries.Panel(), title, description, _over_time(queries), unit, width)
    panel.line_width(1).show_points(VisibilityMode.NEVER).span_nulls(False)
    if stacked:
        panel.fill_opacity(70).stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    if not signed:
        panel.min(0)
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.TABLE).placement(LegendPlacement.RIGHT)
    panel.legend(legend.show_legend(True).calcs(["lastNotNull", "mean"]))
    return panel.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))


def number(
    title: str, description: str, *queries: Query, unit: str = "short", width: int = 4, name: bool = False
) -> stat.Panel:
    """The newest value; `name`: the series' name instead."""
    panel = _asked(stat.Panel(), title, description, _over_time(queries), unit, width)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
    return panel.text_mode(BigValueTextMode.NAME if name else BigValueTextMode.VALUE).color_mode(BigValueColorMode.NONE)


def ranking(title: str, description: str, query: str, unit: str = "short", width: int = 12) -> table.Panel:
    """Jobs with a value each, the largest first."""
    now = prometheus.Dataquery().expr(query).instant().format(PromQueryFormat.TABLE)
    panel = _asked(table.Panel(), title, description, [now], unit, width)
    shown = {"excludeByName": {"Time": True}, "renameByName": {"Value": title}}
    panel.with_transformation(DataTransformerConfig(id_val="organize", options=shown))
    largest_first = {"sort": [{"field": title, "desc": True}]}
    return panel.with_transformation(DataTransformerConfig(id_val="sortBy", options=largest_first))


def variable(name: str, query: str, *, many: bool = False) -> dashboard.QueryVariable:
    """A choice among the values of a label."""
    made = dashboard.QueryVariable(name).datasource(SOURCE).query({"query": query, "refId": name})
    made.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC).multi(many).include_all(
        many
    )
    return made.all_value(".*").current(VariableOption(text="All", value="$__all")) if many else made


def board(
    uid: str, title: str, description: str, variables: Sequence[Variable], panels: Sequence[Panel]
) -> dashboard.Dashboard:
    """A dashboard, its panels from left to right, in rows."""
    made = dashboard.Dashboard(title).uid(uid).description(description).tags(["rljob"]).refresh("1m")
    made.editable().tooltip(DashboardCursorSync.CROSSHAIR).time("now-6h", "now")
    made.with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    for one in variables:
        made.with_variable(one)
    for number_, panel in enumerate(panels, 1):
        made.with_panel(panel.id(number_))
    return made


def _per_step(selector: str, family: str = "rljob_phase_seconds") -> str:
    """Mean seconds a step over the graph's interval: what was spent, divided by the steps that were executed."""
    return (
        f"sum by (phase) (increase({family}_sum{{{JOB}{selector}}}[$window])) / on () group_left () "
        f"(sum(increase(rljob_step_seconds_count{{{JOB}}}[$window])) > 0)"
    )


def _share(phases: str, metric: str = "rljob_phase_seconds") -> str:
    """Share of the steps' seconds that these phases took."""
    return (
        f'sum(increase({metric}_sum{{{JOB}, phase=~"{phases}"}}[$window]))'
        f" / sum(increase(rljob_step_seconds_sum{{{JOB}}}[$window]))"
    )


def window() -> dashboard.CustomVariable:
    """Over how long means are taken."""
    made = dashboard.CustomVariable("window").label("Mean over").values("5m,15m,1h,6h")
    return made.current(VariableOption(text="15m", value="15m"))


def target() -> dashboard.TextBoxVariable:
    """The line in the graph of the switch."""
    made = dashboard.TextBoxVariable("target").label("Switch target (s)").default_value("5")
    return made.current(VariableOption(text="5", value="5"))


def job_dashboard() -> dashboard.Dashboard:
    """One job: where each step's seconds go, and what the training does."""
    panels: list[Panel] = [
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
            "Engines' seconds of a step",
            "Where they have devices of their own (modes Disaggregated and Async), beside the trainers' phases above. "
            "In `reward_wait` and `admission_wait` they had nothing to generate.",
            (_per_step(', lane="engine"', "rljob_lane_phase_seconds"), "{{phase}}"),
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
            (_share("actor_train|log_probs|ref_log_probs|teacher_log_probs"), "training"),
            unit="percentunit",
        ),
        graph(
            "Environments",
            "Share of the step's seconds in which the engines waited for environments, of the trainers' lane or of the "
            "engines' own.",
            (_share("env_wait"), "waiting"),
            (_share("env_wait", "rljob_lane_phase_seconds"), "waiting, engines"),
            unit="percentunit",
        ),
        graph(
            "Failures of environments",
            "In the chosen window, by class: processes that were lost (infra), answers that were none (data) or others "
            "than before (replay), and what a policy said that was no action.",
            (f"sum by (class) (increase(rljob_environment_failures_total{{{JOB}}}[$window]))", "{{class}}"),
        ),
        graph(
            "Reward",
            "Mean raw reward of each step, and of the named parts that a reward function returns.",
            (f"max(rljob_reward_mean{{{JOB}}})", "reward"),
            (f"max by (part) (rljob_reward_part{{{JOB}}})", "{{part}}"),
            signed=True,
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
            "Nodes for engines",
            "Where their number may change while the job runs: as many as are wanted, and those that take part.",
            (f"max by (state) (rljob_engine_nodes{{{JOB}}})", "{{state}}"),
        ),
        graph(
            "Checkpoints",
            "Seconds that steps waited for a checkpoint in the chosen window.",
            (f'sum(increase(rljob_phase_seconds_sum{{{JOB}, phase="checkpoint"}}[$window]))', "seconds"),
            unit="s",
        ),
    ]
    variables: list[Variable] = [
        variable("namespace", "label_values(rljob_status_phase, namespace)"),
        variable("rljob", 'label_values(rljob_status_phase{namespace="$namespace"}, rljob)'),
        window(),
        target(),
    ]
    return board("rljob-job", "RLJob / job", "Where one job's seconds go.", variables, panels)


def fleet_dashboard() -> dashboard.Dashboard:
    """All jobs: what waits, what is slow, what became slow."""
    jobs = "by (namespace, rljob)"
    panels: list[Panel] = [
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
        ranking(
            "Seconds in the queue",
            "The 20 jobs that have waited longest for devices, over all their attempts.",
            f'topk(20, max {jobs} (rljob_goodput_device_seconds{{{FLEET}, state="queued"}})'
            f" / (max {jobs} (rljob_devices{{{FLEET}}}) > 0))",
            unit="s",
        ),
        ranking(
            "Seconds of a step",
            "The 20 jobs with the slowest steps, mean over the chosen window.",
            f"topk(20, sum {jobs} (increase(rljob_step_seconds_sum{{{FLEET}}}[$window]))"
            f" / (sum {jobs} (increase(rljob_step_seconds_count{{{FLEET}}}[$window])) > 0))",
            unit="s",
        ),
        ranking(
            "Slower than before",
            "Phases that took more of a step in the last hour than in the six hours before, as a factor.",
            f"topk(20, rljob:phase_seconds:mean1h{{{FLEET}}} / rljob:phase_seconds:mean6h_before{{{FLEET}}} > 1.1)",
        ),
        ranking(
            "Seconds since progress",
            "Running jobs by the time since their last step ended.",
            f"topk(20, (time() - max {jobs} (rljob_last_progress_timestamp_seconds{{{FLEET}}}))"
            f' and on (namespace, rljob) (max {jobs} (rljob_status_phase{{{FLEET}, phase="Running"}}) == 1))',
            unit="s",
        ),
    ]
    variables: list[Variable] = [
        variable("namespace", "label_values(rljob_status_phase, namespace)", many=True),
        window(),
    ]
    return board("rljob-fleet", "RLJob / fleet", "All jobs of the chosen namespaces.", variables, panels)


def operator_dashboard() -> dashboard.Dashboard:
    """The operator itself."""
    panels: list[Panel] = [
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
    return board("rljob-operator", "RLJob / operator", "What the operator does, and how fast.", [window()], panels)


def files() -> dict[str, str]:
    """Return path below the repository -> text."""
    made = [one.build() for one in (job_dashboard(), fleet_dashboard(), operator_dashboard())]
    texts = {one.uid: json.dumps(one, cls=JSONEncoder, indent=1, ensure_ascii=False) for one in made}
    return {f"{FOLDER}/{uid}.json": f"{text}\n" for uid, text in texts.items()}


if __name__ == "__main__":
    sys.exit(write_or_check(files, __doc__))
