"""The commands, one function each."""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlencode

from rljob_api.json_types import JsonObject
from rljob_api.looks import BAD, FAINT, GOOD, HEADING, WAITING
from rljob_api.safe_text import visible, visible_json, visible_line
from rljob_api.validation import ManifestError, load_manifest
from rljob_api.wire.step_record import StepRecord
from rljob_api.wire.values import WireError
from rljob_api.yaml_text import MAX_BYTES
from rljob_operator.kubernetes_objects import RLJobObject
from rljob_operator.plugin.bars import Step
from rljob_operator.plugin.cluster import Cluster
from rljob_operator.plugin.doctor import Examination, examinations, examine_now
from rljob_operator.plugin.head import open_head
from rljob_operator.plugin.logs import show_logs
from rljob_operator.plugin.observe import look, parse_job
from rljob_operator.plugin.problems import CommandError
from rljob_operator.plugin.rendering import PARTS, as_yaml, of_manifest, rendered, to_yaml
from rljob_operator.plugin.status import PHASE_LOOKS, show_list, show_status
from rljob_operator.plugin.terminal import Style, columns, wrapped
from rljob_operator.plugin.trace import LARGEST_BYTES, DriverTrace, cluster_trace
from rljob_operator.ray.driver import Driver
from rljob_operator.ray.http import NoAnswer
from rljob_operator.render import RenderSettings
from rljob_operator.shell.api.resources import EVENTS, PODS, RAY_CLUSTERS, RLJOBS, JobKey
from rljob_operator.shell.caches.views import cluster_state
from rljob_operator.state.checkpoints import ANNOTATION
from rljob_operator.state.explain import explain
from rljob_operator.state.observed import JobView

_TRACE_SECONDS = 120.0
"""The driver's machine needs some seconds for a long run's trace."""
_ROW = 1000
_FINAL = ("Succeeded", "Failed")
_STATE_LOOKS = {"passed": GOOD, "problems": BAD, "running": WAITING, "waiting": FAINT}


async def status(cluster: Cluster, options: argparse.Namespace) -> None:
    """Show a job, with the phases of its last steps as bars."""
    job = parse_job(await cluster.job(options.job))
    records, steps, source = await _steps(cluster, job, options.steps)
    if options.output:
        document = {"status": job.status.model_dump(mode="json", by_alias=True, exclude_none=True), "steps": records}
        _print_document({**document, "source": source}, options.output)
        return
    _print(show_status(job, steps, source, time.time(), Style.of(sys.stdout)))


async def _steps(cluster: Cluster, job: JobView, count: int) -> tuple[list[JsonObject], list[Step], str]:
    """The last steps' records as they are, what is drawn of them and, as a heading, where they come from."""
    why = ""
    running = bool(job.status.attempts) and job.status.attempts[-1].end_time is None
    item = await cluster.find(RAY_CLUSTERS, job.name) if running else None
    if item is not None:
        state = cluster_state(item)
        try:
            async with open_head(cluster, JobKey(job.namespace, job.name), job.uid, state) as head:
                driver = await head.driver()
                records, total = await _last_records(driver, count)
            parsed = map(StepRecord.parse, records)
            steps = [Step.from_record(record) for record in parsed if record.is_step]
            return records, steps, f"The last {len(records)} of {total} step records"
        except (NoAnswer, WireError) as error:
            why = str(error)
    last = job.status.progress.last_step if job.status.progress else None
    if last is None or last.seconds is None:
        return [], [], f"There are no step records: {why}" if why else ""
    record: JsonObject = {"step": last.step, "step_seconds": last.seconds, "phases": dict(last.phase_seconds)}
    step = Step(last.step, last.seconds, last.phase_seconds)
    return [record], [step], f"The last step as the status keeps it ({why or 'no driver is running'})"


async def _last_records(driver: Driver, count: int) -> tuple[list[JsonObject], int]:
    """The last so many records, and how many there are; they may come in several pages."""
    total = (await driver.steps(2**53)).total
    first = max(total - count, 0)
    records: list[JsonObject] = []
    while page := (await driver.steps(first + len(records) - 1)).records:
        records += page
        if first + len(records) >= total:
            break
    return records[-count:], max(total, first + len(records))


async def why(cluster: Cluster, options: argparse.Namespace) -> None:
    """Say in a sentence why a job does not run."""
    found = await look(cluster, options.job)
    explanation = explain(found.observed, time.time())
    if options.output:
        document = {"reason": explanation.reason, "message": explanation.message, "lines": list(explanation.lines)}
        _print_document({**document, "unseen": found.unseen}, options.output)
        return
    style = Style.of(sys.stdout)
    first, *rest = wrapped(f"{explanation.reason}: {explanation.message}", style)
    # The reason is one word, and in the first line whole.
    reason, colon, begun = first.partition(":")
    lines = [f"{style.paint(reason, HEADING)}{colon}{begun}", *rest]
    if explanation.lines:
        lines += [
            "",
            style.paint("The driver's last lines:", HEADING),
            *(f"  {visible_line(line)}" for line in explanation.lines),
        ]
    for sentence in found.unseen:
        lines += ["", *wrapped(f"Not looked at, so the cause may lie there: {sentence}", style)]
    _print(lines)


