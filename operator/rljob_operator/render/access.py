"""Access to a job: the driver's token and the NetworkPolicy of its pods."""

from __future__ import annotations

import base64
import hashlib
import json

from rljob_api.json_types import Json
from rljob_api.wire.names import DRIVER_TOKEN_KEY
from rljob_operator.kubernetes_objects import Manifest, block_of
from rljob_operator.render.object_names import policy_name, secret_name
from rljob_operator.render.pods import JOB_LABEL
from rljob_operator.render.ray_cluster import metadata, valid_spec
from rljob_operator.render.settings import RenderSettings
from rljob_operator.state.observed import JobView
from rljob_operator.state.sandboxes import warm_pool

DIGEST_ANNOTATION = "rljob.dev/spec-digest"
"""On the policy: a digest of its spec as it was rendered. What is stored is not compared with what is rendered: the API
server fills in defaults, and a cluster's own admission may add to it."""
_LAST_PORT = 65535


def render_secret(job: JobView, token: str) -> Manifest:
    """The Secret with the driver's bearer token, key `token`."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, secret_name(job.name), "driver-token"),
        "type": "Opaque",
        "data": {DRIVER_TOKEN_KEY: base64.b64encode(token.encode()).decode()},
    }


def render_policy(job: JobView, settings: RenderSettings) -> Manifest | None:
    """The NetworkPolicy of head and workers; None where `network.networkPolicy` is off.

    The job's own pods reach everything, the operator reaches Ray's job API and the driver, nobody else anything: not
    the agents that run Ray jobs on every node, nor the store in which trainers meet. With `network.hostNetwork` the
    workers have their nodes' addresses, which a policy can neither close nor name: then all ports of the head are open
    but those that would run code or show data without Ray's own protocol (job API, client server, driver).
    """
    spec = valid_spec(job)
    if not spec.network.network_policy:
        return None
    operator: dict[str, Json] = {"podSelector": {"matchLabels": dict(settings.operator_pod_labels)}}
    namespace = settings.operator_namespace
    operator["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": namespace}} if namespace else {}
    served = [settings.dashboard_port, settings.driver_port]
    ingress: list[Manifest] = [
        {"from": [{"podSelector": {"matchLabels": {JOB_LABEL: job.name}}}]},
        {"from": [operator], "ports": [{"protocol": "TCP", "port": port} for port in served]},
    ]
    if spec.network.host_network:
        ingress.append({"ports": _all_ports_but(*served, settings.client_port)})
    return _policy(job, {"ray.io/cluster": job.name}, ingress)


def render_claim(job: JobView, name: str) -> Manifest:
    """A SandboxClaim of the job's warm pool. It sets nothing of the sandbox: that would not come from the pool then."""
    pool = warm_pool(job.spec)
    assert pool is not None
    return {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxClaim",
        "metadata": metadata(job, name, "sandbox-claim"),
        "spec": {"warmPoolRef": {"name": pool.name}},
    }


def policy_to_apply(job: JobView, settings: RenderSettings, there: bool) -> Manifest | None:
    """The NetworkPolicy as it should be; None where the job wants none and none is there.

    Where it wants none any more, one that selects no pod takes the place of the one that is there. Deleting that would
    need one more right in every namespace, and a policy that lets everybody in would undo what other policies of the
    namespace close.

    Args:
        job: the job.
        settings: the operator's.
        there: whether the job has a policy.
    """
    policy = render_policy(job, settings)
    return (
        _policy(job, {"ray.io/cluster": job.name, "ray.io/node-type": "none"}, [])
        if policy is None and there
        else policy
    )


def policy_digest(policy: Manifest) -> str:
    """Digest of the spec that a policy was rendered with; empty: it does not say."""
    return str(block_of(block_of(policy, "metadata"), "annotations").get(DIGEST_ANNOTATION, ""))


def _policy(job: JobView, pods: dict[str, str], ingress: list[Manifest]) -> Manifest:
    spec: Manifest = {
        "podSelector": {"matchLabels": pods},
        "policyTypes": ["Ingress"],
        "ingress": ingress,
    }
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
    about = {**metadata(job, policy_name(job.name), "head-policy"), "annotations": {DIGEST_ANNOTATION: digest[:32]}}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": about, "spec": spec}


def _all_ports_but(*closed: int) -> list[Manifest]:
    ranges: list[Manifest] = []
    first = 1
    for port in [*sorted(set(closed)), _LAST_PORT + 1]:
        if first < port:
            ranges.append({"protocol": "TCP", "port": first, "endPort": port - 1})
        first = port + 1
    return ranges
