"""An attempt at a run: its processes, loop and records, from their start to an outcome."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from rljob_api import RLJob, RLJobSpec, derived
from rljob_api.how_many import how_many
from rljob_api.reward_parts import MOST_PARTS, NAME_RULE
from rljob_api.safe_text import visible
from rljob_api.spec import CheckpointSpec
from rljob_api.wire.driver_status import DriverStatus
from rljob_api.wire.exit_codes import ExitCode
from rljob_api.wire.names import ATTEMPT_VARIABLE, DRIVER_TOKEN_VARIABLE
from rljob_api.wire.run_status import ADDRESS_FILE, TOKEN_FILE, RunOutcome
from rljob_api.wire.step_record import StepRecord
from rljob_worker.checkpoints.run_folder import RunFolder
from rljob_worker.checkpoints.store import CheckpointStore
from rljob_worker.cluster.calls import Calls
from rljob_worker.cluster.cluster import LEAVE_SECONDS, Cluster
from rljob_worker.cluster.ray_session import RaySession, connected, embedded
from rljob_worker.cluster.ray_watch import RayWatch
from rljob_worker.driver.job import Job, Surroundings
from rljob_worker.driver.outcome import Outcome, failed, with_all_records, write_end
from rljob_worker.driver.stop import StopSignal
from rljob_worker.errors import StopRequested
from rljob_worker.host.files import WriteFailures
from rljob_worker.host.garbage import rare_collections
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
_LAST_WORD_SECONDS = 1.0


@dataclass(frozen=True)
class Attempt:
    """An attempt at a run, once folder, model, data and reward are there."""

    manifest: RLJob
    folder: RunFolder
    inputs: Inputs
    log: StepLog
    failures: WriteFailures
    on_record: Sink
    """Called with each step's record."""
    on_event: Callable[[str], None]
    """Called with a sentence about what the job is doing."""
    loop: Callable[[Surroundings], Job[Any]]
    engines_alone: bool
    """Start no trainers."""
    address: str | None
    """Ray cluster to run on; None: one that is started for this job alone."""
    scores: bool = True
    """Whether responses are scored, for which a judge's model is started."""

    @property
    def spec(self) -> RLJobSpec:
        """The job."""
        return self.manifest.spec

    def run(self) -> Outcome:
        """Start the processes, train, and end them. Errors are the outcome, also those that nobody foresaw."""
        with ExitStack() as stack:
            metrics = JobMetrics(self.spec.steps)
            events = EventLog(self.folder.path, self.folder.attempt, metrics.event, self.failures)
            stack.callback(events.close)
            try:
                return self._run(Records(self, metrics, events, stack), stack)
            except BaseException as error:
                # A stop before its handler was there, Ray did not start, or a library ended the process.
                write_end(events, error)
                raise

    def _run(self, records: Records, stack: ExitStack) -> Outcome:
        checkpoints = self.folder.checkpoints(lambda steps: _best_of(self.spec.checkpoint, self.log, steps))
        trains = not self.engines_alone
        model, events = self.inputs.model_folder, records.events
        cluster = Cluster(
            self.spec,
            self.folder.path,
            model,
            checkpoints.root,
            events.write,
            trains=trains,
            critic_folder=self.inputs.critic_folder,
            teacher_folder=self.inputs.teacher_folder,
            judge=self.inputs.judge if self.scores else None,
        )
        stop = StopSignal(self.spec.checkpoint.grace_seconds, cluster.kill, lambda why: _last_word(events, why))
        ray_watch = stack.enter_context(RayWatch(lambda lost: _end_without_ray(events, lost)).running())
        calls = Calls(
            stop.requested,
            cluster.interrupt,
            cluster.death_of,
            lambda what: _dump(cluster, events, what, job.status()),
            ray_watch=ray_watch,
        )
        job = self.loop(self._surroundings(records, cluster, calls, stop, checkpoints))
        server = _serve(self, job, records.metrics)
        if server is not None:
            stack.callback(server.close)
        outcome = self._carry_out(job, events, cluster, calls, stop, ray_watch, stack)
        # How it ended is decided: a Ray that ends from here on changes nothing.
        ray_watch.close()
        records.deliver(outcome, stop)
        if server is not None:
            # Whoever asked for the stop may not wait longer than that.
            most = _LINGER_WITHOUT_RAY_SECONDS if ray_watch.lost else math.inf
            server.linger(min(self.spec.records.linger_seconds, stop.seconds_left(), most))
        return outcome

    def _carry_out(
        self,
        job: Job[Any],
        events: EventLog,
        cluster: Cluster,
        calls: Calls,
        stop: StopSignal,
        watch: RayWatch,
        stack: ExitStack,
    ) -> Outcome:
        """Connect to Ray, start everything, train, and end the processes; `stack` leaves Ray."""
        where = "starting Ray" if self.address is None else f"connecting to the Ray cluster at {self.address}"
        self.on_event(where)
        events.write("start")
        # Ctrl-C need not wait until Ray has started: nothing is to be saved.
        stop.install(signal.SIGTERM)
        ray = embedded(self.spec, watch) if self.address is None else connected(self.address, watch)
        session = stack.enter_context(ray)
        stop.install()
        try:
            self._start_inputs(stack, events)
            trainers = "" if self.engines_alone else f"{how_many(derived.trainers(self.spec), 'trainer')} and "
            self.on_event(f"starting {trainers}{how_many(derived.engines(self.spec), 'engine')}")
            trained = _train(job, cluster, session, calls, stop, events, self.on_event)
            outcome = with_all_records(trained, self.log, self.failures)
            # What was asked for is on disk: a request that arrives from here on has nothing to wait for.
            stop.finished()
            if job.ready:
                cluster.shutdown(calls)
            else:
                # Still starting: there is nothing to close, and nobody to ask.
                cluster.kill(LEAVE_SECONDS)
            events.write("end", outcome=outcome.outcome)
        except Exception as error:
            outcome = failed(watch.cause_of(error))
            logger.error("%s", outcome.message)
            stop.finished()
            events.write("failed", message=outcome.message)
            cluster.kill(LEAVE_SECONDS, without_ray=watch.lost)
        return outcome

    def _surroundings(
        self, records: Records, cluster: Cluster, calls: Calls, stop: StopSignal, checkpoints: CheckpointStore
    ) -> Surroundings:
        events = records.events
        return Surroundings(
            self.spec,
            cluster=cluster,
            calls=calls,
            clock=PhaseClock(on_start=events.phase),
            stop=stop.requested,
            inputs=self.inputs,
            checkpoints=checkpoints,
            records=records.writer,
            events=events,
            attempt=self.folder.attempt,
            early_stop=records.early_stop,
            part_means=PartMeans(records.earlier_parts, lambda names: _parts_left_out(events, names)),
            failures=self.failures,
            changes=self.folder.changes,
        )

    def _start_inputs(self, stack: ExitStack, events: EventLog) -> None:
        """Start what scores and what answers episodes; `stack` ends the reading of labels."""
        with waiting_for("scoring processes to import their reward"):
            self.inputs.rewards.start()
            if self.inputs.group_filter is not None:
                self.inputs.group_filter.start()
        with waiting_for("environments to be imported"):
            for hosts in self.inputs.hosts:
                hosts.start()
        stack.callback(self.inputs.labels.close)
        self.inputs.labels.start(lambda what: _unreadable(events, what))


