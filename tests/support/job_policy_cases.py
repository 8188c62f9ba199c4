"""Requests of jobs, and the rule of the administrator's policy that decides: for the operator and the API server."""

from __future__ import annotations

from typing import Any


def _pod(text: str) -> str:
    return f"pods.worker={{spec: {{{text}}}}}"


def _container(text: str) -> str:
    return _pod(f"containers: [{{name: side, image: i, {text}}}]")


_POD = "spec.pods.worker.spec"
_SIDE = f"{_POD}.containers[0]"
_VOLUMES = "storage.volumes=[{name: storage, mountPath: /storage, claim: c}, {name: v, mountPath: /v, %s}]"

REFUSED: list[tuple[str, str, str]] = [
    ("pods.serviceAccount=admin", "spec.pods.serviceAccount", "serviceAccounts"),
    ("environment.secrets=[base-driver]", "spec.environment.secrets[0]", "secrets"),
    ("scheduling.priorityClass=system-node-critical", "spec.scheduling.priorityClass", "priorityClasses"),
    ("network.hostNetwork=true", "spec.network.hostNetwork", "podFields"),
    ("network.networkPolicy=false", "spec.network.networkPolicy", "openNetwork"),
    ("network.rayAuthentication='Off'", "spec.network.rayAuthentication", "openRay"),
    ("resources.tuning.compileCachePath=/etc", "spec.resources.tuning.compileCachePath", "hostPaths"),
    ("resources.overrides.driverPath=/root", "spec.resources.overrides.driverPath", "readOnlyHostPaths"),
    ("resources.overrides.hostMounts=[/etc]", "spec.resources.overrides.hostMounts[0]", "readOnlyHostPaths"),
    ("resources.overrides.runtimeClass=mine", "spec.resources.overrides.runtimeClass", "podFields"),
    (_VOLUMES % "hostPath: /etc", "spec.storage.volumes[1].hostPath", "hostPaths"),
    (_VOLUMES % "source: {hostPath: {path: /etc}}", "spec.storage.volumes[1].source.hostPath", "hostPaths"),
    (_VOLUMES % "source: {secret: {secretName: s}}", "spec.storage.volumes[1].source.secret", "secrets"),
    (_VOLUMES % "source: {nfs: {server: s, path: /}}", "spec.storage.volumes[1].source", "volumeTypes"),
    (_VOLUMES % "source: {projected: {sources: []}}", "spec.storage.volumes[1].source", "volumeTypes"),
    (_pod("nodeName: control-plane"), f"{_POD}.nodeName", "podFields"),
    (_pod("hostPID: true"), f"{_POD}.hostPID", "podFields"),
    (_pod("hostIPC: true"), f"{_POD}.hostIPC", "podFields"),
    (_pod("hostNetwork: true"), f"{_POD}.hostNetwork", "podFields"),
    (_pod("automountServiceAccountToken: true"), f"{_POD}.automountServiceAccountToken", "podFields"),
    (_pod("runtimeClassName: mine"), f"{_POD}.runtimeClassName", "podFields"),
    (_pod("schedulerName: mine"), f"{_POD}.schedulerName", "podFields"),
    (_pod("priority: 1000"), f"{_POD}.priority", "podFields"),
    (_pod("serviceAccountName: admin"), f"{_POD}.serviceAccountName", "serviceAccounts"),
    (_pod("serviceAccount: admin"), f"{_POD}.serviceAccount", "serviceAccounts"),
    (_pod("priorityClassName: high"), f"{_POD}.priorityClassName", "priorityClasses"),
    (_pod("volumes: [{name: a, hostPath: {path: /}}]"), f"{_POD}.volumes[0].hostPath", "hostPaths"),
    (_pod("volumes: [{name: a, secret: {secretName: s}}]"), f"{_POD}.volumes[0].secret", "secrets"),
    (_pod("volumes: [{name: a, csi: {driver: d}}]"), f"{_POD}.volumes[0]", "volumeTypes"),
    (_pod("securityContext: {sysctls: [{name: a, value: b}]}"), f"{_POD}.securityContext.sysctls", "privileged"),
    (
        _pod("securityContext: {seccompProfile: {type: Unconfined}}"),
        f"{_POD}.securityContext.seccompProfile",
        "privileged",
    ),
    (
        "pods.head={spec: {containers: [{name: ray-head, securityContext: {privileged: true, "
        "allowPrivilegeEscalation: true}}]}}",
        "spec.pods.head.spec.containers[0].securityContext.privileged",
        "privileged",
    ),
    (
        _pod("initContainers: [{name: a, image: i, securityContext: {privileged: true}}]"),
        f"{_POD}.initContainers[0].securityContext.privileged",
        "privileged",
    ),
    (
        _container("securityContext: {capabilities: {add: [SYS_ADMIN]}}"),
        f"{_SIDE}.securityContext.capabilities.add",
        "privileged",
    ),
    (_container("securityContext: {procMount: Unmasked}"), f"{_SIDE}.securityContext.procMount", "privileged"),
    (
        _container("env: [{name: A, valueFrom: {secretKeyRef: {name: s, key: k}}}]"),
        f"{_SIDE}.env[0].valueFrom.secretKeyRef",
        "secrets",
    ),
    (_container("envFrom: [{secretRef: {name: s}}]"), f"{_SIDE}.envFrom[0].secretRef", "secrets"),
    (_container("ports: [{containerPort: 80, hostPort: 80}]"), f"{_SIDE}.ports[0].hostPort", "podFields"),
    (
        _container("volumeMounts: [{name: rljob-host-0, mountPath: /driver}]"),
        f"{_SIDE}.volumeMounts[0].readOnly",
        "privileged",
    ),
    (
        _pod(
            "containers: [{name: ray-worker, volumeMounts: [{mountPath: /usr/local/Ascend/driver, readOnly: false}]}]"
        ),
        f"{_SIDE}.volumeMounts[0].readOnly",
        "privileged",
    ),
    (
        "pods.annotations={container.apparmor.security.beta.kubernetes.io/ray-worker: unconfined}",
        "spec.pods.annotations",
        "privileged",
    ),
]
"""(setting below `spec`, the field that the operator names, the rule) of what the default policy refuses."""

