"""Meaning of Kubernetes' words when it takes no object of a job, or no pod, and what would help.

The messages are those of Kubernetes 1.36 (apiserver's admission plugins, webhook dispatcher and field validation).
"""

from __future__ import annotations

import re

from rljob_operator.state.causes import Cause, cut, sentence

_RULES: tuple[tuple[str, str, str], ...] = (
    (
        r"because it is being terminated",
        "NamespaceTerminating",
        "the namespace is being deleted, and the job with it; create the job in another one",
    ),
    (
        r"exceeded quota|failed quota",
        "ResourceQuota",
        "the namespace's ResourceQuota has to be raised, or spec.resources lowered",
    ),
    (
        r"failed (?:to call|calling) webhook",
        "WebhookFailing",
        "a webhook of the cluster does not answer: its administrator has to repair or remove it, and it is tried again",
    ),
    (
        r"serviceaccount .*not found",
        "ServiceAccountMissing",
        "correct spec.pods.serviceAccount, or make it",
    ),
    (r"PriorityClass", "PriorityClassMissing", "correct spec.scheduling.priorityClass, or make it"),
    (
        r"violates PodSecurity",
        "PodSecurity",
        "the namespace's pod-security level forbids what the profile mounts",
    ),
    (
        r"unknown field|field not declared in schema",
        "FieldUnknown",
        "the CRD in the cluster is older than jobs.kuberayVersion of the operator's chart says, or spec.pods names a "
        "field that it does not have",
    ),
    (
        r"denied (?:the )?request",
        "AdmissionDenied",
        "a policy or webhook of the cluster refuses it; labels of the RLJob without a prefix go on to its RayCluster, "
        "spec.pods.labels to its pods",
    ),
    (
        r"User \".*\" cannot ",
        "RightMissing",
        "the operator lacks a right in this namespace (watchNamespaces and rbac of its chart)",
    ),
    (r"forbidden", "AdmissionDenied", "an admission rule of the cluster refuses it"),
    (r"is invalid", "ObjectInvalid", "check spec.pods"),
)
REASONS = frozenset([reason for _, reason, _ in _RULES] + ["RequestRefused"])
"""All reasons that `refusal` gives."""


def refusal(what: str, said: str) -> Cause:
    """Cause of a refusal, in the API server's own words.

    Args:
        what: beginning of the sentence, like `Making the RayCluster failed`.
        said: the API server's message.
    """
    found = next(((reason, text) for pattern, reason, text in _RULES if re.search(pattern, said)), None)
    reason, help_text = found or ("RequestRefused", "")
    return Cause(reason, sentence(f"{what}: {cut(said)}", help_text))
