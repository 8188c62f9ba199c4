"""Each cause that `explain` can name, from the texts that the programs really write."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_worlds import NAME, NOW, cluster, job, pod, ready_pods, up, waiting

from rljob_api.status import AttemptStatus, Condition
from rljob_operator.state.explain import KUBERAY_SECONDS, Explanation, explain
from rljob_operator.state.observed import (
    DriverView,
    JobView,
    Observed,
    PodView,
    QueueView,
    SandboxesView,
    SandboxView,
    SubmissionState,
    SubmissionView,
)

KUEUE = {"system": "Kueue", "queue": "rl"}
VOLCANO = {"system": "Volcano", "queue": "rl"}
WORKERS = ("workers-worker-7qv8d", "workers-worker-x2m4p")


def workers(**changes: Any) -> tuple[PodView, ...]:
    return (replace(ready_pods()[0]), *(pod(name, **changes) for name in WORKERS))


def said(observed: Observed, reason: str, *parts: str) -> Explanation:
    """The explanation, which must have this reason and hold these parts in this order."""
    found = explain(observed, NOW)
    assert found.reason == reason, found
    at = 0
    for part in parts:
        assert part in found.message[at:], f"{part!r} not (in order) in {found.message!r}"
        at = found.message.index(part, at)
    return found


# --- the job itself ----------------------------------------------------------------------------


def test_an_invalid_spec_is_quoted() -> None:
    view = replace(job(), spec=None, problem="spec.rollout.topP: 1.5: is too large; allowed: number above 0, at most 1")
    said(Observed(view), "InvalidSpec", NAME, "spec.rollout.topP: 1.5: is too large")


def test_a_job_that_cannot_be_rendered_is_invalid_too() -> None:
    view = replace(job(), problem="checkpoint.path lies in no volume of storage.volumes")
    said(waiting(view), "InvalidSpec", "checkpoint.path lies in no volume")


def test_a_suspended_job_names_the_way_on() -> None:
    view = job({"phase": "Suspended"}, suspend=True)
    said(Observed(view), "Suspended", "spec.suspend: true", f"kubectl rljob resume {NAME}")
    said(waiting(view), "Suspending", "saves its last completed step")


def test_nobody_has_looked_at_it_yet() -> None:
    said(Observed(job({})), "NotSeen", NAME, "whether the operator runs")
    said(Observed(job({"phase": "Pending"})), "ClusterMissing", f"RayCluster {NAME}")


def test_a_job_that_is_being_deleted() -> None:
    said(waiting(replace(job(), deleting=True)), "Deleting", NAME)


# --- sandboxes of a warm pool ------------------------------------------------------------------


def test_a_sandbox_that_does_not_come_is_named_with_the_deadline() -> None:
    service = {"warmPool": {"name": "pool", "count": 2}}
    view = job(
        {"phase": "Starting", "attempt": 0, "cluster": {"name": NAME, "scheduledTime": "2027-01-15T07:50:00Z"}},
        reward={"name": "code", "args": {"kind": "Calls", "tests": "tests"}},
        sandbox={"isolation": "Service", "service": service},
    )
    bound = SandboxView(f"{NAME}-sandbox-0", "1", True, "10.0.0.1", ready=True)
    late = SandboxView(f"{NAME}-sandbox-1", "2", True, reason="DependenciesNotReady", message="Pod is not Ready")

    def seen(*claims: SandboxView, **changes: Any) -> Observed:
        return up(view, sandboxes=SandboxesView(claims, **changes))

    until = "the devices are given back at 08:20:00 UTC if not all sandboxes are ready by then"
    named = f"SandboxClaim {NAME}-sandbox-1 of SandboxWarmPool pool"
    said(seen(bound, late), "DependenciesNotReady", named, "has no sandbox that is ready", "Pod is not Ready", until)
    said(seen(bound), "SandboxNotClaimed", named, "is about to be made", until)
    said(seen(bound, replace(late, deleting=True)), "SandboxNotClaimed", "is being deleted")
    said(seen(bound, replace(late, owned=False)), "SandboxClaimInTheWay", "is not this job's")
    said(seen(bound, replace(late, ended=True, reason="PodFailed")), "PodFailed", named, "has ended")
    said(seen(problem="404: no such kind"), "SandboxesUnreadable", "404: no such kind", "settings.sandboxClaims: true")
    assert explain(seen(bound, replace(bound, name=late.name)), NOW).reason == "NotSubmitted"


# --- the RayCluster ----------------------------------------------------------------------------


def test_a_cluster_of_someone_else_is_in_the_way() -> None:
    said(
        waiting(cluster=cluster(owned=False, owner="RayJob nightly")),
        "ClusterNameTaken",
        f"RayCluster {NAME}",
        "belongs to RayJob nightly",
        "give the RLJob another name",
    )
    said(waiting(cluster=cluster(owned=False)), "ClusterNameTaken", "was not made by the operator")


def test_kuberay_that_does_not_run_is_named_after_a_minute() -> None:
    silent = cluster(answered=False)
    said(waiting(cluster=silent), "KubeRayNotAnswering", "KubeRay has not touched", NAME, "300 s", "namespace rl")
    fresh = waiting(cluster=replace(silent, created=NOW - KUBERAY_SECONDS + 1))
    said(fresh, "ClusterNotSeen", "waits for KubeRay")
    assert explain(waiting(cluster=silent)).reason == "ClusterNotSeen", "without a clock nothing is late"


@pytest.mark.parametrize(
    ("message", "reason", "part"),
    [
        # kuberay ray-operator/controllers/ray/raycluster_controller.go joins its marker and the API server's words
        # (kubernetes plugin/pkg/admission/resourcequota/controller.go) with a line break.
        (
            'FailedCreateHeadPod\npods "qwen3-4b-grpo-head-" is forbidden: exceeded quota: team-rl, requested: '
            "limits.cpu=16, used: limits.cpu=8, limited: limits.cpu=16",
            "ResourceQuota",
            "exceeded quota: team-rl",
        ),
        (
            'FailedCreateWorkerPod\npods "qwen3-4b-grpo-workers-worker-" is forbidden: error looking up service '
            'account rl/trainer: serviceaccount "trainer" not found',
            "ServiceAccountMissing",
            "spec.pods.serviceAccount",
        ),
        (
            'FailedCreateWorkerPod\npods "qwen3-4b-grpo-workers-worker-abc" is forbidden: violates PodSecurity '
            '"restricted:latest": hostPath volumes (volume "driver")',
            "PodSecurity",
            "pod-security level",
        ),
        (
            'FailedCreateHeadPod\nadmission webhook "validate.kyverno.svc-fail" denied the request: no latest tags',
            "PodsForbidden",
            "no latest tags",
        ),
        (
            'FailedCreateHeadPod\npods "qwen3-4b-grpo-head-" is forbidden: no PriorityClass with name urgent was found',
            "PriorityClassMissing",
            "spec.scheduling.priorityClass",
        ),
        ("FailedDeleteHeadPod\nUnauthorized", "PodsNotMade", "Unauthorized"),
    ],
)
def test_pods_that_kuberay_may_not_make(message: str, reason: str, part: str) -> None:
    found = said(waiting(cluster=cluster(failure=message)), reason, "KubeRay cannot make the pods", NAME, part)
    assert "\n" not in found.message


def test_a_cluster_that_kuberay_refuses() -> None:
    # kuberay ray-operator/controllers/ray/raycluster_controller.go: only an event says so.
    warning = (
        f"InvalidRayClusterSpec: The RayCluster spec is invalid rl/{NAME}: workerGroupSpecs[0].resources cannot be "
        "combined with num-cpus in rayStartParams"
    )
    said(waiting(cluster=cluster(answered=False, warning=warning)), "ClusterRefused", "cannot be combined", "spec.pods")


def test_pods_that_are_not_all_made_or_not_ready_yet() -> None:
    said(waiting(pods=ready_pods()[:2]), "PodsMissing", "2 of 3 pods")
    said(waiting(pods=workers()), "PodsStarting", "2 of 3", *(f"{NAME}-{name}" for name in WORKERS))
    said(waiting(pods=ready_pods()), "ClusterStarting", NAME)


# --- queues ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "message", "expected", "help_text"),
    [
        # kueue pkg/scheduler/flavorassigner/flavorassigner.go; reasons of apis/kueue/v1beta2/workload_types.go.
        (
            "Pending",
            "couldn't assign flavors to pod set workers: insufficient unused quota for huawei.com/Ascend910 in flavor "
            "a2, 8 more needed",
            "Pending",
            "when other jobs of the queue end",
        ),
        (
            "Pending",
            "couldn't assign flavors to pod set workers: insufficient quota for huawei.com/Ascend910 in flavor a2, "
            "previously considered podsets requests (0) + current podset request (16) > maximum capacity (8)",
            "ExceedsMaxQuota",
            "it can never run there",
        ),
        ("ExceedsMaxQuota", "", "ExceedsMaxQuota", "it can never run there"),
        # kueue pkg/controller/core/workload_controller.go getQueueBlocker
        ("Inadmissible", "LocalQueue rl doesn't exist", "Inadmissible", "correct spec.scheduling.queue"),
        ("Suspended", "ClusterQueue rl is inactive", "Suspended", "administrator"),
        ("Preempted", "Preempted to accommodate a workload in the ClusterQueue", "Preempted", "queued again"),
    ],
)
def test_kueue_has_not_admitted_it(reason: str, message: str, expected: str, help_text: str) -> None:
    queue = QueueView(False, reason, message, f"Workload raycluster-{NAME}-2f0a1")
    observed = waiting(job(scheduling=KUEUE), cluster=cluster(suspended=True), queue=queue)
    said(observed, expected, "Kueue", f"Workload raycluster-{NAME}-2f0a1", message, help_text)


def test_kueue_that_does_not_know_rayclusters() -> None:
    observed = waiting(job(scheduling=KUEUE), cluster=cluster(suspended=True))
    said(observed, "ClusterSuspended", f"RayCluster {NAME}", "Kueue made no Workload", "ray.io/raycluster")
    said(waiting(cluster=cluster(suspended=True)), "ClusterSuspended", "someone else suspended it")


@pytest.mark.parametrize(
    ("reason", "message", "parts"),
    [
        # volcano pkg/scheduler/plugins/gang/gang.go, pkg/scheduler/api/{job_info,unschedule_info}.go
        (
            "NotEnoughResources",
            "3/3 tasks in gang unschedulable: pod group is not ready, 3 Pending, 3 minAvailable; Pending: "
            "2 Unschedulable, 1 Schedulable. Origin reason is qwen3-4b-grpo-workers-worker-7qv8d: 0/4 nodes are "
            "unavailable: 4 Insufficient huawei.com/Ascend910.",
            ("a gang starts only when there is room for all", "huawei.com/Ascend910"),
        ),
        # mind-cluster component/ascend-for-volcano/common/util: the reasons of huaweiNPUPlugin's conditions
        (
            "JobValidateFailed",
            "distributed job require full node npu num 16, but got 8",
            ("spec.resources.devicesPerNode", "spec.scheduling.superPodBlock"),
        ),
        ("JobEnqueueFailed", "not enough resource in the cluster", ("spec.scheduling.queue",)),
        ("NodePredicateFailed", "node<npu-1> accelerator-type mismatch", ("accelerator-type labels",)),
        ("BatchOrderFailed", "not enough super-pod", ("topology",)),
        ("NotEnoughTasks", "", ("KubeRay has not made all pods",)),
    ],
)
def test_volcano_has_not_admitted_the_gang(reason: str, message: str, parts: tuple[str, ...]) -> None:
    queue = QueueView(False, reason, message, f"PodGroup ray-{NAME}-pg")
    observed = waiting(job(scheduling=VOLCANO), queue=queue)
    said(observed, reason, "Volcano", f"PodGroup ray-{NAME}-pg", *parts)


def test_a_reason_that_is_no_word_becomes_one() -> None:
    queue = QueueView(False, "tasks in gang are not ready", "", "PodGroup x")
    said(waiting(job(scheduling=VOLCANO), queue=queue), "tasksingangarenotready")
    said(waiting(job(scheduling=VOLCANO), queue=QueueView(False)), "GangPending", f"the gang of {NAME}")


# --- nodes -------------------------------------------------------------------------------------

# The form of kubernetes pkg/scheduler/framework/types.go FitError; the CCE manual quotes
# "0/2 nodes are available: 2 Insufficient huawei.com/ascend-310."
NO_NPU = (
    "0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 2 "
    "Insufficient huawei.com/Ascend910. preemption: 0/3 nodes are available: 1 Preemption is not helpful for "
    "scheduling, 2 No preemption victims found for incoming pod."
)


@pytest.mark.parametrize(
    ("devices", "reason", "parts"),
    [
        (None, "InsufficientDevices", ("no node offers that resource", "kubectl describe nodes")),
        ({}, "NoSuchResource", ("no node offers huawei.com/Ascend910", "no devices at all", "spec.resources.profile")),
        ({"huawei.com/ascend-1980": 8, "huawei.com/Ascend910": 0}, "NoSuchResource", ("huawei.com/ascend-1980",)),
        ({"huawei.com/Ascend910": 4}, "NodeTooSmall", ("devicesPerNode asks for 8", "the largest node has 4")),
        ({"huawei.com/Ascend910": 8}, "DevicesTaken", ("when other pods give back",)),
    ],
)
def test_no_node_with_devices(devices: dict[str, int] | None, reason: str, parts: tuple[str, ...]) -> None:
    observed = waiting(pods=workers(unschedulable=NO_NPU), node_devices=devices)
    found = said(observed, reason, f"Pod {NAME}-{WORKERS[0]} (and 1 more) has no node", "2 Insufficient", *parts)
    assert "preemption" not in found.message


@pytest.mark.parametrize(
    ("message", "reason", "parts"),
    [
        (
            "0/3 nodes are available: 1 node(s) had untolerated taint {npu: reserved}, 2 node(s) didn't match Pod's "
            "node affinity/selector. preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling.",
            "NodeSelector",
            ("spec.scheduling.nodeSelector", "spec.scheduling.tolerations"),
        ),
        ("0/2 nodes are available: 2 node(s) had untolerated taint {npu: reserved}.", "Taint", ("tolerations",)),
        ("0/2 nodes are available: 2 node(s) were unschedulable.", "NodesCordoned", ("kubectl uncordon",)),
        ("0/2 nodes are available: 2 Insufficient memory.", "InsufficientResources", ("spec.resources.worker.memory",)),
        (
            "0/2 nodes are available: 2 node(s) didn't have free ports for the requested pod ports.",
            "PortsTaken",
            ("spec.network.hostNetwork",),
        ),
        ("0/2 nodes are available: 2 Too many pods.", "TooManyPods", ("add nodes",)),
        ("no nodes available to schedule pods", "NoNodes", ("the cluster has no node",)),
        (
            "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found",
            "VolumeNotBound",
            ("spec.storage.volumes", "kubectl get pvc"),
        ),
        (
            '0/1 nodes are available: persistentvolumeclaim "checkpoints" not found.',
            "VolumeClaimMissing",
            ("make the claim checkpoints",),
        ),
        ("0/4 nodes are available: 4 node(s) had no luck.", "Unschedulable", ("had no luck",)),
    ],
)
def test_no_node_for_other_reasons(message: str, reason: str, parts: tuple[str, ...]) -> None:
    said(waiting(pods=workers(unschedulable=message)), reason, f"{NAME}-{WORKERS[0]}", *parts)


def test_the_heads_own_amounts_are_named_for_the_head() -> None:
    head = pod("head-4tk2x", unschedulable="0/2 nodes are available: 2 Insufficient cpu.")
    said(waiting(pods=(head,)), "InsufficientResources", "spec.resources.head.cpu")


def test_a_scheduling_gate() -> None:
    gated = workers(gated=True)
    said(waiting(pods=gated), "SchedulingGated", "scheduling gate")
    said(waiting(job(scheduling=KUEUE), pods=gated), "SchedulingGated", "Kueue lifts it")


def test_a_lost_node() -> None:
    lost = workers(node="npu-3", node_lost=True, phase="Running")
    said(waiting(pods=lost), "NodeLost", f"{NAME}-{WORKERS[0]}", "node npu-3")


# --- containers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "message", "help_text"),
    [
        # kubernetes pkg/kubelet/images/image_manager.go
        (
            "ImagePullBackOff",
            'Back-off pulling image "registry.local/rljob/worker-ascend:0.1.0": ErrImagePull: rpc error: code = '
            'NotFound desc = failed to pull and unpack image "registry.local/rljob/worker-ascend:0.1.0": not found',
            "spec.pods.imagePullSecrets",
        ),
        (
            "ErrImagePull",
            'failed to pull and unpack image "registry.local/rljob/worker-ascend:0.1.0": unexpected status from HEAD '
            "request: 403 Forbidden",
            "spec.image",
        ),
        (
            "ErrImageNeverPull",
            'Container image "registry.local/rljob/worker-ascend:0.1.0" is not present with pull policy of Never',
            "imagePullPolicy",
        ),
        ("ErrImagePull", "", "registry.local/rljob/worker-ascend:0.1.0"),
    ],
)
def test_an_image_that_cannot_be_had(reason: str, message: str, help_text: str) -> None:
    observed = waiting(pods=workers(waiting_reason=reason, waiting_message=message))
    said(observed, "ImagePull", WORKERS[0], reason, "registry.local/rljob/worker-ascend:0.1.0")
    assert help_text in explain(observed, NOW).message


def test_a_pull_secret_that_is_missing_is_named() -> None:
    pull = {"waiting_reason": "ImagePullBackOff", "waiting_message": "401 Unauthorized"}
    view = job(pods={"imagePullSecrets": ["registry"]})
    said(waiting(view, pods=workers(**pull)), "ImagePull", "401 Unauthorized", "spec.pods.imagePullSecrets (registry)")
    warning = (
        "FailedToRetrieveImagePullSecret: Unable to retrieve some image pull secrets (registry); attempting to pull"
    )
    seen = waiting(view, pods=workers(**pull, warning=warning))
    said(
        seen,
        "ImagePull",
        "401 Unauthorized",
        "Unable to retrieve some image pull secrets (registry)",
        "make the Secret",
    )


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            'FailedCreateHeadPod\nInternal error occurred: failed calling webhook "pods.example.com": no such host',
            "WebhookFailing",
        ),
        (
            "FailedCreateWorkerPod\npods \"a\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied "
            "request: images need a digest",
            "PodsForbidden",
        ),
        (
            'FailedCreateHeadPod\npods "a" is forbidden: unable to create new content in namespace rl because it '
            "is being terminated",
            "NamespaceTerminating",
        ),
    ],
)
def test_pods_that_a_policy_or_a_webhook_refuses(message: str, reason: str) -> None:
    said(waiting(cluster=cluster(failure=message)), reason, "KubeRay cannot make the pods", NAME)


def test_a_container_that_cannot_be_made() -> None:
    head = pod("head-4tk2x", waiting_reason="CreateContainerConfigError", waiting_message='secret "wandb" not found')
    said(waiting(pods=(head,)), "ContainerConfig", "head-4tk2x", 'secret "wandb" not found', "spec.environment.secrets")


def test_a_container_that_keeps_ending() -> None:
    crash = {
        "waiting_reason": "CrashLoopBackOff",
        "waiting_message": "back-off 40s restarting failed container=ray-worker pod=qwen3_rl(0f3c)",
        "terminated_reason": "Error",
        "exit_code": 1,
    }
    said(waiting(pods=workers(**crash)), "ContainerExited", "with exit code 1", "container=ray-worker", "--previous")
    killed = {"terminated_reason": "OOMKilled", "exit_code": 137, "waiting_reason": "CrashLoopBackOff"}
    said(waiting(pods=workers(**killed)), "OutOfMemory", "exit code 137", "spec.resources.worker.memory")
    evicted = {"phase": "Failed", "terminated_reason": "Evicted"}
    message = "The node was low on resource: ephemeral-storage."
    said(waiting(pods=workers(terminated_message=message, **evicted)), "Evicted", "ephemeral-storage")


def test_a_finished_init_container_is_no_problem() -> None:
    said(waiting(pods=workers(terminated_reason="Completed", exit_code=0)), "PodsStarting")


def test_an_event_tells_what_the_pod_does_not() -> None:
    failed = 'MountVolume.SetUp failed for volume "models" : hostPath type check failed: /models is not a directory'
    warning = f"FailedMount: {failed}"
    said(waiting(pods=workers(warning=warning)), "FailedMount", "hostPath type check failed", "spec.storage.volumes")


def test_the_worst_cause_goes_first_and_pods_on_their_way_out_are_left_alone() -> None:
    unschedulable, image = pod(WORKERS[0], unschedulable=NO_NPU), pod(WORKERS[1], waiting_reason="ErrImagePull")
    said(waiting(pods=(unschedulable, image)), "ImagePull", WORKERS[1])
    said(waiting(pods=(unschedulable, replace(image, deleting=True))), "InsufficientDevices", WORKERS[0])


# --- head and driver ---------------------------------------------------------------------------


def test_a_head_that_does_not_answer() -> None:
    error = "Cannot connect to host qwen3-4b-grpo-head-svc.rl.svc:8265 [Connection refused]"
    said(up(submission_error=error), "HeadNotAnswering", f"{NAME}-head-4tk2x", "Connection refused")


def test_the_stages_of_a_submission() -> None:
    said(up(), "NotSubmitted", "about to be submitted")
    said(up(submission=SubmissionView("rljob-0f3c-0", SubmissionState.MISSING)), "NotSubmitted")
    said(up(submission=SubmissionView("rljob-0f3c-0", SubmissionState.PENDING)), "DriverPending", "rljob-0f3c-0")
    running = SubmissionView("rljob-0f3c-0", SubmissionState.RUNNING)
    said(up(submission=running), "DriverStarting", f"kubectl rljob logs {NAME}")
    said(up(submission=running, driver_error="401"), "DriverNotAnswering", "rljob-0f3c-0", "401")
    refused = "nothing listens on port 8300"
    said(up(submission=replace(running, start_time=NOW - 50), driver_error=refused), "DriverStarting")
    said(up(submission=replace(running, start_time=NOW - 200), driver_error=refused), "DriverNotAnswering", refused)
    said(up(submission=running, driver=DriverView(False, 0, 0)), "DriverStarting")
    said(
        up(submission=running, driver=DriverView(True, 12, 0, phase="rollout")), "Running", "12 of 300 steps", "rollout"
    )
    said(up(submission=running, driver=DriverView(True, 12, 0, stopping=True)), "Stopping", "saves its last step")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (2, "exit code 2 (the manifest, the model, the data or the reward is wrong"),
        (4, "exit code 4 (a phase was past its deadline"),
        (-9, "SIGKILL (the driver was killed)"),
        (-70, "signal 70"),
        (3, "exit code 3"),
    ],
)
def test_a_driver_that_ended(code: int, text: str) -> None:
    lines = (
        "rljob: reading model, tokenizer and data",
        "spec.model.path: /models/Qwen3-4B: there is no such folder",
        "",
    )
    ended = SubmissionView(
        "rljob-0f3c-0", SubmissionState.FAILED, "Job entrypoint command failed", code, last_log_lines=lines
    )
    found = said(up(submission=ended), "DriverExited", text, "Job entrypoint command failed", lines[1])
    assert found.lines == lines


def attempt(**changes: Any) -> dict[str, Any]:
    return {
        "number": 0,
        "startTime": "2027-01-15T07:00:00Z",
        "endTime": "2027-01-15T07:59:55Z",
        "endStep": 41,
        "reason": "DriverExited",
        "message": "phase actor_train: trainer 3 ended with exit code -9",
        "exitCode": 1,
        "lastLogLines": ["step 41", "trainer 3 ended with exit code -9"],
        **changes,
    }


def test_a_back_off_says_until_when() -> None:
    status = {"phase": "Starting", "attempt": 0, "attempts": [attempt()], "nextAttemptTime": "2027-01-15T08:00:35Z"}
    observed = up(job(status))
    found = said(
        observed, "BackOff", "Attempt 0 ended after step 41 with exit code 1", "phase actor_train", "08:00:35 UTC"
    )
    assert found.lines == ("step 41", "trainer 3 ended with exit code -9")
    assert explain(observed, NOW + 35).reason == "NotSubmitted", "the wait is over"


def test_a_failed_job_names_exit_code_and_last_line() -> None:
    status = {
        "phase": "Failed",
        "attempt": 3,
        "attempts": [attempt(number=3)],
        "conditions": [
            {
                "type": "Failed",
                "status": "True",
                "reason": "MaxRestarts",
                "message": "the job has been restarted 3 times (failurePolicy.maxRestarts)",
                "lastTransitionTime": "2027-01-15T08:00:00Z",
            }
        ],
    }
    found = said(
        Observed(job(status)), "MaxRestarts", "restarted 3 times", "attempt 3 ended", "exit code 1", "phase actor_train"
    )
    assert found.lines
    assert found.message.count("ended with exit code -9") == 1, "the last line says the same as the message"


def test_a_failed_job_says_nothing_twice() -> None:
    message = "The driver ended with exit code 2, an error of the manifest or data; its last line: no such folder."
    why = f"Attempt 0 ended (UserError): {message} The job fails, because a restart cannot help."
    last = attempt(message=message, exitCode=2, lastLogLines=["no such folder"])
    found = said(
        Observed(job({"phase": "Failed", "message": why, "attempts": [last]})), "Failed", "a restart cannot help"
    )
    assert found.message.count("exit code 2") == found.message.count("no such folder") == 1


def test_a_job_that_failed_without_an_attempt() -> None:
    said(Observed(job({"phase": "Failed", "message": "the deadline of 3600 s is over"})), "Failed", "3600 s is over")


def test_a_job_that_is_done() -> None:
    status = {"phase": "Succeeded", "progress": {"step": 300, "steps": 300}}
    said(Observed(job(status)), "Succeeded", "300 steps")


# --- whatever is said --------------------------------------------------------------------------

texts = st.text(max_size=60)


@given(
    reason=texts, message=texts, where=st.sampled_from(["queue", "pod", "failure", "submission", "problem", "attempt"])
)
def test_any_text_makes_one_line_and_a_reason_that_a_condition_may_hold(reason: str, message: str, where: str) -> None:
    view: JobView = job()
    observed = {
        "queue": lambda: waiting(queue=QueueView(False, reason, message)),
        "pod": lambda: waiting(pods=workers(warning=f"{reason}: {message}", unschedulable=message)),
        "failure": lambda: waiting(cluster=cluster(failure=message, warning=reason)),
        "submission": lambda: up(
            submission=SubmissionView("x", SubmissionState.FAILED, message, 1, last_log_lines=(reason,))
        ),
        "problem": lambda: waiting(replace(view, problem=message)),
        "attempt": lambda: up(job({"phase": "Failed", "attempts": [attempt(message=message, lastLogLines=[reason])]})),
    }[where]()
    found = explain(observed, NOW)
    assert len(found.message.splitlines()) == 1
    AttemptStatus(number=0, message=found.message)
    Condition(
        type="Queued",
        status="True",
        reason=found.reason,
        message=found.message,
        lastTransitionTime="2027-01-15T08:00:00Z",
    )
    assert re.fullmatch(r".*[.]", found.message)


def test_a_message_of_any_length_stays_readable() -> None:
    said(waiting(cluster=cluster(failure="x" * 100_000)), "PodsNotMade")
    assert len(explain(waiting(cluster=cluster(failure="x" * 100_000)), NOW).message) < 1500


def test_a_phase_that_lasts_is_told_with_its_duration() -> None:
    driver = DriverView(ready=True, step=4, attempt=0, phase="rollout", phase_seconds=130.0)
    assert explain(waiting(driver=driver)).message.endswith("in phase rollout for 2m.")
    assert explain(waiting(driver=replace(driver, phase_seconds=9.0))).message.endswith("in phase rollout.")


def test_both_lanes_and_the_open_groups_are_told() -> None:
    lanes, groups = {"engine": "reward_wait"}, {"growing": 0, "scoring": 3, "ready": 9}
    driver = DriverView(ready=True, step=4, attempt=0, phase="batch_wait", lanes=lanes, groups=groups)
    told = explain(waiting(driver=driver)).message
    assert told.endswith("in phase batch_wait; engine in phase reward_wait; groups: 0 growing, 3 scoring, 9 ready.")
    many = replace(driver, lanes={f"lane-{n}": "x" * 200 for n in range(500)})
    assert len(explain(waiting(driver=many)).message) < 1500
