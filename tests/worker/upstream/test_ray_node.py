"""A Ray node that starts is waited for, and seen as soon as it is there."""

from __future__ import annotations

import time

import pytest
from ray._private import services
from ray._private.state import GlobalState

from rljob_worker.upstream import ray_node


def test_a_node_that_takes_its_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def get_node(gcs_address: str, node_id: str) -> dict[str, str]:
        asked.append((gcs_address, node_id))
        if len(asked) < 3:
            raise RuntimeError("no node with this id was found")
        return {"node_id": node_id}

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(GlobalState, "node_table", lambda self: [{"NodeID": "a"}])
    with ray_node.slow_start():
        assert services.get_node("127.0.0.1:1", "a") == {"node_id": "a"}
    assert asked == [("127.0.0.1:1", "a")] * 3
    assert services.get_node is get_node


def test_one_that_never_comes_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_node(gcs_address: str, node_id: str) -> None:
        raise RuntimeError("no node with this id was found")

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(GlobalState, "node_table", lambda self: [{"NodeID": "b"}])
    monkeypatch.setattr(ray_node, "_START_SECONDS", 0.3)
    with ray_node.slow_start(), pytest.raises(RuntimeError, match="no node with this id"):
        services.get_node("127.0.0.1:1", "a")


def test_it_is_asked_for_when_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray looks again after a second, and then after another one."""
    known_from = time.monotonic() + 0.3

    def get_node(gcs_address: str, node_id: str) -> float:
        return time.monotonic()

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(
        GlobalState, "node_table", lambda self: [{"NodeID": "a"}] if time.monotonic() > known_from else []
    )
    with ray_node.slow_start():
        assert services.get_node("127.0.0.1:1", "a") >= known_from