async def logs(cluster: Cluster, options: argparse.Namespace) -> None:
    """Show the driver's log."""
    pieces = show_logs(cluster, options.job, options.attempt, options.tail, options.follow, _say)
    async with aclosing(pieces):
        async for piece in pieces:
            sys.stdout.write(visible(piece.replace("\r\n", "\n")))
            sys.stdout.flush()


async def doctor(cluster: Cluster, options: argparse.Namespace) -> None:
    """Show what the doctor found in a job's worker pods, or have it look again."""
    found, unseen = ([], "") if options.now else await examinations(cluster, options.job)
    if not found:
        passed, report = await examine_now(cluster, options.job)
        _show_examinations([Examination("", None, "passed" if passed else "problems", "", report)], "", options)
        return
    _show_examinations(found, unseen, options)


def _show_examinations(found: Sequence[Examination], unseen: str, options: argparse.Namespace) -> None:
    if options.output:
        _print_document([asdict(one) for one in found], options.output)
    else:
        style = Style.of(sys.stdout)
        for one in found:
            where = f"Pod {one.pod} on {one.node or 'no node yet'}" if one.pod else "All nodes"
            _print([f"{style.paint(where, HEADING)}: {style.paint(one.state, _STATE_LOOKS[one.state])}"])
            text = one.report or one.message
            _print([f"  {visible(line)}" for line in text.strip().splitlines()] if text.strip() else [])
    if unseen:
        _say(unseen)
    failed = [one.pod or "the cluster" for one in found if one.state == "problems"]
    if failed:
        raise CommandError(f"the doctor found problems: {', '.join(failed)}")


async def suspend(cluster: Cluster, options: argparse.Namespace) -> None:
    """Set spec.suspend."""
    await _set_suspend(cluster, options.job, True)


async def resume(cluster: Cluster, options: argparse.Namespace) -> None:
    """Unset spec.suspend."""
    await _set_suspend(cluster, options.job, False)


async def _set_suspend(cluster: Cluster, name: str, wanted: bool) -> None:
    item = await cluster.job(name)
    _refuse_finished(item, "suspended" if wanted else "resumed")
    doing = f"{'suspend' if wanted else 'resume'} RLJob {cluster.namespace}/{name}"
    if bool((item.get("spec") or {}).get("suspend")) is wanted:
        _print([f"rljob/{name} {'is suspended already' if wanted else 'is not suspended'}"])
        return
    await cluster.change(name, {"spec": {"suspend": wanted}}, doing)
    after = "its last completed step is saved, then its devices are given back" if wanted else "it queues for devices"
    _print([f"rljob/{name} {'suspended' if wanted else 'resumed'}: {after}"])


async def checkpoint(cluster: Cluster, options: argparse.Namespace) -> None:
    """Ask for a checkpoint after the running step."""
    item = await cluster.job(options.job)
    _refuse_finished(item, "checkpointed")
    phase = (item.get("status") or {}).get("phase")
    if phase != "Running":
        raise CommandError(
            f"RLJob {options.job} is {phase or 'not seen by the operator yet'}: only a running job can save a "
            f"checkpoint; see `kubectl rljob why {options.job}`"
        )
    asked = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    body = {"metadata": {"annotations": {ANNOTATION: asked}}}
    await cluster.change(options.job, body, f"annotate RLJob {cluster.namespace}/{options.job}")
    _print([f"rljob/{options.job} is asked for a checkpoint after the running step"])


async def trace(cluster: Cluster, options: argparse.Namespace) -> None:
    """Write what the job's pods and its driver did when as a trace."""
    job = parse_job(await cluster.job(options.job))
    pods = await cluster.list(
        PODS, cluster.namespace, "list the job's pods", {"labelSelector": f"ray.io/cluster={job.name}"}
    )
    recorded, why = None, "no driver is running"
    try:
        recorded = await _recorded(cluster, job)
    except NoAnswer as error:
        why = str(error)
    if recorded is None:
        _say(f"without what the driver recorded: {why}; `rljob trace` reads it from the run folder")
    events = await cluster.list(EVENTS, cluster.namespace, "list events")
    pieces = cluster_trace(job, pods, events, recorded, time.time())
    file = Path(options.output or f"{job.name}.trace.json.gz")
    content = "".join(pieces).encode()
    try:
        file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    except OSError as error:
        raise CommandError(f"{file}: cannot be written: {error.strerror}") from None
    _print([f"trace   {file}", "        https://ui.perfetto.dev opens it"])


