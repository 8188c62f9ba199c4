"""Why a job does not run: one sentence that names the object and what would help.

The messages that are read here were checked against KubeRay 1.6 (raycluster_controller.go), Kueue 0.19
(workload_controller.go, flavorassigner.go; 0.13 itself in tests/cluster/test_kueue.py), Volcano 1.15 (gang.go,
unschedule_info.go), MindCluster's ascend-for-volcano and Kubernetes 1.36 (kubelet's image manager, kube-scheduler's
filters).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from rljob_api.how_many import how_many
from rljob_api.spec import QueueSystem, RLJobSpec
from rljob_api.status import AttemptStatus, JobPhase
from rljob_api.wire.exit_codes import ExitCode
from rljob_operator.state.causes import cut, sentence
from rljob_operator.state.hccl_errors import hccl_error
from rljob_operator.state.observed import ClusterView, Observed, PodRole, SubmissionState, SubmissionView
from rljob_operator.state.pod_causes import pod_problem
from rljob_operator.state.refusals import refusal
from rljob_operator.state.sandboxes import sandbox_problem
from rljob_operator.state.scheduler_messages import not_admitted
from rljob_operator.state.timing import duration_text, seconds_of

KUBERAY_SECONDS = 60.0
"""KubeRay writes a status within a second or two; after this long it is taken for absent."""
_SILENT_SECONDS = 120.0
"""A driver imports its libraries for some seconds before it listens; on a busy machine that is a minute."""
_WORTH_TELLING_SECONDS = 60.0
"""A phase that has run for longer is shown with its duration."""
_KILLED = 128 + signal.SIGKILL
"""Exit code by which a container runtime reports SIGKILL."""
_EXIT_CODES: dict[int, str] = {
    ExitCode.OK: "the driver was done",
    ExitCode.FAILED: "the job failed",
    ExitCode.USER_ERROR: "the manifest, the model, the data or the reward is wrong: restarting cannot help",
    ExitCode.DEADLINE: "a phase was past its deadline (spec.timeouts)",
    ExitCode.WEIGHT_SYNC: "a weight hand-over failed, or was found wrong",
    ExitCode.STOPPED: "stopped as asked",
    _KILLED: "killed, mostly for memory (spec.resources.head.memory)",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the job is not running, or that it is."""

    reason: str
    """One word, as a condition's reason."""
    message: str
    """One sentence for people."""
    lines: tuple[str, ...] = ()
    """The driver's last lines, where it has ended."""


Check = Callable[[Observed, float | None], Explanation | None]


def explain(observed: Observed, now: float | None = None) -> Explanation:
    """Say why the job does not run; the first cause that holds, in the order in which a job comes up.

    Args:
        observed: everything that is known; what is missing is taken as not there.
        now: Unix seconds; None: nothing is judged by its age.
    """
    for check in _CHECKS:
        found = check(observed, now)
        if found is not None:
            return Explanation(_one_word(found.reason), sentence(" ".join(found.message.split())), found.lines)
    return Explanation("Starting", f"RLJob {observed.job.name} is starting.")


def _ended(observed: Observed, now: float | None) -> Explanation | None:
    job, status = observed.job, observed.job.status
    if job.deleting:
        return Explanation("Deleting", f"RLJob {job.name} is being deleted.")
    if status.phase is JobPhase.SUCCEEDED:
        return Explanation("Succeeded", f"RLJob {job.name} is done: {_steps(observed)}.")
    if status.phase is not JobPhase.FAILED:
        return None
    last = status.attempts[-1] if status.attempts else None
    condition = next((c for c in status.conditions if c.type == "Failed" and c.status == "True"), None)
    reason = condition.reason if condition else "Failed"
    why = (condition.message if condition else "") or status.message or ""
    if last is None or not _end_of(last):
        return Explanation(reason, f"RLJob {job.name} failed: {cut(why) or 'no reason was kept'}.")
    lines = tuple(last.last_log_lines)
    if last.message and last.message.rstrip(".") in why:
        code = "" if last.exit_code is None or "exit code" in why else f"the driver ended with {_code(last.exit_code)}"
        return Explanation(reason, sentence(f"RLJob {job.name} failed: {cut(why)}", code), lines)
    return Explanation(reason, sentence(f"RLJob {job.name} failed: {cut(why)}", _end_of(last)), lines)