class Records:
    """Events, step records and their sinks of an attempt; `stack` closes them.

    Args:
        attempt: the attempt; the records of those before it are read.
        metrics: which get the records.
        events: of the attempt.
        stack: closed when the attempt is over.
    """

    def __init__(self, attempt: Attempt, metrics: JobMetrics, events: EventLog, stack: ExitStack) -> None:
        spec, path, failures = attempt.spec, attempt.folder.path, attempt.failures
        name = attempt.manifest.metadata.name
        self.metrics, self.events = metrics, events
        failures.tell = self._write_failed
        earlier = attempt.log.records()
        for record in earlier:
            self.metrics(record)
        self.earlier_parts = (part for record in earlier for part in record.reward_parts())
        sinks: list[Sink] = [self.metrics, attempt.on_record, _warn_of_unknown_metrics(spec)]
        if spec.records.tensorboard:
            tensorboard = TensorBoardSink(path, failures)
            stack.callback(tensorboard.close)
            sinks.append(tensorboard)
        self._trackers = Trackers(path, spec, name, attempt.on_event)
        # Where `deliver` is not reached, what could not be foreseen waits for nobody.
        stack.callback(self._trackers.close, failed=True, seconds=0.0)
        sinks.append(self._trackers)
        self._otlp: OtlpFeed | None = None
        if spec.records.otlp is not None:
            self._otlp = OtlpFeed(spec.records.otlp, name, str(path.absolute()))
            stack.callback(self._otlp.close, 0.0)
            sinks.append(self._otlp)
        self.early_stop = EarlyStop(spec.early_stop, earlier)
        samples = self._trackers.samples
        self.writer = RecordWriter(path, attempt.log, attempt.folder.attempt, sinks, samples, self.early_stop)

    def deliver(self, outcome: Outcome, stop: StopSignal) -> None:
        """Give trackers and the OTLP endpoint what they lack, as long as a stop request leaves time."""
        for delivery in self._trackers.close(outcome.outcome is RunOutcome.FAILED, stop.seconds_left()):
            self.events.write("tracker", **asdict(delivery))
        if self._otlp is not None:
            self.events.write("otlp", **asdict(self._otlp.close(stop.seconds_left())))

    def _write_failed(self, what: str, message: str, first: bool) -> None:
        self.metrics.write_failed(what)
        if first and what != EVENTS:
            self.events.write(WRITE_FAILED, what=what, message=message)


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
        total_updates = derived.total_updates(job.spec)
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
        with rare_collections():
            job.train()
        reason = job.end()
        early = f"; stopped early: {reason}" if reason else ""
        return Outcome(ExitCode.OK, RunOutcome.SUCCEEDED, f"{job.done()}{early}")
    except StopRequested:
        events.write("stopping", ready=job.ready)
        return Outcome(ExitCode.STOPPED, RunOutcome.STOPPED, f"stopped as asked; {job.stopped()}")


