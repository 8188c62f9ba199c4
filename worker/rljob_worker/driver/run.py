"""A job from manifest to exit code."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rljob_api import RLJob, RLJobSpec, derived
from rljob_api.reward_parts import MOST_PARTS, NAME_RULE
from rljob_api.safe_text import visible
from rljob_api.spec import CheckpointSpec
from rljob_api.wire.driver_status import DriverStatus
from rljob_api.wire.exit_codes import ExitCode
from rljob_api.wire.names import ATTEMPT_VARIABLE, DRIVER_TOKEN_VARIABLE
from rljob_api.wire.run_status import ADDRESS_FILE, TOKEN_FILE, RunOutcome
from rljob_api.wire.step_record import StepRecord
from rljob_worker.checkpoints.run_folder import Resume, RunFolder
from rljob_worker.cluster.calls import Calls
from rljob_worker.cluster.cluster import LEAVE_SECONDS, Cluster
from rljob_worker.cluster.machine import check_machine
from rljob_worker.cluster.ray_session import RaySession, connected, embedded
from rljob_worker.cluster.ray_watch import RayWatch
from rljob_worker.data.row_store import RowStore
from rljob_worker.devices import COMPUTE_VARIABLE, check_profile
from rljob_worker.driver.inputs import read_inputs
from rljob_worker.driver.job import Job, Surroundings
from rljob_worker.driver.loops import LOOPS
from rljob_worker.driver.outcome import Outcome, conclude, failed, with_all_records
from rljob_worker.driver.preflight import apply_environment, check_layout, check_port, check_trackers
from rljob_worker.driver.stop import StopSignal
from rljob_worker.errors import JobError, StopRequested, UserError
from rljob_worker.host.files import WriteFailures
from rljob_worker.phases import PhaseClock
from rljob_worker.records.event_names import LABEL_UNREADABLE, REWARD_PARTS_LEFT_OUT, WRITE_FAILED
from rljob_worker.records.events import EVENTS, EventLog
from rljob_worker.records.http import DriverServer
from rljob_worker.records.metric_history import EarlyStop, best_step, name_unknown_metric, values_of
from rljob_worker.records.metrics import JobMetrics
from rljob_worker.records.otlp import OtlpFeed
from rljob_worker.records.steps import StepLog
from rljob_worker.records.tensorboard import TensorBoardSink
from rljob_worker.records.trace_process import TraceProcess
from rljob_worker.records.trackers.trackers import Trackers
from rljob_worker.records.writer import RecordWriter, Sink
from rljob_worker.rewards.parts import PartMeans
from rljob_worker.rollouts.inputs import Inputs
from rljob_worker.waiting import waiting_for

logger = logging.getLogger(__name__)
_LINGER_WITHOUT_RAY_SECONDS = 30.0
"""Ray ends a driver whose GCS has been gone for a minute."""


def run_job(
    job: RLJob,
    output: Path,
    *,
    resume: Resume,
    address: str | None = None,
    on_record: Sink,
    on_event: Callable[[str], None],
    loop: Callable[[Surroundings], Job[Any]] | None = None,
    engines_alone: bool = False,
) -> Outcome:
    """Run a validated job in a run folder.

    Args:
        job: the job; without `address` it must be of one node.
        output: run folder, made when it does not exist; with `address`, one that all nodes see at the same path.
        resume: continue the run that the folder holds.
        address: Ray cluster to run on; None: one that is started here for this job alone.
        on_record: called with each step's record.
        on_event: called with a sentence about what the job is doing.
        loop: what is done with its processes; None: that of its mode.
        engines_alone: start no trainers; nothing is saved then.

    Raises:
        UserError: model, data, reward or run folder are not what the manifest says; nothing was started.
    """
    apply_environment(job.spec)
    try:
        check_profile(job.spec.resources.profile.value)
    except ValueError as error:
        raise UserError(str(error)) from None
    check_layout(job.spec)
    if os.environ.get(COMPUTE_VARIABLE):
        on_event(f"computing on the CPU, whatever the profile is: {COMPUTE_VARIABLE} is set")
    if address is None:
        check_machine(job.spec)
    check_trackers(job.spec)
    check_port(job.spec.records.http_host, job.spec.records.http_port)
    with ExitStack() as stack:
        folder = RunFolder(output, job, resume)
        stack.callback(folder.close)
        if folder.is_new and (seen := folder.open_to_others()):
            on_event(f"other users of this machine can read {' and '.join(map(str, seen))} (chmod 700 shuts them out)")
        on_event("reading model, tokenizer and data")
        try:
            inputs = read_inputs(job.spec, folder.path, saves=not engines_alone)
            _check_same_data(folder, inputs)
            inputs.labels.run()
            if folder.attempt == 1:
                inputs.labels.refuse()
        except Exception:
            folder.discard_if_new()
            raise
        stack.callback(inputs.rewards.close)
        for hosts in inputs.hosts:
            stack.callback(hosts.close)
        failures = WriteFailures()
        log = StepLog(folder.path, failures, folder.check)
        stack.callback(log.close)
        made = loop or LOOPS[job.spec.mode]
        outcome = _run(job, made, engines_alone, folder, inputs, log, failures, address, on_record, on_event)
        return conclude(outcome, folder, inputs, log, failures)


def _run(
    manifest: RLJob,
    loop: Callable[[Surroundings], Job[Any]],
    engines_alone: bool,
    folder: RunFolder,
    inputs: Inputs,
    log: StepLog,
    failures: WriteFailures,
    address: str | None,
    on_record: Sink,
    on_event: Callable[[str], None],
) -> Outcome:
    spec = manifest.spec
    with ExitStack() as stack:
        metrics = JobMetrics(spec.steps)
        events = EventLog(folder.path, folder.attempt, metrics.event, failures)
        stack.callback(events.close)

        def tell(what: str, message: str, first: bool) -> None:
            metrics.write_failed(what)
            if first and what != EVENTS:
                events.write(WRITE_FAILED, what=what, message=message)

        failures.tell = tell
        earlier = log.records()
        for record in earlier:
            metrics(record)
        parts = (name for record in earlier for name in record.reward_parts())
        sinks: list[Sink] = [metrics, on_record, _warn_of_unknown_metrics(spec)]
        if spec.records.tensorboard:
            tensorboard = TensorBoardSink(folder.path, failures)
            stack.callback(tensorboard.close)
            sinks.append(tensorboard)
        trackers = Trackers(folder.path, spec, manifest.metadata.name, on_event)
        # Where the end below is not reached, what could not be foreseen waits for nobody.
        stack.callback(trackers.close, failed=True, seconds=0.0)
        sinks.append(trackers)
        otlp = None
        if spec.records.otlp is not None:
            otlp = OtlpFeed(spec.records.otlp, manifest.metadata.name, str(folder.path.absolute()))
            stack.callback(otlp.close, 0.0)
            sinks.append(otlp)
        early_stop = EarlyStop(spec.early_stop, earlier)
        writer = RecordWriter(folder.path, log, folder.attempt, sinks, trackers.samples, early_stop)
        checkpoints = folder.checkpoints(lambda steps: _best_of(spec.checkpoint, log, steps))
        model = inputs.model_folder
        cluster = Cluster(spec, folder.path, model, checkpoints.root, events.write, trains=not engines_alone)
        stop = StopSignal(spec.checkpoint.grace_seconds, cluster.kill)
        ray_watch = stack.enter_context(RayWatch(lambda lost: _end_without_ray(events, lost)).running())
        calls = Calls(
            stop.requested,
            cluster.interrupt,
            cluster.death_of,
            lambda what: _dump(cluster, events, what, job.status()),
            ray_watch=ray_watch,
        )
        given = Surroundings(
            spec,
            cluster=cluster,
            calls=calls,
            clock=PhaseClock(on_start=events.phase),
            stop=stop.requested,
            inputs=inputs,
            checkpoints=checkpoints,
            records=writer,
            events=events,
            attempt=folder.attempt,
            early_stop=early_stop,
            part_means=PartMeans(parts, lambda names: _parts_left_out(events, names)),
            failures=failures,
            changes=folder.changes,
        )
        job = loop(given)
        server = _serve(spec, folder.path, log, job, metrics, failures, on_event)
        if server is not None:
            stack.callback(server.close)
        on_event("starting Ray" if address is None else f"connecting to the Ray cluster at {address}")
        events.write("start")
        session = stack.enter_context(embedded(spec, ray_watch) if address is None else connected(address, ray_watch))
        stop.install()
        try:
            with waiting_for("scoring processes to import their reward"):
                inputs.rewards.start()
            with waiting_for("environments to be imported"):
                for hosts in inputs.hosts:
                    hosts.start()
            stack.callback(inputs.labels.close)
            inputs.labels.start(lambda what: _unreadable(events, what))
            trainers = "" if engines_alone else f"{derived.trainers(spec)} trainer(s) and "
            on_event(f"starting {trainers}{derived.engines(spec)} engine(s)")
            outcome = with_all_records(_train(job, cluster, session, calls, stop, events, on_event), log, failures)
            # What was asked for is on disk: a request that arrives from here on has nothing to wait for.
            stop.finished()
            if job.ready:
                cluster.shutdown(calls)
            else:
                # Still starting: there is nothing to close, and nobody to ask.
                cluster.kill(LEAVE_SECONDS)
            events.write("end", outcome=outcome.outcome)
        except (JobError, UserError, OSError) as error:
            outcome = failed(ray_watch.cause_of(error))
            logger.error("%s", outcome.message)
            stop.finished()
            events.write("failed", message=outcome.message)
            cluster.kill(LEAVE_SECONDS, without_ray=ray_watch.lost)
        # How it ended is decided: a Ray that ends from here on changes nothing.
        ray_watch.close()
        for delivery in trackers.close(outcome.outcome is RunOutcome.FAILED, stop.seconds_left()):
            events.write("tracker", **asdict(delivery))
        if otlp is not None:
            events.write("otlp", **asdict(otlp.close(stop.seconds_left())))
        if server is not None:
            # Whoever asked for the stop may not wait longer than that.
            most = _LINGER_WITHOUT_RAY_SECONDS if ray_watch.lost else math.inf
            server.linger(min(spec.records.linger_seconds, stop.seconds_left(), most))
        return outcome


def _train(
    job: Job[Any],
    cluster: Cluster,
    session: RaySession,
    calls: Calls,
    stop: StopSignal,
    events: EventLog,
    on_event: Callable[[str], None],
) -> Outcome:
    """Start, restore, train, and obey a stop request at whatever point it arrives."""
    try:
        started = time.monotonic()
        total_updates = job.spec.steps * derived.updates_per_step(job.spec)
        limit = job.spec.timeouts.start_seconds
        with waiting_for("devices for all trainers and engines (timeouts.startSeconds)", limit):
            cluster.create(calls, total_updates, stop.requested, session.scratch, session.secrets)
        with waiting_for("trainers and engines to load the model; the run folder's logs/ say how far they are", limit):
            cluster.start(calls)
        session.settled()
        with waiting_for("the checkpoint, and the engines to have the trainers' weights"):
            restored = job.start()
        job.ready = True
        on_event(f"ready after {time.monotonic() - started:.0f} s; {job.goal()}")
        events.write("ready", restored=restored)
        job.train()
        reason = job.end()
        early = f"; stopped early: {reason}" if reason else ""
        return Outcome(ExitCode.OK, RunOutcome.SUCCEEDED, f"{job.done()}{early}")
    except StopRequested:
        events.write("stopping", ready=job.ready)
        return Outcome(ExitCode.STOPPED, RunOutcome.STOPPED, f"stopped as asked; {job.stopped()}")


def _best_of(spec: CheckpointSpec, log: StepLog, steps: Collection[int]) -> int | None:
    """Which checkpoint is kept whatever its age; the records say, so that there is nothing else to keep up to date."""
    best = spec.keep_best
    return None if best is None else best_step(values_of(log.records(), best.metric), best.mode, steps)


def _warn_of_unknown_metrics(spec: RLJobSpec) -> Sink:
    """Look at the first record that is written for the metrics that the job names."""
    named = {"spec.earlyStop": spec.early_stop, "spec.checkpoint.keepBest": spec.checkpoint.keep_best}
    wanted = {f"{field}.metric": block.metric for field, block in named.items() if block is not None}

    def look(record: StepRecord) -> None:
        while record.step and wanted:
            name_unknown_metric(*wanted.popitem(), record)

    return look


def _serve(
    spec: RLJobSpec,
    folder: Path,
    log: StepLog,
    job: Job[Any],
    metrics: JobMetrics,
    failures: WriteFailures,
    on_event: Callable[[str], None],
) -> DriverServer | None:
    if spec.records.http_port is None:
        return None
    server = DriverServer(
        log,
        status=job.status,
        metrics=metrics.text,
        request_checkpoint=job.recovery.request_checkpoint,
        want_engine_nodes=job.cluster.want_engine_nodes,
        request_profile=job.profiles.request,
        trace=TraceProcess(folder).packed,
        host=spec.records.http_host,
        port=spec.records.http_port,
        token=os.environ.get(DRIVER_TOKEN_VARIABLE),
        address_file=folder / ADDRESS_FILE,
        token_file=folder / TOKEN_FILE,
    )
    if not server.local and ATTEMPT_VARIABLE not in os.environ:
        on_event(
            f"spec.records.httpHost: {spec.records.http_host}: whoever reaches this machine reaches the driver's port "
            f"{server.port}; it asks for the token of {TOKEN_FILE}, and is not encrypted"
        )
    with failures.tolerated("the driver's address", folder / ADDRESS_FILE):
        server.start()
    return server


def _check_same_data(folder: RunFolder, inputs: Inputs) -> None:
    """A resumed run on other data, or from checkpoints that cannot be verified, would be refused when the cluster has
    started."""
    store = RowStore(folder.path)
    inputs.prompts.compare_rows(store)
    checkpoints = folder.checkpoints()
    for one in checkpoints.candidates():
        try:
            cursor = checkpoints.read(one.step).data_cursor
        except (JobError, UserError):
            # Damaged: restoring sets it aside by name and takes the one before.
            continue
        inputs.prompts.check(cursor)
        break
    inputs.prompts.remember_rows(store)


def _end_without_ray(events: EventLog, lost: str) -> None:
    """A call of Ray's does not return: this process ends here, which its reaper and its successor are made for."""
    events.write("failed", message=lost)
    print(visible(f"rljob: {lost}"), file=sys.stderr, flush=True)
    os._exit(ExitCode.FAILED)


def _parts_left_out(events: EventLog, names: list[str]) -> None:
    shown = [visible(name[:80]) for name in names]
    events.write(REWARD_PARTS_LEFT_OUT, names=shown)
    logger.warning(
        "parts of the reward that have no metric (in trajectories they are recorded): %s; a job has metrics of %d "
        "parts, and a name needs %s",
        ", ".join(shown),
        MOST_PARTS,
        NAME_RULE,
    )


def _unreadable(events: EventLog, what: str) -> None:
    events.write(LABEL_UNREADABLE, message=what)
    logger.warning("a label cannot be read, and drawing its prompt is an error of the reward: %s", what)


def _dump(cluster: Cluster, events: EventLog, what: str, status: DriverStatus) -> None:
    files = cluster.dump_stacks()
    events.write("deadline", phase=what, lanes=status.lanes, groups=status.groups, engines=status.engines)
    logger.error("%s is past its deadline; stacks are in %s", what, ", ".join(map(str, files)))
