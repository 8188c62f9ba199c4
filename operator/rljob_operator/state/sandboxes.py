"""Sandboxes of a warm pool: when they are claimed, and what is wrong with them.

A job holds none while it waits for its devices. Between attempts the claims stay; one whose sandbox has ended is
deleted, and made again under the same name once it is gone.
"""

from __future__ import annotations

from rljob_api.spec import RLJobSpec
from rljob_api.spec.sandbox import WarmPoolSpec
from rljob_operator.state.causes import Cause, cut, sentence
from rljob_operator.state.observed import Observed, SandboxView
from rljob_operator.state.plan import ClaimSandboxes, ReleaseSandboxes
from rljob_operator.state.plan_builder import PlanBuilder

NOT_CLAIMED = "SandboxNotClaimed"
UNREADABLE = "SandboxesUnreadable"
IN_THE_WAY = "SandboxClaimInTheWay"


def warm_pool(spec: RLJobSpec | None) -> WarmPoolSpec | None:
    """The pool whose sandboxes run the job's programs; None: it asks for none."""
    service = spec.sandbox.service if spec is not None and spec.sandbox is not None else None
    return service.warm_pool if service is not None else None


def claim_names(job: str, count: int) -> tuple[str, ...]:
    """Names of the claims of a job."""
    return tuple(f"{job}-sandbox-{index}" for index in range(count))


def sandbox_urls(observed: Observed) -> tuple[str, ...]:
    """Base addresses of the job's sandboxes, in the claims' order; empty unless all are bound."""
    pool = warm_pool(observed.job.spec)
    if pool is None or sandbox_problem(observed) is not None:
        return ()
    claims = {claim.name: claim for claim in observed.sandboxes.claims}
    addresses = [claims[name].address for name in claim_names(observed.job.name, pool.count)]
    return tuple(f"http://{f'[{host}]' if ':' in host else host}:{pool.port}" for host in addresses)


def sandbox_problem(observed: Observed) -> Cause | None:
    """The first claim that gives no sandbox, in words; None: all do, or none is asked for."""
    if warm_pool(observed.job.spec) is not None and observed.sandboxes.problem:
        text = f"The SandboxClaims of RLJob {observed.job.name} cannot be read: {cut(observed.sandboxes.problem)}"
        help_text = "agent-sandbox has to be installed, and the operator's chart to have settings.sandboxClaims: true"
        return Cause(UNREADABLE, sentence(text, help_text))
    lost = lost_sandbox(observed)
    return None if lost is None else lost[1]


def lost_sandbox(observed: Observed) -> tuple[str, Cause] | None:
    """The name of the first claim that gives no sandbox and why; None: all do, none is asked for, or unseen."""
    pool = warm_pool(observed.job.spec)
    if pool is None or observed.sandboxes.problem or observed.sandboxes.unseen:
        return None
    claims = {claim.name: claim for claim in observed.sandboxes.claims}
    for name in claim_names(observed.job.name, pool.count):
        problem = _problem_of(name, claims.get(name), pool)
        if problem is not None:
            return name, problem
    return None


def may_hold_sandboxes(observed: Observed) -> bool:
    """Whether there are claims of the job that nobody has deleted, or none is known of for now."""
    return observed.sandboxes.passing or any(claim.owned and not claim.deleting for claim in observed.sandboxes.claims)


def _problem_of(name: str, claim: SandboxView | None, pool: WarmPoolSpec) -> Cause | None:
    if claim is None:
        return Cause(NOT_CLAIMED, f"SandboxClaim {name} of SandboxWarmPool {pool.name} is about to be made.")
    if not claim.owned:
        return Cause(IN_THE_WAY, f"SandboxClaim {name} is not this job's; delete it, or give the job another name.")
    if claim.deleting:
        return Cause(NOT_CLAIMED, f"SandboxClaim {name} is being deleted; a new one follows.")
    if claim.ready and claim.address and not claim.ended:
        return None
    said = f" ({claim.reason}{f': {cut(claim.message, 300)}' if claim.message else ''})" if claim.reason else ""
    state = "has ended" if claim.ended else "has no sandbox that is ready"
    return Cause(claim.reason or NOT_CLAIMED, f"SandboxClaim {name} of SandboxWarmPool {pool.name} {state}{said}.")


def claim_sandboxes(plan: PlanBuilder) -> None:
    """Ask for the claims that are missing, and let those go whose sandboxes have ended, or that are too many."""
    pool, sandboxes = warm_pool(plan.spec), plan.observed.sandboxes
    if pool is None or sandboxes.problem or plan.job.problem:
        return
    names = claim_names(plan.job.name, pool.count)
    _release(plan, [claim for claim in sandboxes.claims if claim.ended or claim.name not in names])
    there = {claim.name for claim in sandboxes.claims}
    missing = tuple(name for name in names if name not in there)
    if missing:
        # The status comes first: it says why, if they are refused.
        plan.act(ClaimSandboxes(missing), status_first=True)


def release_sandboxes(plan: PlanBuilder) -> None:
    """Delete all claims of the job."""
    _release(plan, list(plan.observed.sandboxes.claims))


def _release(plan: PlanBuilder, claims: list[SandboxView]) -> None:
    mine = tuple((claim.name, claim.uid) for claim in claims if claim.owned and not claim.deleting)
    if mine:
        plan.act(ReleaseSandboxes(mine))
