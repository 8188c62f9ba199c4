"""HCCL's errors, as drivers repeat them, and the reason that they give an attempt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from simulation import World

from rljob_api.spec import FailureReason
from rljob_api.status import JobPhase
from rljob_operator.state import hccl_errors
from rljob_operator.state.explain import explain
from rljob_operator.state.hccl_errors import hccl_error
from rljob_operator.state.reconcile import reconcile

# As in vllm-ascend's issues 486 and 5461.
CONNECT = [
    "rljob: actor_train: trainer-1: RuntimeError: InnerRunOpApi:torch_npu/csrc/framework/OpParamMaker.cpp:281 OPS "
    "function error: HcclAllreduce, error code is 6",
    "[ERROR] 2025-04-08-18:07:20 (PID:1292363, Device:1, RankID:1) ERR01100 OPS call acl api failed.",
    "EI0006: [PID: 1292363] 2025-04-08-18:07:20.444.436 Getting socket times out. Reason: Remote Rank did not send the "
    "data in time. Please check the reason for the rank being stuck",
    "        Solution: 1. Check the rank service processes with other errors or no errors in the cluster.",
    "        TraceBack (most recent call last):",
]
CASES: list[tuple[list[str], str, str]] = [
    (CONNECT, "EI0006", "spec.hccl.connectTimeoutSeconds"),
    (["[PID: 749] 2025-12-29 Get_Socket_Timeout(EI0006): Getting socket times out."], "EI0006", "-tls -g"),
    (
        ["Ranktable_Detect_Failed(EI0015): Receiving message from the root node timed out"],
        "EI0015",
        "spec.hccl.interface",
    ),
    (["EI0002: The wait execution of the Notify register times out."], "EI0002", "spec.hccl.execTimeoutSeconds"),
    (["Watchdog caught collective operation timeout: WorkHCCL(SeqNum=3, OpType=ALLREDUCE)"], "execution", "rank"),
    (["Error_Bind_IP_Port(EJ0003): Failed to bind the IP port."], "EJ0003", "spec.hccl.trainerPorts"),
    (["EI0019: bind port 16666 failed"], "EI0019", "spec.hccl.trainerPorts"),
    (["EI0013: [PID: 1] error cqe"], "EI0013", "hccn_tool"),
    (["EI0099: something new"], "EI0099", "another error first"),
    (
        ["RuntimeError: HCCL function error: HcclGetRootInfo(&hcclID), error code is 7"],
        "a call of HCCL",
        "another error",
    ),
    (["[ERROR] (PID:1, Device:0, RankID:0) ERR02200 DIST call hccl api failed."], "a call of HCCL", "another error"),
]


@pytest.mark.parametrize(("lines", "names", "helps"), CASES, ids=[names for _, names, _ in CASES])
def test_an_error_is_named_with_what_would_help(lines: list[str], names: str, helps: str) -> None:
    found = hccl_error(lines)
    assert found is not None
    assert found.reason == FailureReason.HCCL_FAILED
    assert names in found.message
    assert helps in found.message
    assert "\n" not in found.message


@pytest.mark.parametrize(
    "line", ["", "step 3 of 10", "rljob: reward: ZeroDivisionError", "hccl buffers: 2 x 200 MB", "XEI0006"]
)
def test_other_lines_are_none(line: str) -> None:
    assert hccl_error([line]) is None


def test_of_several_codes_the_cause_is_told_and_not_what_follows() -> None:
    found = hccl_error([*CONNECT, "Error_Bind_IP_Port(EJ0003): Failed to bind the IP port."])
    assert found is not None
    assert "(EJ0003)" in found.message
    order = list(hccl_errors._MEANINGS)
    assert order.index("EI0015") < order.index("EI0006") < order.index("EI0002")


def ended_with(world: World, code: int, lines: list[str]) -> World:
    world.driver_exits(code)
    observed = world.observed()
    assert observed.submission is not None
    seen = replace(observed, submission=replace(observed.submission, last_log_lines=tuple(lines)))
    world.status = reconcile(seen, world.now).status
    return world


def test_the_attempt_has_the_reason_and_why_names_the_code(running: Callable[..., World]) -> None:
    world = ended_with(running(), 1, CONNECT)
    attempt = world.status.attempts[0]
    assert (attempt.reason, attempt.counted) == ("HcclFailed", True)
    assert "the driver ended with exit code 1" in (attempt.message or "")
    found = explain(world.observed(), world.now)
    assert found.reason == "BackOff"
    assert "EI0006" in found.message


def test_why_names_it_before_the_operator_has_closed_the_attempt(running: Callable[..., World]) -> None:
    world = running()
    world.driver_exits(1)
    observed = world.observed()
    assert observed.submission is not None
    seen = replace(observed, driver=None, submission=replace(observed.submission, last_log_lines=tuple(CONNECT)))
    found = explain(seen, world.now)
    assert found.reason == "HcclFailed"
    assert "(EI0006)" in found.message


def test_a_job_that_fails_for_it_says_so(running: Callable[..., World]) -> None:
    world = ended_with(running(failurePolicy={"maxRestarts": 0}), 1, CONNECT)
    assert world.status.phase is JobPhase.FAILED
    found = explain(world.observed(), world.now)
    assert found.reason == "HcclFailed"
    assert "EI0006" in found.message


def test_rules_meet_it_and_other_ends_stay_what_they_are(running: Callable[..., World]) -> None:
    policy = {"rules": [{"reasons": ["HcclFailed"], "action": "Fail"}]}
    assert ended_with(running(failurePolicy=policy), 1, CONNECT).status.phase is JobPhase.FAILED
    assert ended_with(running(), 2, CONNECT).status.attempts[0].reason == "UserError"
    assert ended_with(running(), 4, CONNECT).status.attempts[0].reason == "PhaseTimeout"