def _best_of(spec: CheckpointSpec, log: StepLog, steps: Collection[int]) -> int | None:
    """The checkpoint that is kept whatever its age; the records say, so that there is nothing else to keep up to
    date."""
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


def _serve(attempt: Attempt, job: Job[Any], metrics: JobMetrics) -> DriverServer | None:
    spec, folder = attempt.spec, attempt.folder.path
    if spec.records.http_port is None:
        return None
    server = DriverServer(
        attempt.log,
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
        attempt.on_event(
            f"spec.records.httpHost: {spec.records.http_host}: whoever reaches this machine reaches the driver's port "
            f"{server.port}; it asks for the token of {TOKEN_FILE}, and is not encrypted"
        )
    with attempt.failures.tolerated("the driver's address", folder / ADDRESS_FILE):
        server.start()
    return server


def _end_without_ray(events: EventLog, lost: str) -> None:
    """A call of Ray's does not return: this process ends here, which its reaper and its successor are made for."""
    _last_word(events, lost)
    print(visible(f"rljob: {lost}"), file=sys.stderr, flush=True)
    os._exit(ExitCode.FAILED)


def _last_word(events: EventLog, why: str) -> None:
    """Say why this process ends at once, unless another thread has the file and does not get on with it."""
    writes = threading.Thread(target=lambda: events.write("failed", message=why), name="last-word", daemon=True)
    writes.start()
    writes.join(_LAST_WORD_SECONDS)


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