def _spec(observed: Observed, now: float | None) -> Explanation | None:
    job = observed.job
    if not job.problem and job.spec is not None:
        return None
    return Explanation("InvalidSpec", f"RLJob {job.name} cannot run as it is written: {cut(job.problem)}")


def _suspended(observed: Observed, now: float | None) -> Explanation | None:
    job = observed.job
    if not _spec_of(observed).suspend:
        return None
    if observed.cluster is not None:
        return Explanation(
            "Suspending", f"RLJob {job.name} saves its last completed step and then gives its devices back."
        )
    return Explanation(
        "Suspended", f"RLJob {job.name} has spec.suspend: true; `kubectl rljob resume {job.name}` lets it go on."
    )


def _running(observed: Observed, now: float | None) -> Explanation | None:
    driver, job = observed.driver, observed.job
    asked = observed.submission or observed.submission_error or observed.driver_error
    if driver is None and job.status.phase is JobPhase.RUNNING and not asked:
        return Explanation("Running", f"RLJob {job.name} runs, as the operator saw it last: {_steps(observed)} done.")
    if driver is None or not driver.ready:
        return None
    if driver.stopping:
        return Explanation("Stopping", f"The driver of {job.name} was asked to stop and saves its last step.")
    lasted = driver.phase_seconds or 0.0
    since = f" for {duration_text(lasted)}" if lasted >= _WORTH_TELLING_SECONDS else ""
    phase = f", in phase {driver.phase}{since}" if driver.phase else ""
    beside = "".join(f"; {lane} in phase {name}" for lane, name in sorted(driver.lanes.items()))
    groups = ", ".join(f"{count} {what}" for what, count in driver.groups.items())
    steps = f"{driver.step} of {_spec_of(observed).steps} steps"
    text = f"RLJob {job.name} runs: {steps} done{phase}{beside}{f'; groups: {groups}' if groups else ''}"
    return Explanation("Running", f"{cut(text)}.")


def _backing_off(observed: Observed, now: float | None) -> Explanation | None:
    status = observed.job.status
    if status.next_attempt_time is None or not status.attempts:
        return None
    until = seconds_of(status.next_attempt_time)
    if now is None or now >= until:
        return None
    last = status.attempts[-1]
    at = datetime.fromtimestamp(until, UTC).strftime("%H:%M:%S UTC")
    message = sentence(f"{_end_of(last)[:1].upper()}{_end_of(last)[1:]}", f"the next attempt begins at {at}")
    return Explanation("BackOff", message, tuple(last.last_log_lines))


def _cluster(observed: Observed, now: float | None) -> Explanation | None:
    job, cluster = observed.job, observed.cluster
    if observed.refused is not None:
        return Explanation(observed.refused.reason, observed.refused.message)
    if cluster is None:
        if job.status.phase is None:
            text = f"No operator has looked at RLJob {job.name} yet; if that lasts, see whether the operator runs."
            return Explanation("NotSeen", text)
        if observed.names_taken:
            return Explanation("NamesTaken", observed.names_taken)
        return Explanation("ClusterMissing", f"The operator has not made RayCluster {job.name} yet.")
    if not cluster.owned:
        owner = f"belongs to {cluster.owner}" if cluster.owner else "was not made by the operator"
        text = f"RayCluster {cluster.name} is in the way: it {owner}; delete it or give the RLJob another name."
        return Explanation("ClusterNameTaken", text)
    if cluster.deleting:
        return Explanation("ClusterDeleting", f"RayCluster {cluster.name} is being deleted; a new one follows.")
    if cluster.failure:
        return _replica_failure(cluster)
    if cluster.warning.startswith("InvalidRayCluster"):
        text = f"KubeRay refuses RayCluster {cluster.name}: {cut(cluster.warning)}; check spec.pods."
        return Explanation("ClusterRefused", text)
    return None


