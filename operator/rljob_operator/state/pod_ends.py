"""Why a pod runs no more: the one place that tells."""

from __future__ import annotations

from rljob_api.spec import FailureReason
from rljob_operator.state.causes import Cause, cut, sentence
from rljob_operator.state.observed import PodRole, PodView

CRASH_LOOP = "CrashLoopBackOff"


def pod_end(pod: PodView) -> Cause | None:
    """Cause of a pod's end; its message is what follows the pod's name. None: it runs, or has not begun."""
    lost = FailureReason.HEAD_LOST if pod.role is PodRole.HEAD else FailureReason.POD_LOST
    code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
    said = pod.terminated_message or (pod.waiting_message if pod.waiting_reason == CRASH_LOOP else "")
    says = f": {cut(said)}" if said else ""
    if pod.node_lost or pod.terminated_reason == "NodeLost":
        return Cause(FailureReason.NODE_LOST, f"is on node {pod.node}, which is not ready or gone.")
    if pod.terminated_reason == "Evicted":
        return Cause(FailureReason.EVICTED, sentence(f"was evicted{says}"))
    if pod.terminated_reason == "OOMKilled" and _ended(pod):
        return Cause(FailureReason.OUT_OF_MEMORY, f"ran out of memory{code}; raise spec.resources.{pod.role}.memory.")
    if _ended(pod):
        why = f" ({pod.terminated_reason})" if pod.terminated_reason not in ("", "Error") else ""
        return Cause(lost, sentence(f"ended{code}{why}{says}"))
    return Cause(lost, "was deleted.") if pod.deleting else None


def _ended(pod: PodView) -> bool:
    if pod.phase in ("Failed", "Succeeded"):
        return True
    return not pod.ready and (bool(pod.terminated_reason) or pod.waiting_reason == CRASH_LOOP)
