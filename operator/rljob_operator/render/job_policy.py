"""Limits of an administrator on RLJobs: the values of the chart's `policy`.

Without any value a job may use what a pod of the Pod Security Standard "baseline" may, any image, and no Secret,
service account, priority class or file of a node beyond what its hardware profile mounts.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from rljob_api.base import ApiModel, Name, Text
from rljob_api.profiles import PROFILES

PodField = Literal[
    "automountServiceAccountToken", "hostIPC", "hostNetwork", "hostPID", "hostUsers", "nodeName", "os", "overhead",
    "priority", "resourceClaims", "runtimeClassName", "schedulerName", "workloadRef",
]  # fmt: skip
VolumeType = Annotated[str, Field(pattern="^[a-zA-Z]{1,63}$")]
_PROFILES_PATHS = sorted({m.source or m.path for profile in PROFILES.values() for m in profile.host_mounts})


class JobPolicy(ApiModel):
    """Rules for all jobs. In patterns `*` stands for any characters."""

    trusted_namespaces: list[Name] = []
    """Namespaces whose jobs may name anything."""
    images: list[Text] = ["*"]
    """Patterns of images; those that the operator gives to jobs without one are always allowed."""
    image_pull_secrets: list[Name] = ["*"]
    """Patterns of Secrets that images may be pulled with. No process of the job sees them."""
    secrets: list[Name] = []
    """Patterns of Secrets that may become variables or files of a job. `*` includes the tokens of other jobs."""
    service_accounts: list[Name] = []
    """Patterns of service accounts; jobs without one have the namespace's default, and none has its token."""
    priority_classes: list[Name] = []
    """Patterns of priority classes."""
    host_paths: list[Annotated[str, Field(pattern="^/", max_length=4096)]] = []
    """Folders of the nodes that jobs may mount to write: they and all below them."""
    read_only_host_paths: list[Annotated[str, Field(pattern="^/", max_length=4096)]] = _PROFILES_PATHS
    """Files and folders of the nodes that `resources.overrides` may name, which are mounted read-only."""
    volume_types: list[VolumeType] = ["configMap", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"]
    """Volume sources; `hostPath` and `secret` have their own lists."""
    pod_fields: list[PodField] = []
    """Fields of pods that reach beyond a pod and that jobs may set; `hostNetwork` includes `network.hostNetwork`."""
    privileged: bool = False
    """Containers may have more than the Pod Security Standard "baseline" allows."""
    open_ray: bool = False
    """Ray's API may be without token authentication."""
    open_network: bool = False
    """`network.networkPolicy: false` is allowed."""


def matches(patterns: list[str], name: str) -> bool:
    """Whether one of the patterns is the name's."""
    return any(re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) for pattern in patterns)


def is_below(folders: list[str], path: str) -> bool:
    """Whether a path is one of the folders or below one, whatever its `..` say."""
    inside = (f"{path}/".startswith(f"{folder.rstrip('/')}/") for folder in folders)
    return ".." not in path.split("/") and any(inside)
