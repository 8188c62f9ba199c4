"""What keeps a pod of a job from running."""

from __future__ import annotations

from rljob_api.spec import QueueSystem, RLJobSpec
from rljob_api.wanted import DOCTOR
from rljob_operator.state.causes import Cause, cut, sentence
from rljob_operator.state.observed import Observed, PodView
from rljob_operator.state.scheduler_messages import no_node

_IMAGE = (
    "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed",
)  # fmt: skip
_CONTAINER = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError")


def pod_problem(observed: Observed, spec: RLJobSpec) -> Cause | None:
    """The worst thing that happens to the job's pods, as a sentence that names the first pod it happens to."""
    pods = [pod for pod in observed.pods if not pod.deleting]
    for problem in (_image, _container, _ended_container, _lost, _unschedulable, _gated, _warned):
        found = [(pod, cause) for pod in pods if (cause := problem(pod, spec, observed))]
        if found:
            pod, cause = found[0]
            others = [other for other, same in found[1:] if same.reason == cause.reason]
            also = f" (and {len(others)} more)" if others else ""
            return Cause(cause.reason, f"Pod {pod.name}{also} {cause.text}")
    return None


def _image(pod: PodView, spec: RLJobSpec, observed: Observed) -> Cause | None:
    if pod.waiting_reason not in _IMAGE:
        return None
    said = cut(pod.waiting_message) or f"image {spec.image or 'of the operator default'}"
    text = f"cannot get its image ({pod.waiting_reason}): {said}"
    help_text = "correct spec.image, or give the registry's credentials in spec.pods.imagePullSecrets"
    if pod.waiting_reason == "ErrImageNeverPull":
        help_text = "load the image on the node, or change spec.pods.imagePullPolicy"
    return Cause("ImagePull", sentence(text, help_text))


def _container(pod: PodView, spec: RLJobSpec, observed: Observed) -> Cause | None:
    if pod.waiting_reason not in _CONTAINER:
        return None
    text = f"cannot start its container ({pod.waiting_reason}): {cut(pod.waiting_message)}"
    help_text = "check spec.environment.secrets, spec.storage.volumes and spec.pods"
    return Cause("ContainerConfig", sentence(text, help_text))


def _ended_container(pod: PodView, spec: RLJobSpec, observed: Observed) -> Cause | None:
    crashed = pod.waiting_reason == "CrashLoopBackOff"
    if not crashed and (not pod.terminated_reason or pod.ready or pod.terminated_reason in ("Completed", "NodeLost")):
        return None
    code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
    said = pod.terminated_message or (pod.waiting_message if crashed else "")
    says = f": {cut(said)}" if said else ""
    if pod.terminated_reason == "OOMKilled":
        return Cause("OutOfMemory", f"ran out of memory{code}; raise spec.resources.{pod.role}.memory.")
    if pod.terminated_reason == "Evicted":
        return Cause("Evicted", sentence(f"was evicted{says}", "KubeRay makes another one"))
    cause = f" ({pod.terminated_reason})" if pod.terminated_reason not in ("", "Error") else ""
    if pod.ended_container == DOCTOR:
        text = f"does not pass its examination{says}"
        help_text = (
            f"`kubectl rljob doctor -n {observed.job.namespace} {observed.job.name}` has every line, and "
            "spec.pods.doctor: Skip starts the pods without it"
        )
        return Cause("DoctorFoundProblems", sentence(text, help_text))
    text = f"ended{code}{cause}{says}"
    help_text = f"`kubectl logs -n {observed.job.namespace} {pod.name} --previous` has its last words"
    return Cause("ContainerExited", sentence(text, help_text))


def _lost(pod: PodView, spec: RLJobSpec, observed: Observed) -> Cause | None:
    if not pod.node_lost and pod.terminated_reason != "NodeLost":
        return None
    return Cause("NodeLost", f"is on node {pod.node}, which is not ready or gone; KubeRay makes another one.")


def _unschedulable(pod: PodView, spec: RLJobSpec, observed: Observed) -> Cause | None:
    if not pod.unschedulable:
        return None
    said = cut(pod.unschedulable.partition(" preemption: ")[0])
    cause = no_node(pod.unschedulable, spec, pod.role, observed.node_devices)
    if cause is None:
        return Cause("Unschedulable", sentence(f"has no node: {said}"))
    return Cause(cause.reason, sentence(f"has no node: {said}", cause.text))


def _gated(pod: PodView, spec: RLJobSpec, observed: Observed) -> Cause | None:
    if not pod.gated:
        return None
    who = "Kueue lifts it when it admits the job" if spec.scheduling.system is QueueSystem.KUEUE else ""
    return Cause("SchedulingGated", sentence("is held back by a scheduling gate", who))


def _warned(pod: PodView, spec: RLJobSpec, observed: Observed) -> Cause | None:
    if pod.ready or not pod.warning:
        return None
    reason = pod.warning.partition(":")[0]
    help_text = "check spec.storage.volumes and the node" if reason.startswith("FailedMount") else ""
    return Cause(reason, sentence(f"does not start: {cut(pod.warning)}", help_text))