async def _recorded(cluster: Cluster, job: JobView) -> DriverTrace | None:
    """Records of the running driver; None where none runs, NoAnswer where it cannot be asked."""
    running = bool(job.status.attempts) and job.status.attempts[-1].end_time is None
    item = await cluster.find(RAY_CLUSTERS, job.name) if running else None
    if item is None:
        return None
    async with open_head(cluster, JobKey(job.namespace, job.name), job.uid, cluster_state(item)) as head:
        driver = await head.driver(_TRACE_SECONDS)
        return DriverTrace(await driver.trace(LARGEST_BYTES))


async def profile(cluster: Cluster, options: argparse.Namespace) -> None:
    """Have a running job profile some steps."""
    job = parse_job(await cluster.job(options.job))
    item = await cluster.find(RAY_CLUSTERS, job.name)
    if item is None or job.status.phase != "Running":
        raise CommandError(f"RLJob {job.name} is {job.status.phase}: only a running job can be profiled")
    query = {"steps": options.steps, "ranks": options.ranks, "engines": options.engines}
    if options.stacks:
        query["stacks"] = "true"
    try:
        async with open_head(cluster, JobKey(job.namespace, job.name), job.uid, cluster_state(item)) as head:
            await (await head.driver()).profile(urlencode(query))
    except NoAnswer as error:
        raise CommandError(str(error)) from None
    _print([f"rljob/{job.name}: profiles of step {options.steps} will be in profiles/ of the run folder"])


def _refuse_finished(item: RLJobObject, participle: str) -> None:
    name, phase = item["metadata"]["name"], (item.get("status") or {}).get("phase")
    if phase in _FINAL:
        raise CommandError(f"RLJob {name} has {str(phase).lower()}: it cannot be {participle} any more")


async def list_jobs(cluster: Cluster, options: argparse.Namespace) -> None:
    """Show all jobs, one a line."""
    everywhere = options.all_namespaces
    items = await cluster.list(RLJOBS, None if everywhere else cluster.namespace, "list RLJobs")
    items.sort(key=lambda item: (item["metadata"]["namespace"], item["metadata"]["name"]))
    if options.output:
        _print_document(items, options.output)
    elif items:
        # Not as wide as the terminal: a row is a line, for people and for programs.
        style = replace(Style.of(sys.stdout), width=_ROW)
        rows = show_list(items, everywhere, time.time())
        _print(columns(rows, style, indent="", heading=True, looks=PHASE_LOOKS))
    else:
        _say(f"there are no RLJobs in {'any namespace' if everywhere else f'namespace {cluster.namespace}'}")


async def render_job(cluster: Cluster, options: argparse.Namespace) -> None:
    """Print what a job of the cluster becomes."""
    job = parse_job(await cluster.job(options.what))
    if any(c.reason == "InvalidSpec" for c in job.status.conditions):
        _say("the operator has refused this spec; rendered below with this command's own settings")
    attempt = options.attempt if options.attempt is not None else job.status.attempt or 0
    _print_rendered(job, options, attempt)


def render_file(options: argparse.Namespace, namespace: str) -> None:
    """Print what a manifest would become; no cluster is asked."""
    try:
        text = sys.stdin.read(MAX_BYTES + 1) + "\n" if options.what == "-" else Path(options.what)
        manifest = load_manifest(text)
    except UnicodeDecodeError as error:
        raise CommandError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from None
    except ManifestError as error:
        raise CommandError(str(error)) from None
    _print_rendered(of_manifest(manifest, namespace), options, options.attempt or 0)


def is_file(what: str) -> bool:
    """Whether `render` was given a file rather than the name of a job."""
    if what == "-" or "/" in what or what.endswith((".yaml", ".yml", ".json")):
        return True
    # Not Path.is_file: a name that is too long for a file raises there, and a pipe is no file to it.
    return os.path.exists(what) and not os.path.isdir(what)


def _print_rendered(job: JobView, options: argparse.Namespace, attempt: int) -> None:
    chosen = options.only or PARTS
    settings = RenderSettings(
        worker_image=options.worker_image,
        kuberay_version=options.kuberay_version,
        operator_namespace=options.operator_namespace,
    )
    parts = {name: content for name, content in rendered(job, settings, attempt).items() if name in chosen}
    if options.output == "json":
        _print_document(parts, "json")
    else:
        sys.stdout.write(as_yaml(parts))


def _print_document(content: object, form: str) -> None:
    sys.stdout.write(visible_json(content) + "\n" if form == "json" else to_yaml(content))


def _print(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _say(sentence: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"kubectl rljob: {visible(sentence)}\n")


Command = Callable[[Cluster, argparse.Namespace], Awaitable[None]]
COMMANDS: dict[str, Command] = {
    "status": status,
    "why": why,
    "logs": logs,
    "doctor": doctor,
    "suspend": suspend,
    "resume": resume,
    "checkpoint": checkpoint,
    "trace": trace,
    "profile": profile,
    "list": list_jobs,
    "render": render_job,
}
