"""A driver's report about itself arrives at its readers, whichever of the two is older."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from rljob_api.wire.driver_status import DriverStatus, EngineNodes
from rljob_api.wire.run_status import RunDescription
from rljob_api.wire.steps_page import StepsPage, page_text
from rljob_api.wire.values import WireError

STATUS = DriverStatus(
    ready=True,
    step=3,
    steps=9,
    phase="rollout",
    attempt=1,
    weight_version=3,
    last_checkpoint_step=None,
    stopping=False,
    phase_seconds=2.5,
    lanes={"engine": "rollout"},
    groups={"growing": 4, "scoring": 2, "ready": 6},
    engines={"engine-0": 16, "engine-1": 0},
    engine_nodes=EngineNodes(2, 1, ["10.0.0.1", "10.0.0.2"]),
    reward_parts={"format": 0.5},
    write_failures={"step records": 2},
    write_messages={"step records": "/run/steps.jsonl: No space left on device"},
    checkpoint_warnings={"unverified": "/run/checkpoints/step-4 is used as it is"},
)
RUN: dict[str, Any] = {"job": {"metadata": {"name": "a"}, "spec": {"steps": 3}}, "attempt": 2, "pid": 7}


def test_a_status_comes_back_as_it_was() -> None:
    content = json.loads(json.dumps(STATUS.to_json()))
    assert DriverStatus.parse(content) == STATUS
    assert DriverStatus.parse({**content, "bubble": {"seconds": 1.5}}) == STATUS, "of a newer driver"
    assert list(content) == [
        "ready", "step", "steps", "phase", "attempt", "weight_version", "last_checkpoint_step", "stopping",
        "phase_seconds", "lanes", "groups", "engines", "engine_nodes", "reward_parts", "write_failures",
        "write_messages", "checkpoint_warnings",
    ]  # fmt: skip


def test_a_driver_that_says_less_is_read() -> None:
    newer = {"steps", "weight_version", "phase_seconds", "lanes", "groups", "reward_parts"}
    newer |= {"engines", "engine_nodes", "write_failures", "write_messages", "checkpoint_warnings"}
    content = {name: value for name, value in STATUS.to_json().items() if name not in newer}
    status = DriverStatus.parse(content)
    assert (status.step, status.steps, status.weight_version, status.phase_seconds) == (3, None, None, None)
    assert status.lanes == status.groups == status.engines == status.reward_parts == {}
    assert status.engine_nodes is None
    assert status.write_failures == status.write_messages == status.checkpoint_warnings == {}


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"wanted": 1, "taking_part": 1}, "engine_nodes.in_use must be a list"),
        ({"wanted": -1, "taking_part": 1, "in_use": []}, "engine_nodes.wanted must be a whole number"),
        ({"wanted": 1, "taking_part": 1, "in_use": [3]}, "engine_nodes.in_use must be a text"),
        ([], "engine_nodes must be an object"),
    ],
)
def test_nodes_that_are_none_are_named(nodes: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        DriverStatus.parse({**STATUS.to_json(), "engine_nodes": nodes})


def test_a_page_holds_the_lines_as_they_stand_in_the_file() -> None:
    lines = ['{"index": 0, "text": "a\\u2028b"}', '{"index": 1}']
    page = StepsPage.parse(json.loads(page_text(lines, 7)))
    assert (page.records, page.total) == ([{"index": 0, "text": "a\u2028b"}, {"index": 1}], 7)
    assert StepsPage.parse(json.loads(page_text([], 0))) == StepsPage([], 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"job": None}, "job must be an object, not None"),
        ({"job": {"metadata": {"name": "a"}}}, r"job\.spec must be an object"),
        ({"job": {"metadata": {}, "spec": {}}}, r"job\.metadata\.name must be a text"),
        ({"attempt": 0}, "attempt must be 1 or more"),
        ({"attempt": math.nan}, "attempt must be a whole number from 0, not nan"),
    ],
)
def test_what_is_no_description_of_a_run_is_named(change: dict[str, Any], message: str) -> None:
    assert RunDescription.parse(RUN).to_json() == RUN
    assert RunDescription.parse({**RUN, "nonce": "x"}).attempt == 2, "of a newer driver"
    with pytest.raises(WireError, match=message):
        RunDescription.parse({**RUN, **change})
