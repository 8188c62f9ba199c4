"""A small world for the reconciler: an API server's objects, KubeRay, a scheduler, kubelets, Ray and drivers.

Everything is a state machine that `pass_time` drives; faults are methods. `look` is one turn of an operator that may
see caches that lag behind, may get no answer from Ray or the driver, and may die between any two of its writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from rljob_api.spec import RLJobSpec
from rljob_api.status import RLJobStatus
from rljob_api.validation import load_manifest
from rljob_operator.shell.caches.views import cluster_state
from rljob_operator.state.observed import (
    ClusterView,
    DriverView,
    JobView,
    Observed,
    PodRole,
    PodView,
    SandboxesView,
    SandboxView,
    StepView,
    SubmissionState,
    SubmissionView,
)
from rljob_operator.state.plan import (
    Action,
    ApplyPolicy,
    ApplySecret,
    ClaimSandboxes,
    CreateCluster,
    DeleteCluster,
    DeleteJob,
    Plan,
    ReleaseSandboxes,
    RequestCheckpoint,
    Stop,
    Submit,
)
from rljob_operator.state.reconcile import reconcile
from rljob_operator.state.sandboxes import warm_pool

UID = "5f0c7f2e-0000-4000-8000-000000000001"
STEP_SECONDS = 10.0
SPEC: dict[str, Any] = {
    "steps": 40,
    "model": {"path": "/models/tiny"},
    "data": {"path": "/data/a.jsonl", "promptKey": "prompt"},
    "reward": {"name": "math"},
    "rollout": {"promptsPerStep": 2, "samplesPerPrompt": 2, "maxResponseTokens": 16},
    "training": {"globalBatchSize": 4},
    "resources": {"profile": "cpu", "nodes": 2, "devicesPerNode": 1},
    "checkpoint": {"path": "/shared", "everySteps": 3, "graceSeconds": 30},
    "timeouts": {"startSeconds": 300, "phaseSeconds": 600},
    "failurePolicy": {"maxRestarts": 3, "backoffSeconds": 5, "maxBackoffSeconds": 60},
}


def with_pool(count: int) -> dict[str, Any]:
    """Changes to a spec whose programs run in sandboxes of a warm pool; 0: in none."""
    if not count:
        return {}
    service = {"warmPool": {"name": "pool", "count": count}}
    return {
        "reward": {"name": "code", "args": {"kind": "Calls", "tests": "tests"}},
        "sandbox": {"isolation": "Service", "service": service},
    }


def make_spec(**changes: Any) -> RLJobSpec:
    """The spec of the tests with other top-level blocks, merged one level deep."""
    spec = dict(SPEC)
    for name, value in changes.items():
        spec[name] = {**spec.get(name, {}), **value} if isinstance(value, dict) else value
    document = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "job"}, "spec": spec}
    return load_manifest(document).spec


@dataclass
class Pod:
    uid: str
    role: PodRole
    cluster: str
    age: float = 0.0
    node: bool = False
    phase: str = "Pending"
    deleting: float | None = None
    """Seconds until it is gone."""
    node_lost: bool = False
    terminated: str = ""
    waiting: str = ""
    session: str = ""


@dataclass
class Cluster:
    uid: str
    owned: bool = True
    suspend: bool = False
    """`spec.suspend`, which the queue sets."""
    suspending: bool = False
    suspended: bool = False
    """KubeRay's conditions: the first while pods still end, the second when all are gone."""
    ready: bool = False
    deleting: bool = False


@dataclass
class Claim:
    """A SandboxClaim, which agent-sandbox gives a sandbox of the pool."""

    name: str
    uid: str
    age: float = 0.0
    ended: bool = False
    deleting: bool = False

    @property
    def ready(self) -> bool:
        return self.age >= 25 and not self.ended and not self.deleting


@dataclass
class RayJob:
    id: str
    session: str
    target: int
    state: SubmissionState = SubmissionState.PENDING
    exit_code: int | None = None
    age: float = 0.0
    ready: bool = False
    step: float = 0.0
    run_attempt: int = 0
    folder: Folder | None = None
    """The folder that gave it its number."""
    cut_off: bool = False
    """Its node is lost to everybody, and it runs on there."""
    hangs: bool = False
    stuck: float | None = None
    """Seconds since when its phase makes no progress, while it answers."""
    stops: bool = False


