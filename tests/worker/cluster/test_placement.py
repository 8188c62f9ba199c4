"""Places of devices on a cluster, without one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ray.util.placement_group import PlacementGroup
from test_run_folder import job

from rljob_api import derived
from rljob_api.derived import NodeGroup
from rljob_worker.cluster import node_helper
from rljob_worker.cluster.cluster import check_pairing
from rljob_worker.cluster.node_helper import NodeHelper
from rljob_worker.cluster.placement import (
    Node,
    Placement,
    capable_nodes,
    engines_alone,
    idle_first,
    without_judges,
)
from rljob_worker.errors import JobError
from rljob_worker.weightsync.shared_memory import SHARED_MEMORY


def spec(nodes: int = 2, devices: int = 2, **more: Any) -> Any:
    return job(resources={"profile": "cpu", "nodes": nodes, "devicesPerNode": devices}, **more).spec


ROLLOUT = {"promptsPerStep": 4, "samplesPerPrompt": 4, "maxResponseTokens": 4}


def row(name: str, cpus: float | None, alive: bool = True, group: str = "") -> dict[str, Any]:
    resources = {"memory": 1.0} if cpus is None else {"CPU": cpus}
    return {
        "NodeID": f"id-{name}",
        "NodeManagerHostname": name,
        "NodeManagerAddress": "10.0.0.1",
        "Resources": resources,
        "Alive": alive,
        "Labels": {"ray.io/node-group": group} if group else {},
    }


def test_nodes_that_can_hold_their_share_in_a_stable_order() -> None:
    table = [row("d", 2), row("head", None), row("a", 8), row("c", 1), row("b", 2, alive=False)]
    expected = [Node("id-a", "a", "10.0.0.1", 8), Node("id-d", "d", "10.0.0.1", 2)]
    assert able(spec(), table) == [expected]
    assert able(spec(), table[::-1]) == [expected]
    threads = job(resources={"profile": "cpu", "nodes": 1, "devicesPerNode": 2, "threadsPerDevice": 4}).spec
    assert [[node.hostname for node in nodes] for nodes in able(threads, table)] == [["a"]]


def own(of: Any) -> NodeGroup:
    """The only group of a job."""
    (group,) = derived.node_groups(of)
    return group


def able(of: Any, table: list[dict[str, Any]]) -> list[list[Node]]:
    """For each group of a job the nodes that can hold it."""
    return [capable_nodes(of, group, table) for group in derived.node_groups(of)]


APART = {
    "mode": "Async",
    "resources": {"profile": "cpu", "trainer": {"nodes": 1, "devicesPerNode": 2}, "rollout": {"nodes": 2}},
}


def test_a_node_of_the_other_group_is_left_to_it() -> None:
    apart = job(**APART).spec
    table = [row("a", 2, group="engines"), row("b", 1), row("c", 2, group="somebody's"), row("d", 4, group="trainers")]
    names = [[node.hostname for node in nodes] for nodes in able(apart, table)]
    assert names == [["c", "d"], ["a", "b", "c"]]


def test_where_trainers_and_engines_lie_on_nodes_of_their_own() -> None:
    apart = job(**APART, rollout=ROLLOUT | {"tensorParallel": 2}).spec
    trainers, engines = derived.node_groups(apart)
    nodes = tuple(Node(f"id-{name}", name, "10.0.0.1", 2) for name in "abc")
    placement = Placement(PlacementGroup.empty(), nodes, (trainers, engines, engines))
    assert placement.trainers(apart.training) == [0, 1]
    assert placement.engines(2) == [range(2, 4), range(4, 6)]
    assert [placement.node_of(device) for device in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [placement.number_on_node(device) for device in range(6)] == [0, 1] * 3


def test_a_judge_has_the_last_devices_of_each_node_or_takes_turns_on_all() -> None:
    judge = {"name": "a", "kind": "Score", "model": {"path": "/models/score", "devicesPerNode": 1}}
    alone = spec(reward={"name": "judge"}, judges=[judge])
    nodes = tuple(Node(f"id-{name}", name, "10.0.0.1", 3) for name in "ab")
    [group] = derived.node_groups(alone)
    assert (group.devices, group.trainers, group.engine_devices, derived.devices(alone)) == (3, 2, 2, 6)
    placement = Placement(PlacementGroup.empty(), nodes, (group, group))
    assert placement.trainers(alone.training) == [0, 1, 3, 4]
    assert placement.engines(1) == [range(device, device + 1) for device in (0, 1, 3, 4)]
    assert placement.engines(2) == [range(0, 2), range(3, 5)]
    assert placement.judges() == [range(2, 3), range(5, 6)]
    assert [placement.node_of(device) for device in range(6)] == [0, 0, 0, 1, 1, 1]
    shares = [(own.devices, own.engine_devices, own.judge_devices) for own in without_judges((group, group))]
    assert shares == [(2, 2, 0)] * 2, "a run that asks no judge reserves nothing for it"
    assert [(own.devices, own.trainers) for own in engines_alone(alone)] == [(2, 0)]
    del judge["model"]["devicesPerNode"]  # type: ignore[attr-defined]
    turns = spec(reward={"name": "judge"}, judges=[judge])
    shared = Placement(PlacementGroup.empty(), nodes, derived.node_groups(turns) * 2)
    assert shared.judges() == shared.engines(1) == [range(device, device + 1) for device in range(4)]


def test_the_stages_of_a_replica_lie_on_one_node() -> None:
    staged = spec(training={"pipelineParallel": 2})
    nodes = tuple(Node(f"id-{name}", name, "10.0.0.1", 2) for name in "ab")
    placement = Placement(PlacementGroup.empty(), nodes, derived.node_groups(staged) * 2)
    assert placement.trainers(staged.training) == [0, 2, 1, 3], "by rank: both replicas' first stages, then the last"


def test_pairing_is_by_node_and_device() -> None:
    trainers = [(node, f"host:cpu:{index}") for node in "ab" for index in (0, 1)]
    engines = [(node, f"host:cpu:{index}") for node in "ba" for index in (1, 0)]
    check_pairing(trainers, engines)
    with pytest.raises(JobError, match="colocation needs the same"):
        check_pairing(trainers, [*engines[:2], *engines[:2]])
    with pytest.raises(JobError, match="colocation needs the same"):
        check_pairing([trainers[0]] * 2, [trainers[0]] * 2)


def test_a_helper_signals_processes_and_says_which_are_gone(tmp_path: Path) -> None:
    helper = NodeHelper(str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert helper.signal([process.pid], signal.SIGKILL) == []
    assert process.wait(60) == -signal.SIGKILL
    assert helper.signal([process.pid], signal.SIGKILL) == [process.pid]
    helper.close()
    assert list(tmp_path.iterdir()) == []


def test_a_helper_says_what_does_not_show_up(tmp_path: Path) -> None:
    helper = NodeHelper()
    assert helper.missing([str(tmp_path), str(tmp_path / "x")], 0.0) == [str(tmp_path / "x")]
    assert Path(helper.folder()).stat().st_mode & 0o777 == 0o700
    helper.close()
    helper.close()


def test_folders_of_helpers_that_were_killed_are_removed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from rljob_worker.cluster.node_helper import NodeHelper\n"
        "NodeHelper(sys.argv[1]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, env={"PYTHONPATH": path})
    (left,) = tmp_path.iterdir()
    helper = NodeHelper(str(tmp_path))
    assert [str(entry) for entry in tmp_path.iterdir()] == [helper.folder()] != [str(left)]
    helper.close()


@pytest.mark.parametrize("slow", [False, True])
def test_slots_of_trainers_that_were_killed_go_with_the_helper(
    slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a slow one, which gives its memory back for longer than anybody waits."""
    code = (
        "import time; from rljob_worker.weightsync.shared_memory import SharedMemory\n"
        "print(*SharedMemory.create('test', 4096).names, flush=True); time.sleep(60)"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert trainer.stdout is not None
    slots = [SHARED_MEMORY / name for name in trainer.stdout.readline().split()]
    assert len(slots) == 2
    assert all(slot.exists() for slot in slots)
    helper = NodeHelper(str(tmp_path))
    with monkeypatch.context() as patched:
        if slow:
            patched.setattr(node_helper, "_END_SECONDS", 0.1)
            patched.setattr(os, "kill", lambda pid, number: None)
        helper.end([trainer.pid], 0.0)
    assert not slow or trainer.poll() is None, "it is still there"
    helper.close()
    assert not any(slot.exists() for slot in slots)
    trainer.kill()
    assert trainer.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(("patience", "code"), [(20.0, 0), (0.0, -signal.SIGKILL)])
def test_who_leaves_in_time_is_not_killed(tmp_path: Path, patience: float, code: int) -> None:
    process = subprocess.Popen(["sleep", "0.5"])
    helper = NodeHelper(str(tmp_path))
    began = time.monotonic()
    helper.end([process.pid], patience)
    assert time.monotonic() - began < 10
    helper.close()
    assert process.wait(60) == code


def test_idle_nodes_come_first_and_the_order_stays() -> None:
    nodes = [Node(f"id-{name}", name, "10.0.0.1", 8) for name in "abcd"]
    available = {"id-a": {"CPU": 1.0}, "id-b": {"CPU": 2.0}, "id-c": {}, "id-d": {"CPU": 8.0, "memory": 1.0}}
    assert [node.hostname for node in idle_first(spec(), own(spec()), nodes, available)] == ["b", "d", "a", "c"]
    npus = job(resources={"profile": "ascend-a2", "nodes": 1, "devicesPerNode": 2}).spec
    free = {"id-b": {"CPU": 8.0, "NPU": 1.0}, "id-c": {"CPU": 8.0, "NPU": 2.0}}
    assert [node.hostname for node in idle_first(npus, own(npus), nodes, free)] == ["c", "a", "b", "d"]


def test_nodes_need_the_devices_that_ray_counts() -> None:
    counted = {"a": {"NPU": 2.0}, "b": {"NPU": 1.0}, "c": {"GPU": 2.0}, "d": {}}
    table = [row(name, 8) for name in counted]
    for entry in table:
        entry["Resources"] |= counted[entry["NodeManagerHostname"]]
    table.append(row("e", 1) | {"Resources": {"CPU": 1.0, "NPU": 2.0}})
    ascend: dict[str, Any] = {"profile": "ascend-a2", "nodes": 1, "devicesPerNode": 2}
    assert [[node.hostname for node in nodes] for nodes in able(job(resources=ascend).spec, table)] == [["a"]]
    renamed = ascend | {"overrides": {"rayResource": "GPU"}}
    assert [[node.hostname for node in nodes] for nodes in able(job(resources=renamed).spec, table)] == [["c"]]
