"""Causes that keep a pod of a job from running."""

from __future__ import annotations

from rljob_api.spec import FailureReason, QueueSystem, RLJobSpec
from rljob_api.wanted import DOCTOR
from rljob_operator.state.causes import Cause, cut, sentence
from rljob_operator.state.observed import Observed, PodView
from rljob_operator.state.pod_ends import CRASH_LOOP, pod_end
from rljob_operator.state.reasons import severity
from rljob_operator.state.scheduler_messages import no_node

_IMAGE = (
    "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed",
)  # fmt: skip
NO_PULL_SECRET = "FailedToRetrieveImagePullSecret"
"""The kubelet's event beside the failed pull, which says less."""
_CONTAINER = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError")


def pod_problem(observed: Observed, spec: RLJobSpec) -> Cause | None:
    """The worst thing that happens to the job's pods, as a sentence that names the first pod it happens to."""
    pods = [pod for pod in observed.pods if not pod.deleting]
    for problem in (_image, _container, _ended, _unschedulable, _gated, _warned):
        found = [(pod, cause) for pod in pods if (cause := problem(pod, spec, observed))]
        if found:
            pod, cause = min(found, key=lambda one: severity(one[1]))
            others = [other for other, same in found if same.reason == cause.reason and other is not pod]
            also = f" (and {len(others)} more)" if others else ""
            return Cause(cause.reason, f"Pod {pod.name}{also} {cause.message}")
    return None


def _image(pod: PodView, spec: RLJobSpec, observed: Observed) -> Cause | None:
    if pod.waiting_reason not in _IMAGE:
        return None
    said = cut(pod.waiting_message) or f"image {spec.image or 'of the operator default'}"
    text = f"cannot get its image ({pod.waiting_reason}): {said}"
    help_text = "correct spec.image, or give the registry's credentials in spec.pods.imagePullSecrets"
    if spec.pods.image_pull_secrets:
        names = ", ".join(spec.pods.image_pull_secrets)
        help_text = f"correct spec.image, or see whether spec.pods.imagePullSecrets ({names}) are there and let it in"
    if pod.warning.startswith(NO_PULL_SECRET):
        text, help_text = f"{text}; {cut(pod.warning)}", "make the Secret, or correct spec.pods.imagePullSecrets"
    if pod.waiting_reason == "ErrImageNeverPull":
        help_text = "load the image on the node, or change spec.pods.imagePullPolicy"
    return Cause("ImagePull", sentence(text, help_text))


def _container(pod: PodView, spec: RLJobSpec, observed: Observed) -> Cause | None:
    if pod.waiting_reason not in _CONTAINER:
        return None
    text = f"cannot start its container ({pod.waiting_reason}): {cut(pod.waiting_message)}"
    help_text = "check spec.environment.secrets, spec.storage.volumes and spec.pods"
    return Cause("ContainerConfig", sentence(text, help_text))


def _ended(pod: PodView, spec: RLJobSpec, observed: Observed) -> Cause | None:
    if pod.terminated_reason == "Completed" and pod.waiting_reason != CRASH_LOOP:
        return None
    end = pod_end(pod)
    if end is None or end.reason == FailureReason.OUT_OF_MEMORY:
        return end
    if end.reason in (FailureReason.NODE_LOST, FailureReason.EVICTED):
        return Cause(end.reason, sentence(end.message, "KubeRay makes another one"))
    if pod.ended_container == DOCTOR:
        says = f": {cut(pod.terminated_message)}" if pod.terminated_message else ""
        help_text = (
            f"`kubectl rljob doctor -n {observed.job.namespace} {observed.job.name}` has every line, and "
            "spec.pods.doctor: Skip starts the pods without it"
        )
        return Cause("DoctorFoundProblems", sentence(f"does not pass its examination{says}", help_text))
    help_text = f"`kubectl logs -n {observed.job.namespace} {pod.name} --previous` has its last words"
    return Cause("ContainerExited", sentence(end.message, help_text))


def _unschedulable(pod: PodView, spec: RLJobSpec, observed: Observed) -> Cause | None:
    if not pod.unschedulable:
        return None
    said = cut(pod.unschedulable.partition(" preemption: ")[0])
    cause = no_node(pod.unschedulable, spec, pod.role, observed.node_devices)
    if cause is None:
        return Cause("Unschedulable", sentence(f"has no node: {said}"))
    return Cause(cause.reason, sentence(f"has no node: {said}", cause.message))


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