_OF_PODS = {"AdmissionDenied": "PodsForbidden", "RequestRefused": "PodsNotMade"}
"""Reasons that have another name where pods are refused."""


def _replica_failure(cluster: ClusterView) -> Explanation:
    what = f"KubeRay cannot make the pods of RayCluster {cluster.name}"
    found = refusal(what, cluster.failure)
    return Explanation(_OF_PODS.get(found.reason, found.reason), found.message)


def _queue(observed: Observed, now: float | None) -> Explanation | None:
    spec, cluster, queue = _spec_of(observed), observed.cluster, observed.queue
    system = spec.scheduling.system
    if queue is not None and not queue.admitted:
        cause = not_admitted(queue, spec, observed.node_devices)
        who = "Kueue" if system is QueueSystem.KUEUE else "Volcano"
        name = queue.object or f"the gang of {observed.job.name}"
        says = f": {cut(queue.message)}" if queue.message else ""
        return Explanation(cause.reason, sentence(f"{who} has not admitted {name}{says}", cause.message))
    if queue is None and cluster is not None and cluster.suspended:
        help_text = (
            "Kueue made no Workload for it: see whether it runs, with ray.io/raycluster in its integrations.frameworks"
            if system is QueueSystem.KUEUE
            else "someone else suspended it: set it to false, or use spec.scheduling.system: Kueue"
        )
        text = f"RayCluster {cluster.name} has spec.suspend: true"
        return Explanation("ClusterSuspended", sentence(text, help_text))
    return None


def _kuberay(observed: Observed, now: float | None) -> Explanation | None:
    cluster = observed.cluster
    if cluster is None or cluster.answered or observed.pods:
        return None
    age = None if now is None else now - cluster.created
    if age is None or age < KUBERAY_SECONDS:
        return Explanation("ClusterNotSeen", f"RayCluster {cluster.name} was made and waits for KubeRay.")
    text = f"KubeRay has not touched RayCluster {cluster.name} in {age:.0f} s; see whether it runs and watches"
    return Explanation("KubeRayNotAnswering", f"{text} namespace {observed.job.namespace}.")


def _pods(observed: Observed, now: float | None) -> Explanation | None:
    problem = pod_problem(observed, _spec_of(observed))
    deadline = _ready_deadline(observed)
    if problem is not None:
        return Explanation(problem.reason, sentence(problem.message, deadline))
    pods = [pod for pod in observed.pods if not pod.deleting]
    cluster = observed.cluster
    if cluster is None or cluster.ready:
        return None
    wanted = cluster.desired_workers + 1
    if cluster.answered and len(pods) < wanted:
        return Explanation("PodsMissing", f"KubeRay has made {len(pods)} of {wanted} pods of {cluster.name} so far.")
    waiting = [pod.name for pod in pods if not pod.ready]
    if waiting:
        text = f"{len(waiting)} of {wanted} pods are not ready yet: {_list(waiting)}"
        return Explanation("PodsStarting", sentence(text, deadline))
    return Explanation("ClusterStarting", f"The pods of RayCluster {cluster.name} are ready, KubeRay's status is not.")


def _sandboxes(observed: Observed, now: float | None) -> Explanation | None:
    attempts = observed.job.status.attempts
    problem = sandbox_problem(observed)
    if problem is None or (attempts and attempts[-1].end_time is None):
        return None
    return Explanation(problem.reason, sentence(problem.message, _ready_deadline(observed, "sandboxes")))


