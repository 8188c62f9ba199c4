"""Policies: a file for each way to decide which groups a step generates and trains on. Pure."""

from rljob_api import RLJobSpec
from rljob_api.spec import Mode
from rljob_worker.rollouts.policies.base import Policy
from rljob_worker.rollouts.policies.overlapped import OverlappedPolicy
from rljob_worker.rollouts.policies.partial import PartialPolicy
from rljob_worker.rollouts.policies.tail import TailPolicy
from rljob_worker.rollouts.policies.whole import WholePolicy

__all__ = ["Policy", "policy_of"]


def policy_of(spec: RLJobSpec) -> Policy:
    """The policy of a job."""
    if spec.mode is Mode.ASYNC:
        return OverlappedPolicy(spec)
    if spec.rollout.partial is not None:
        return PartialPolicy(spec)
    return WholePolicy(spec) if spec.rollout.tail is None else TailPolicy(spec)
