"""`spec.sandbox`: what runs the programs that a policy wrote."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import ApiModel, Name, PositiveFloat, Quantity


class Isolation(StrEnum):
    """Isolation of a program from the rest of the machine."""

    PROCESS = "Process"
    NAMESPACE = "Namespace"
    SERVICE = "Service"


ServiceUrl = Annotated[str, Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$", max_length=2048)]


class WarmPoolSpec(ApiModel):
    """Sandboxes that the operator claims for the job (agent-sandbox)."""

    name: Name
    """SandboxWarmPool in the job's namespace."""
    count: Annotated[int, Field(ge=1, le=64, json_schema_extra={"format": "int32"})] = 1
    """Sandboxes, each with a SandboxClaim."""
    port: Annotated[int, Field(ge=1, le=65535, json_schema_extra={"format": "int32"})] = 8080
    """Port of the server in each."""


class SandboxServiceSpec(ApiModel):
    """Servers that run programs by SandboxFusion's HTTP interface."""

    urls: Annotated[list[ServiceUrl], Field(min_length=1, max_length=64)] | None = None
    """Base addresses, `http://sandbox:8080`: programs go to `/run_code` of each by turns."""
    warm_pool: WarmPoolSpec | None = None
    """Sandboxes in place of `urls`, on a cluster alone."""
    concurrency: Annotated[int, Field(ge=1, le=1024, json_schema_extra={"format": "int32"})] = 32
    """Responses that are tested at once."""
    wait_seconds: PositiveFloat = 60.0
    """Seconds that the tests of a response may wait for answers, beside the time that its programs run. A server that
    is away, slow or answers no result is followed by the next until then; later the step fails, whatever `onError`
    says."""


class SandboxSpec(ApiModel):
    """Place of the programs that the reward `code` tests, and the resources of one of them."""

    isolation: Isolation = Isolation.PROCESS
    """`Process`: one process without others, sockets, and files but its own folder's, by Landlock, system call filters
    and resource limits. `Namespace`: in namespaces of its own by bubblewrap too; refused where pods get none.
    `Service`: on the servers of `service`."""
    service: SandboxServiceSpec | None = None
    """Servers of `isolation: Service`; None: there are none."""
    require_files: bool = True
    """`Process`: refuse to start where the kernel cannot keep a program from files of the same user (no Landlock:
    before Linux 5.13)."""
    memory: Quantity = "512Mi"
    """Memory that a program may use, beside what the reward's processes may. A service bounds it itself."""
    seconds: PositiveFloat = 6.0
    """Deadline of one test, or one call of a function; its process is ended then."""