ALLOWED = [
    "image=registry.example/any:1",
    "pods.imagePullSecrets=[pull]",
    "pods.worker={spec: {securityContext: {supplementalGroups: [1001], fsGroup: 1000}}}",
    "pods.worker={spec: {containers: [{name: side, image: i, securityContext: {privileged: false,"
    " capabilities: {drop: [ALL], add: [CHOWN]}}}]}}",
    "pods.worker={spec: {hostPID: false, automountServiceAccountToken: false, dnsPolicy: Default}}",
    "pods.worker={spec: {volumes: [{name: a, emptyDir: {}}], containers: [{name: ray-worker, livenessProbe: null,"
    " env: [{name: A, value: b}], volumeMounts: [{name: a, mountPath: /a}]}]}}",
    "pods.head={metadata: {annotations: {note: text}}}",
    "pods.head={spec: {initContainers: null, imagePullSecrets: null}, metadata: {annotations: null}}",
    "storage.volumes=[{name: storage, mountPath: /storage, source: {persistentVolumeClaim: {claimName: c}}}]",
    "scheduling={priorityClass: null, tolerations: [{key: npu, operator: Exists}]}",
]
"""Settings that the default policy allows."""

GRANTS: dict[str, dict[str, Any]] = {
    "serviceAccounts": {"serviceAccounts": ["adm*"]},
    "secrets": {"secrets": ["*"]},
    "priorityClasses": {"priorityClasses": ["system-*", "high"]},
    "podFields": {
        "podFields": [
            "automountServiceAccountToken", "hostIPC", "hostNetwork", "hostPID", "nodeName", "priority",
            "runtimeClassName", "schedulerName",
        ]
    },
    "openNetwork": {"openNetwork": True},
    "openRay": {"openRay": True},
    "hostPaths": {"hostPaths": ["/"]},
    "readOnlyHostPaths": {"readOnlyHostPaths": ["/etc", "/root/"]},
    "volumeTypes": {"volumeTypes": ["persistentVolumeClaim", "nfs", "projected", "csi"]},
    "privileged": {"privileged": True},
}  # fmt: skip
"""Rule -> a policy that allows what is refused above by it."""