@dataclass
class Folder:
    """The run folder on shared storage."""

    attempts: int = 0
    checkpoint: int = 0
    useful: float = 0.0
    lost: float = 0.0


class OperatorDied(Exception):
    pass


class ActionFailed(Exception):
    pass


class World:
    """One job in a cluster. Times are Unix seconds."""

    def __init__(self, spec: RLJobSpec) -> None:
        self.now = 1_700_000_000.0
        self.spec = spec
        self.generation = 1
        self.problem = ""
        """Why the operator cannot render the spec."""
        self.annotations: dict[str, str] = {}
        self.status = RLJobStatus()
        self.status_writes = 0
        self.deleted = False
        self.version = 0
        self.secret = self.policy = False
        self.cluster: Cluster | None = None
        self.pods: list[Pod] = []
        self.claims: dict[str, Claim] = {}
        self.pool_gives = True
        """Whether claims get sandboxes."""
        self.ray: dict[str, dict[str, RayJob]] = {}
        self.folder = Folder()
        self.capacity = True
        self.image_missing = False
        """One worker's node cannot pull the image."""
        self.start_seconds = 20.0
        self.fences = True
        """Whether a driver sees that a later one has begun (rljob_worker.checkpoints.fencing)."""
        self.runs: list[RayJob] = []
        self.ghosts: list[RayJob] = []
        """Drivers on lost nodes whose pods are no longer listed."""
        self.watch: Callable[[], None] = lambda: None
        """Called after each part of the time that passes."""
        self.checkpoints_asked = 0
        self.actions: list[Action] = []
        self._ids = count(1)
        self._seen: list[tuple[ClusterView | None, tuple[PodView, ...]]] = []
        self._cluster_at = self._pods_at = 0
        self._snap()

    # --- time -------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        """Let everything but the operator run for a while."""
        left = seconds
        while left > 0:
            part = min(5.0, left)
            left -= part
            self.now += part
            self._kuberay()
            self._kubelets(part)
            self._agent_sandbox(part)
            for job in [*self.ghosts, *(job for jobs in self.ray.values() for job in jobs.values())]:
                self._drive(job, part)
            self._snap()
            self.watch()

    def _kuberay(self) -> None:
        self._suspend_or_resume()
        self._collect_garbage()
        for pod in self.pods:
            mine = self.cluster is not None and self.cluster.owned and pod.cluster == self.cluster.uid
            if pod.deleting is None and (not mine or self.cluster is None or self.cluster.suspending):
                pod.deleting = 20.0
            if pod.deleting is None and pod.phase == "Failed":
                pod.deleting = 5.0
        cluster = self.cluster
        if cluster is None or not cluster.owned or cluster.deleting:
            return
        alive = [p for p in self.pods if p.deleting is None and p.cluster == cluster.uid]
        if not cluster.suspending and not cluster.suspended:
            if not [p for p in alive if p.role is PodRole.HEAD]:
                self._new_pod(PodRole.HEAD)
            for _ in range(self.spec.resources.nodes - len([p for p in alive if p.role is PodRole.WORKER])):
                self._new_pod(PodRole.WORKER)
        ready = [p for p in alive if p.phase == "Running" and not p.node_lost]
        suspended = cluster.suspending or cluster.suspended
        cluster.ready = not suspended and len(ready) == self.spec.resources.nodes + 1

    def _collect_garbage(self) -> None:
        """Deletion in the foreground: first the pods, then the cluster."""
        if self.cluster is None or not self.cluster.deleting:
            return
        left = [pod for pod in self.pods if pod.cluster == self.cluster.uid]
        for pod in left:
            pod.deleting = 20.0 if pod.deleting is None else pod.deleting
        if not left:
            self.cluster = None

    def _suspend_or_resume(self) -> None:
        """In KubeRay's order: the wish, the pods' deletion, and when the last one is gone that it is done."""
        cluster = self.cluster
        if cluster is None or not cluster.owned:
            return
        if cluster.suspending and not [pod for pod in self.pods if pod.cluster == cluster.uid]:
            cluster.suspending, cluster.suspended = False, True
        elif cluster.suspend and not cluster.suspended:
            cluster.suspending = True
        elif cluster.suspended and not cluster.suspend:
            cluster.suspended = False

    def _agent_sandbox(self, seconds: float) -> None:
        self.claims = {name: claim for name, claim in self.claims.items() if not claim.deleting}
        for claim in self.claims.values():
            claim.age += seconds if self.pool_gives or claim.ready else 0.0

    def _new_pod(self, role: PodRole) -> None:
        assert self.cluster is not None
        self.pods.append(Pod(f"pod-{next(self._ids)}", role, self.cluster.uid))

    def _kubelets(self, seconds: float) -> None:
        for pod in self.pods:
            pod.age += seconds
            if pod.deleting is not None:
                pod.deleting -= seconds
                if not pod.node_lost:
                    self._ask_driver_of(pod)
                continue
            if not pod.node and self.capacity:
                pod.node = True
            elif pod.node and pod.phase == "Pending" and pod.age >= 15 and not pod.node_lost and not self._pulls(pod):
                pod.phase = "Running"
                if pod.role is PodRole.HEAD:
                    self._start_ray(pod)
            elif pod.phase == "Running" and pod.role is PodRole.HEAD and not pod.session:
                self._start_ray(pod)
        for pod in [p for p in self.pods if p.deleting is not None and p.deleting <= 0]:
            if pod.node_lost:
                self.ghosts += self.ray.pop(pod.session, {}).values()
            self._kill_ray(pod)
            self.pods.remove(pod)

    def _pulls(self, pod: Pod) -> bool:
        workers = [p for p in self.pods if p.role is PodRole.WORKER and p.deleting is None]
        pod.waiting = "ImagePullBackOff" if self.image_missing and pod in workers[-1:] else ""
        return bool(pod.waiting)

    def _start_ray(self, pod: Pod) -> None:
        pod.session = f"session_{next(self._ids)}"
        self.ray[pod.session] = {}

    def _kill_ray(self, pod: Pod) -> None:
        self.ray.pop(pod.session, None)
        pod.session = ""

    def _ask_driver_of(self, pod: Pod) -> None:
        for job in self.ray.get(pod.session, {}).values():
            job.stops = True

    def _drive(self, job: RayJob, seconds: float) -> None:
        if job.state is SubmissionState.PENDING:
            job.state = SubmissionState.RUNNING
            self.folder.attempts += 1
            job.run_attempt, job.folder = self.folder.attempts, self.folder
        if job.state is not SubmissionState.RUNNING or job.hangs:
            return
        if job.stuck is not None:
            job.stuck += seconds
            return
        if not self.may_commit(job):
            self._exit(job, SubmissionState.FAILED, 1)
            return
        if job.stops:
            self.folder.checkpoint = max(self.folder.checkpoint, int(job.step)) if job.ready else self.folder.checkpoint
            self._exit(job, SubmissionState.STOPPED, None)
            return
        job.age += seconds
        if not job.ready and job.age >= self.start_seconds:
            job.ready, job.step = True, float(self.folder.checkpoint)
        elif job.ready:
            before, job.step = int(job.step), min(job.step + seconds / STEP_SECONDS, job.target)
            self.folder.useful += STEP_SECONDS * (int(job.step) - before)
            self.folder.checkpoint = int(job.step) // 3 * 3
            if job.step >= job.target:
                self._exit(job, SubmissionState.SUCCEEDED, 0)

    def may_commit(self, job: RayJob) -> bool:
        """Whether what it saves now counts."""
        if job.state is not SubmissionState.RUNNING or job.folder is not self.folder:
            return False
        return not self.fences or job.run_attempt >= self.folder.attempts

    def _exit(self, job: RayJob, state: SubmissionState, code: int | None) -> None:
        counts = self.may_commit(job)
        job.state, job.exit_code = state, code
        if not counts:
            return
        again = min(self.folder.useful, STEP_SECONDS * max(0, int(job.step) - self.folder.checkpoint))
        self.folder.useful -= again
        self.folder.lost += again

    # --- faults and wishes ------------------------------------------------------------------

    def edit(self, **changes: Any) -> None:
        """The user changes the spec."""
        self.spec = self.spec.model_copy(update=changes)
        self.generation += 1
        self.version += 1

    def annotate(self, value: str) -> None:
        self.annotations["rljob.dev/checkpoint-requested"] = value
        self.version += 1

    def driver_exits(self, code: int | None, state: SubmissionState = SubmissionState.FAILED) -> None:
        for job in self.reachable:
            self._exit(job, state, code)

    def driver_hangs(self) -> None:
        for job in self.reachable:
            job.hangs = True

    def driver_is_stuck(self) -> None:
        """Its threads wait for each other, all but the one that answers; not even its own deadline ends it."""
        for job in self.reachable:
            job.stuck = 0.0

    def head_container_restarts(self) -> None:
        for pod in self.pods:
            if pod.role is PodRole.HEAD:
                self._kill_ray(pod)

    def pod_fails(self, role: PodRole, reason: str) -> None:
        """The pod ends; the driver of a lost worker notices at once, that of a lost head ends with it."""
        for pod in [p for p in self.pods if p.role is role and p.phase == "Running"][:1]:
            pod.phase, pod.terminated = "Failed", reason
            if role is PodRole.HEAD:
                self._kill_ray(pod)
            else:
                self.driver_exits(1)
        self._snap()

    def node_is_lost(self, role: PodRole = PodRole.WORKER) -> None:
        """It is cut off: what runs there goes on, and after a while the pod is taken from the API server."""
        for pod in [p for p in self.pods if p.role is role and p.deleting is None][:1]:
            pod.node_lost, pod.deleting = True, 300.0
            for job in self.ray.get(pod.session, {}).values():
                job.cut_off = True
        self._snap()

    def head_is_drained(self) -> None:
        """Its pod has long to end."""
        for pod in [p for p in self.pods if p.role is PodRole.HEAD and p.deleting is None]:
            pod.deleting = 400.0
        self._snap()

    def lost_nodes_are_found(self) -> None:
        """They were dead after all, or are switched off: nothing runs there any more, and their pods are gone."""
        self.ghosts = []
        for pod in [pod for pod in self.pods if pod.node_lost]:
            self._kill_ray(pod)
            self.pods.remove(pod)
        self._snap()

    def sandbox_ends(self) -> None:
        """The programs of the driver's next responses get no answer there."""
        for claim in [claim for claim in self.claims.values() if claim.ready][:1]:
            claim.ended = True

    def queue_takes_devices(self) -> None:
        if self.cluster is not None and self.cluster.owned:
            self.cluster.suspend = True
        self._snap()

    def queue_admits(self) -> None:
        if self.cluster is not None:
            self.cluster.suspend = False

    def cluster_is_deleted(self) -> None:
        self.cluster = None
        self._snap()

    def stranger_makes_cluster(self) -> None:
        if self.cluster is None:
            self.cluster = Cluster(f"strange-{next(self._ids)}", owned=False)
        self._snap()

    def stranger_leaves(self) -> None:
        if self.cluster is not None and not self.cluster.owned:
            self.cluster = None
        self._snap()

    def folder_is_lost(self) -> None:
        """A driver that works in it ends at its next look, also when it was made anew by then."""
        self.folder = Folder()

    @property
    def running(self) -> list[RayJob]:
        """Drivers that run now, anywhere."""
        everywhere = [*self.ghosts, *(job for jobs in self.ray.values() for job in jobs.values())]
        return [job for job in everywhere if job.state is SubmissionState.RUNNING]

    @property
    def holds_cluster(self) -> bool:
        """Whether there is a RayCluster that is not being deleted."""
        return self.cluster is not None and not self.cluster.deleting

    @property
    def reachable(self) -> list[RayJob]:
        """Drivers that run now, where somebody can see it."""
        return [job for job in self.running if not job.cut_off]

    @property
    def head(self) -> Pod | None:
        """The head pod behind the service: kube-proxy sends to ready pods that do not end."""
        heads = [p for p in self.pods if p.role is PodRole.HEAD and p.phase == "Running" and p.deleting is None]
        return heads[0] if heads else None

    # --- the operator -----------------------------------------------------------------------

    def observed(self, lag: int = 0, ray_answers: bool = True, driver_answers: bool = True) -> Observed:
        """View of an operator whose caches are up to `lag` changes behind; they never go back in time."""
        newest = len(self._seen) - 1
        self._cluster_at = max(self._cluster_at, newest - lag)
        self._pods_at = max(self._pods_at, newest - lag // 2)
        submission, error = self._submission(ray_answers)
        driver = self._driver() if driver_answers else None
        return Observed(
            job=JobView(
                namespace="team",
                name="job",
                uid=UID,
                generation=self.generation,
                created=1_700_000_000.0,
                spec=self.spec,
                problem=self.problem,
                status=self.status,
                annotations=dict(self.annotations),
            ),
            cluster=self._seen[self._cluster_at][0],
            pods=self._seen[self._pods_at][1],
            secret_exists=self.secret,
            policy_current=self.policy,
            sandboxes=self._sandboxes(),
            submission=submission,
            submission_error=error,
            driver=driver,
            driver_error="" if driver is not None else "connection refused",
        )

    def look(
        self,
        lag: int = 0,
        ray_answers: bool = True,
        driver_answers: bool = True,
        dies_after: int | None = None,
        user_edits_meanwhile: bool = False,
    ) -> Plan:
        """One turn of the operator; `dies_after` counts its writes."""
        version, observed = self.version, self.observed(lag, ray_answers, driver_answers)
        plan = reconcile(observed, self.now)
        if user_edits_meanwhile:
            self.annotate(f"edit-{self.version}")
        writes = count(1)

        def alive() -> None:
            if dies_after is not None and next(writes) > dies_after:
                raise OperatorDied

        try:
            if plan.status_first and not self._store(plan, version, alive):
                return plan
            for action in plan.actions:
                alive()
                self._act(action, ray_answers)
            if not plan.status_first:
                self._store(plan, version, alive)
        except (OperatorDied, ActionFailed):
            pass
        return plan

    def _store(self, plan: Plan, version: int, alive: Any) -> bool:
        if plan.status == self.status:
            return True
        alive()
        if version != self.version:
            return False
        text = json.dumps(plan.status.model_dump(mode="json", by_alias=True, exclude_none=True), allow_nan=False)
        self.status = RLJobStatus.model_validate_json(text, strict=True)
        self.status_writes += 1
        self.version += 1
        return True

    def _act(self, action: Action, ray_answers: bool) -> None:
        assert not self.problem or not isinstance(action, ApplyPolicy | CreateCluster | Submit), "it cannot be rendered"
        self.actions.append(action)
        match action:
            case ApplySecret():
                self.secret = True
            case ApplyPolicy():
                self.policy = True
            case CreateCluster():
                if self.cluster is None:
                    self.cluster = Cluster(f"cluster-{next(self._ids)}")
                elif not self.cluster.owned:
                    raise ActionFailed
            case DeleteCluster(uid=uid, wait=wait):
                if self.cluster is not None and self.cluster.uid == uid:
                    assert self.cluster.owned, "somebody else's cluster was deleted"
                    self.cluster.deleting = True
                    if not wait:
                        self.cluster = None
                    self._collect_garbage()
            case DeleteJob():
                self.deleted = True
            case ClaimSandboxes(names=names):
                for name in names:
                    self.claims.setdefault(name, Claim(name, f"claim-{next(self._ids)}"))
            case ReleaseSandboxes(claims=claims):
                for claim in self.claims.values():
                    claim.deleting |= (claim.name, claim.uid) in claims
            case _:
                self._ask_ray(action, ray_answers)
        self._snap()

    def _ask_ray(self, action: Action, ray_answers: bool) -> None:
        if self.head is None or not self.head.session or not ray_answers:
            raise ActionFailed
        jobs = self.ray[self.head.session]
        match action:
            case Submit(id=name):
                if name not in jobs:
                    jobs[name] = RayJob(name, self.head.session, self.spec.steps)
                    self.runs.append(jobs[name])
            case Stop(id=name):
                if name in jobs:
                    jobs[name].stops = True
            case RequestCheckpoint():
                self.checkpoints_asked += 1
                for job in self.reachable:
                    self.folder.checkpoint = int(job.step) + 1

    # --- views ------------------------------------------------------------------------------

    def _snap(self) -> None:
        cluster = self.cluster
        view = None if cluster is None else cluster_state(self._manifest(cluster)).for_job(UID)
        self._seen.append((view, tuple(_pod_view(pod, self.now) for pod in self.pods)))

    def _manifest(self, cluster: Cluster) -> dict[str, Any]:
        """The RayCluster as far as the operator reads it; `RayClusterProvisioned` is there only while it is ready."""
        holds = {
            "HeadPodReady": cluster.ready,
            "RayClusterProvisioned": cluster.ready,
            "RayClusterSuspending": cluster.suspending,
            "RayClusterSuspended": cluster.suspended,
        }
        nodes = self.spec.resources.nodes
        owner = {"kind": "RLJob", "name": "job", "uid": UID if cluster.owned else "other", "controller": True}
        return {
            "metadata": {
                "name": "job",
                "uid": cluster.uid,
                "generation": 1,
                "creationTimestamp": "2023-11-14T22:13:20Z",
                "ownerReferences": [owner],
                **({"deletionTimestamp": "2023-11-14T22:13:20Z"} if cluster.deleting else {}),
            },
            "spec": {"suspend": cluster.suspend},
            "status": {
                "observedGeneration": 1,
                "desiredWorkerReplicas": nodes,
                "readyWorkerReplicas": nodes if cluster.ready else 0,
                "head": {"serviceName": "job-head-svc"},
                "conditions": [{"type": kind, "status": str(value)} for kind, value in holds.items()],
            },
        }

    def _sandboxes(self) -> SandboxesView:
        if warm_pool(self.spec) is None:
            return SandboxesView()
        return SandboxesView(
            tuple(
                SandboxView(
                    name=claim.name,
                    uid=claim.uid,
                    owned=True,
                    address="10.0.0.1" if claim.ready else "",
                    ready=claim.ready,
                    ended=claim.ended,
                    deleting=claim.deleting,
                    reason="" if claim.ready else "PodFailed" if claim.ended else "DependenciesNotReady",
                )
                for claim in self.claims.values()
            )
        )

    def _submission(self, answers: bool) -> tuple[SubmissionView | None, str]:
        last = self.status.attempts[-1] if self.status.attempts else None
        if last is None or last.end_time is not None or last.submission_id is None:
            return None, ""
        if not answers or self.head is None or not self.head.session:
            return None, "connection refused"
        job = self.ray[self.head.session].get(last.submission_id)
        if job is None:
            return SubmissionView(last.submission_id, SubmissionState.MISSING, session=self.head.session), ""
        ended = job.state not in (SubmissionState.PENDING, SubmissionState.RUNNING)
        return (
            SubmissionView(
                job.id,
                job.state,
                exit_code=job.exit_code,
                last_log_lines=("one", "last words") if ended else (),
                session=self.head.session if ended else "",
            ),
            "",
        )

    def _driver(self) -> DriverView | None:
        here = self.ray.get(self.head.session, {}).values() if self.head is not None else ()
        job = next((j for j in here if j.state is SubmissionState.RUNNING and not j.hangs), None)
        if job is None:
            return None
        last = StepView(int(job.step), STEP_SECONDS, {"rollout": 6.0, "sleep": 0.5}, 1.5, 0.25, 1e-4, self.now, 3)
        return DriverView(
            ready=job.ready,
            step=int(job.step),
            attempt=job.run_attempt,
            phase="rollout",
            phase_seconds=0.1 if job.stuck is None else job.stuck,
            last_checkpoint_step=self.folder.checkpoint or None,
            last=last if job.step >= 1 else None,
            median_step_seconds=STEP_SECONDS if job.step >= 1 else None,
            useful_seconds=self.folder.useful,
            lost_seconds=self.folder.lost,
        )

    def run(self, seconds: float, every: float = 5.0) -> None:
        """Let time pass with an operator that looks regularly and sees everything."""
        end = self.now + seconds
        while self.now < end:
            self.pass_time(every)
            self.look()


def _pod_view(pod: Pod, now: float) -> PodView:
    return PodView(
        name=pod.uid,
        uid=pod.uid,
        role=pod.role,
        phase=pod.phase,
        ready=pod.phase == "Running" and not pod.node_lost,
        deleting=pod.deleting is not None,
        deleted=None if pod.deleting is None else now + pod.deleting,
        cluster_uid=pod.cluster,
        node="node" if pod.node else None,
        node_lost=pod.node_lost,
        terminated_reason=pod.terminated,
        waiting_reason=pod.waiting,
        unschedulable="" if pod.node else "0/3 nodes are available: 3 Insufficient cpu.",
    )
