"""`spec.sandbox`: what runs the programs that a policy wrote."""

from __future__ import annotations

from enum import StrEnum

from rljob_api.base import ApiModel, PositiveFloat, Quantity


class Isolation(StrEnum):
    """Isolation of a program from the rest of the machine."""

    PROCESS = "Process"
    NAMESPACE = "Namespace"


class SandboxSpec(ApiModel):
    """Place of the programs that the reward `code` tests, and the resources of one of them."""

    isolation: Isolation = Isolation.PROCESS
    """`Process`: one process without others, sockets, and files but its own folder's, by Landlock, system call filters
    and resource limits. `Namespace`: in namespaces of its own by bubblewrap too; refused where pods get none."""
    require_files: bool = True
    """`Process`: refuse to start where the kernel cannot keep a program from files of the same user (no Landlock:
    before Linux 5.13)."""
    memory: Quantity = "512Mi"
    """Memory that a program may use, beside what the reward's processes may."""
    seconds: PositiveFloat = 6.0
    """Deadline of one test, or one call of a function; its process is ended then."""