def _ready_deadline(observed: Observed, of: str = "pods") -> str:
    """Until when the pods that have their nodes, or the sandboxes, may take to be ready."""
    cluster, limit = observed.job.status.cluster, _spec_of(observed).timeouts.ready_seconds
    if cluster is None or cluster.scheduled_time is None:
        return ""
    until = datetime.fromtimestamp(seconds_of(cluster.scheduled_time) + limit, UTC).strftime("%H:%M:%S UTC")
    return f"the devices are given back at {until} if not all {of} are ready by then (spec.timeouts.readySeconds)"


def _driver(observed: Observed, now: float | None) -> Explanation | None:
    job, submission = observed.job, observed.submission
    if observed.submission_error:
        head = next((pod.name for pod in observed.pods if pod.role is PodRole.HEAD), "")
        text = f"Ray's job API on head {head or job.name} does not answer: {cut(observed.submission_error)}"
        return Explanation("HeadNotAnswering", sentence(text))
    if submission is None or submission.state is SubmissionState.MISSING:
        return Explanation("NotSubmitted", f"RayCluster {job.name} is ready; its driver is about to be submitted.")
    if submission.state is SubmissionState.PENDING:
        return Explanation("DriverPending", f"Ray has accepted driver {submission.id} and not started it yet.")
    if submission.state is SubmissionState.RUNNING:
        if observed.driver is None and observed.driver_error and not _just_started(submission, now):
            text = f"Driver {submission.id} runs and its endpoint does not answer: {cut(observed.driver_error)}"
            return Explanation("DriverNotAnswering", sentence(text))
        return Explanation(
            "DriverStarting",
            f"Driver {submission.id} starts its trainers and engines; see `kubectl rljob logs {job.name}`.",
        )
    code, lines = submission.exit_code, submission.last_log_lines
    how = _how(job.status.attempt or 0, None, code, submission.message, lines)
    hccl = hccl_error(lines)
    if hccl is not None:
        return Explanation(hccl.reason, sentence(f"In RLJob {job.name}, {how}", hccl.message), lines)
    return Explanation("DriverExited", sentence(f"In RLJob {job.name}, {how}"), lines)


def _just_started(submission: SubmissionView, now: float | None) -> bool:
    """Whether the driver may still be importing its libraries, before it listens."""
    began = submission.start_time
    return began is not None and now is not None and now - began < _SILENT_SECONDS


_CHECKS: tuple[Check, ...] = (
    _ended, _spec, _suspended, _running, _backing_off, _cluster, _queue, _kuberay, _pods, _sandboxes, _driver
)  # fmt: skip


def _end_of(attempt: AttemptStatus) -> str:
    """End of an attempt in words; empty while it runs."""
    if attempt.end_time is None:
        return ""
    lines = tuple(attempt.last_log_lines)
    return _how(attempt.number, attempt.end_step, attempt.exit_code, attempt.message or "", lines)


def _how(number: int, step: int | None, code: int | None, message: str, lines: tuple[str, ...]) -> str:
    at = "" if step is None else f" after step {step}"
    says = f": {cut(message)}" if message else ""
    with_code = f" with {_code(code)}" if code is not None and f"exit code {code}" not in message else ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    quote = f"; its last line: {cut(last, 300)}" if last and cut(last, 300) not in says else ""
    return f"attempt {number} ended{at}{with_code}{says}{quote}"


def _code(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        return f"{name} (the driver was killed)"
    return f"exit code {code} ({_EXIT_CODES[code]})" if code in _EXIT_CODES else f"exit code {code}"


def _one_word(reason: str) -> str:
    """Reasons of other controllers, in the form that a condition may hold."""
    return re.sub(r"[^A-Za-z0-9_]", "", reason).lstrip("0123456789_").rstrip("_") or "Unknown"


def _steps(observed: Observed) -> str:
    progress = observed.job.status.progress
    if progress is None:
        return "all steps"
    early = f", stopped early: {progress.stopped_early}" if progress.stopped_early else ""
    return how_many(progress.step, "step") + early


def _spec_of(observed: Observed) -> RLJobSpec:
    assert observed.job.spec is not None, "checked by _spec"
    return observed.job.spec


def _list(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
