"""Rules about what runs a policy's programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from rljob_api.kubernetes_names import is_subdomain
from rljob_api.quantities import to_number
from rljob_api.rewards import SANDBOX_SHARE
from rljob_api.rules.findings import LEAST_MEMORY, Check, Finding, address_fault
from rljob_api.rules.places import reward_functions
from rljob_api.spec import RLJobSpec, SandboxSpec
from rljob_api.spec.sandbox import Isolation, SandboxServiceSpec, WarmPoolSpec


def _limits(spec: Any) -> Iterator[Finding]:
    """Limits of programs that do not fit the rewards that run them."""
    sandbox = spec.sandbox or SandboxSpec()
    if to_number(sandbox.memory) < LEAST_MEMORY:
        yield Finding(("sandbox", "memory"), "is too little for a program in Python", "at least 64Mi")
    runs_programs = False
    for reward in _whole_rewards(spec):
        if all(function.name != "code" for function in reward.parts or [reward]):
            continue
        runs_programs = True
        if sandbox.seconds > SANDBOX_SHARE * reward.timeout_seconds:
            wrong = f"is more than {SANDBOX_SHARE:.0%} of the reward's timeoutSeconds, in which all tests have to end"
            yield Finding(("sandbox", "seconds"), wrong, f"at most {SANDBOX_SHARE * reward.timeout_seconds:g}")
    if spec.sandbox is not None and not runs_programs:
        yield Finding(("sandbox",), "has no effect: no reward is called code", "leave it out")


def _service(spec: Any) -> Iterator[Finding]:
    """A service that is not asked for, or not described, and what it cannot do."""
    sandbox = spec.sandbox or SandboxSpec()
    elsewhere = sandbox.isolation == Isolation.SERVICE
    if elsewhere != (sandbox.service is not None):
        if elsewhere:
            yield Finding(("sandbox", "service"), "is needed by isolation: Service", "{urls: [http://sandbox:8080]}")
        else:
            yield Finding(("sandbox", "service"), "has no effect without isolation: Service", "leave it out")
    if sandbox.isolation == Isolation.NAMESPACE and not sandbox.require_files:
        wrong = "has no effect: the namespaces of a program have no other files"
        yield Finding(("sandbox", "requireFiles"), wrong, "leave it out, or isolation: Process")
    if not elsewhere:
        return
    for name in ("memory", "require_files"):
        if getattr(sandbox, name) != getattr(SandboxSpec(), name):
            place = ("sandbox", "requireFiles" if name == "require_files" else name)
            yield Finding(place, "has no effect: a service keeps programs in its own bounds", "leave it out")
    seen = set()
    for (place_, function), _ in reward_functions(spec):
        if function.name == "code" and place_ not in seen and function.args.get("kind") == "Pytest":
            wrong = "calls the program from another process, which a service does not run beside it"
            yield Finding((*place_, "args", "kind"), wrong, "Stdin or Calls, or sandbox.isolation: Process")
        seen.add(place_)
    for reward in _whole_rewards(spec):
        if not reward.network and any(function.name == "code" for function in reward.parts or [reward]):
            yield Finding(
                ("sandbox", "isolation"), "Service is not reached with the reward's network: false", "Process"
            )


def _server(url: str) -> str:
    """An address as all spellings of it: host in lower case, the port, no slash at the end."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{parts.hostname}:{port}{parts.path.rstrip('/')}"


def _urls(service: Any) -> Iterator[Finding]:
    urls = service.urls or []
    if service.warm_pool is None and not urls:
        yield Finding(("urls",), "is needed, or warmPool", "[http://sandbox:8080], or warmPool: {name: sandboxes}")
    elif service.warm_pool is not None and urls:
        yield Finding(("warmPool",), "stands beside urls, which it replaces", "one of the two")
    servers: list[str] = []
    for index, url in enumerate(urls):
        if wrong := address_fault(url):
            yield Finding(("urls", index), wrong, "like http://sandbox:8080")
        elif url.rstrip("/").endswith("/run_code"):
            yield Finding(("urls", index), "is that of one request", "the address before it, like http://sandbox:8080")
        elif (server := _server(url)) in servers:
            wrong = f"is the server of urls[{servers.index(server)}]"
            yield Finding(("urls", index), wrong, "each server once")
        servers.append("" if wrong else _server(url))


def _pool_name(pool: Any) -> Iterator[Finding]:
    if not is_subdomain(pool.name):
        right = "lower-case letters, digits, '-' and '.', at most 253 characters"
        yield Finding(("name",), "is no name of an object", right)


def _whole_rewards(spec: Any) -> Iterator[Any]:
    evaluation = spec.evaluation
    held_out = [] if evaluation is None else [*([evaluation.data] if evaluation.data else []), *(evaluation.sets or [])]
    for source in [spec, *(spec.data.sources or [spec.data]), *held_out]:
        if source.reward is not None:
            yield source.reward


SANDBOX_CHECKS: dict[type, tuple[Check, ...]] = {
    RLJobSpec: (_limits, _service),
    SandboxServiceSpec: (_urls,),
    WarmPoolSpec: (_pool_name,),
}
