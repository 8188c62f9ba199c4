"""Trainers and engines on nodes of their own: what one machine with the same processes computes, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fault_rows import APART_SPEC, ROLLOUT
from jobs import REPOSITORY, events, final_state, manifest, run, wait_for
from lane_sums import ENGINE, TRAINER, check_lanes
from ray_cluster import RayCluster, ray_cluster
from support.run_bits import digest_of_trajectories
from support.samples import SEED, unless_all, unless_drawn
from support.slow_reward import write_slow_reward
from support.step_lines import read_steps
from test_existing_ray import newest_step

from rljob_api.wire import names
from rljob_api.wire.exit_codes import ExitCode
from rljob_api.wire.run_status import ADDRESS_FILE
from rljob_worker.records.event_names import ENGINE_JOINED, ENGINE_LEFT, ENGINE_LOST

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6
LARGE_NODE, *NODES = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")
DATA = {"synthetic": {"rows": 64, "seed": 5}}
JOB: dict[str, Any] = {
    **APART_SPEC,
    "steps": STEPS,
    "mode": "Disaggregated",
    "rollout": {**ROLLOUT, "staleness": {"max": 1}},
    "records": {"httpPort": 0, "lingerSeconds": 0, "tensorboard": False, "trajectoriesEverySteps": 1},
}


def groups(trainer: dict[str, int], rollout: dict[str, int]) -> dict[str, Any]:
    return {"profile": "cpu", "trainer": trainer, "rollout": rollout, "threadsPerDevice": 1}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same two trainers and two engines on this machine alone."""
    folder = tmp_path_factory.mktemp("together")
    resources = groups({"devicesPerNode": 2}, {"devicesPerNode": 2})
    code, output = run("run", manifest(folder, **JOB, resources=resources), "--output", folder / "run")
    assert code == 0, output
    return folder / "run"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("cluster"), {LARGE_NODE: 2, **dict.fromkeys(NODES, 1)}) as made:
        yield made


@unless_drawn("engines apart: the bits of one machine")
def test_the_bits_are_those_of_one_machine(cluster: RayCluster, together: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    resources = groups({"nodes": 2, "devicesPerNode": 1}, {"nodes": 2, "devicesPerNode": 1})
    cluster.submit(manifest(tmp_path, **JOB, resources=resources), folder, "apart")
    info = cluster.end_of("apart", 300)
    assert info["status"] == "SUCCEEDED", cluster.logs("apart")

    assert final_state(folder, ranks=2) == final_state(together, ranks=2)
    assert digest_of_trajectories(folder) == digest_of_trajectories(together)
    records, expected = read_steps(folder)[1:], read_steps(together)[1:]
    assert len(records) == len(expected) == STEPS
    for record, same in zip(records, expected, strict=True):
        for name in ("train/loss", "train/grad_norm", "rollout/raw_reward", "train/train_rollout_logprob_abs_diff"):
            assert record["metrics"][name] == same["metrics"][name]
        assert record["weights"]["verified"]
        assert record["weights"]["bytes"] == same["weights"]["bytes"]
        assert record["weights"]["send"]["network_seconds"] > 0.0
    check_lanes(records, {"trainer": TRAINER, "engine": ENGINE})
    wait_for(lambda: not cluster.alive("actors"), "end of the job's actors", 30)


@unless_drawn("engines apart: they come and go")
def test_engines_are_lost_leave_and_join_while_the_run_goes_on(cluster: RayCluster, tmp_path: Path) -> None:
    folder, most = tmp_path / "run", 2
    resources = groups({"nodes": 1, "devicesPerNode": 2}, {"nodes": 3, "devicesPerNode": 1, "maxNodes": 3})
    rollout = {**ROLLOUT, "maxResponseTokens": 24, "staleness": {"max": most}}
    more = {"steps": 2000, "mode": "Async", "rollout": rollout, "resources": resources, "data": DATA}
    write_slow_reward(tmp_path, 1.5)
    slow = {"reward": {"python": "pace:score"}, "environment": {"pythonPath": [str(tmp_path)]}}
    job = manifest(tmp_path, **{**JOB, **more, **slow, "checkpoint": {"everySteps": 50, "keep": 2}})
    cluster.kill_node(NODES[2])
    cluster.wait_for_loss(NODES[2])
    submission = started(cluster, job, folder, "lost", 4)
    # Trainers are on the large node, engines on the next two: there are no three.
    assert engine_nodes(folder) == {"wanted": 3, "taking_part": 2, "in_use": NODES[:2]}
    want(folder, 2)
    cluster.kill_node(NODES[1])
    wait_for(lambda: named(folder, ENGINE_LOST), "the loss", 200)
    cluster.add_node(NODES[2], 1)
    lost = newest_step(folder)
    wait_for(lambda: newest_step(folder) >= lost + 5, "steps without it", 200)
    wait_for(lambda: named(folder, ENGINE_JOINED), "another one", 200)
    joined = newest_step(folder)
    wait_for(lambda: newest_step(folder) >= joined + 5, "steps with it", 200)
    assert engine_nodes(folder) == {"wanted": 2, "taking_part": 2, "in_use": [NODES[0], NODES[2]]}

    for wrong in (0, 4):
        with pytest.raises(urllib.error.HTTPError) as refused:
            want(folder, wrong)
        assert refused.value.code == 409
        assert "the job allows 1 to 3" in refused.value.read().decode()
    want(folder, 1)
    wait_for(lambda: engine_nodes(folder)["in_use"] == NODES[:1], "one node in use", 200)
    # The event follows what the status says.
    wait_for(lambda: [event["left"] for event in named(folder, ENGINE_LEFT)] == [1], "its event", 60)
    fewer = newest_step(folder)
    wait_for(lambda: newest_step(folder) >= fewer + 5, "steps on one node", 200)
    assert len(named(folder, ENGINE_LOST)) == 1
    cluster.stop(submission)
    cluster.end_of(submission, 200)
    assert cluster.exit_codes()[-1] == ExitCode.STOPPED, cluster.logs(submission)

    records = read_steps(folder)
    assert {record["attempt"] for record in records} == {1}
    assert [record["step"] for record in records] == list(range(len(records)))
    assert all(record["weights"]["verified"] for record in records[1:])
    assert max(record["metrics"].get("rollout/staleness/max", 0) for record in records) in (1, most)
    check_lanes(records[1:], {"trainer": TRAINER, "engine": ENGINE})
    assert "without it, until a new one has started" in cluster.logs(submission)
    code, output = run("audit", folder)
    assert code == 0, output


@unless_all("many engines killed one by one")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["Auto", "Disk"])
def test_engines_are_killed_at_random_instants_and_no_attempt_ends(
    transport: str, cluster: RayCluster, tmp_path: Path
) -> None:
    print(f"RLJOB_SEED={SEED}")
    chosen, folder = random.Random(SEED), tmp_path / "run"
    resources = groups({"nodes": 1, "devicesPerNode": 2}, {"nodes": 2, "devicesPerNode": 1})
    rollout = {**ROLLOUT, "maxResponseTokens": 24, "staleness": {"max": 2}}
    more = {"steps": 100_000, "mode": "Async", "rollout": rollout, "resources": resources, "data": DATA}
    sync = {"weightSync": {"probeEverySteps": 2, "transport": transport}}
    job = manifest(tmp_path, **{**JOB, **more, **sync, "checkpoint": {"everySteps": 50, "keep": 2}})
    submission = started(cluster, job, folder, f"killed-{transport.lower()}", 4)
    for kill in range(1, int(os.environ.get("RLJOB_KILLS", "18")) + 1):
        time.sleep(chosen.uniform(0.5, 3.0))
        if kill % 2:
            # Short, and where the most parties wait for one another.
            begun = len(updates(folder))
            wait_for(lambda count=begun: len(updates(folder)) > count, "a hand-over", 200)
            time.sleep(chosen.uniform(0.0, 0.02))
        os.kill(chosen.choice(engine_pids(cluster)), signal.SIGKILL)
        step = newest_step(folder)
        wait_for(lambda after=step: newest_step(folder) >= after + 3, f"steps after kill {kill}", 200)
        wait_for(lambda: len(named(folder, ENGINE_LOST)) == len(named(folder, ENGINE_JOINED)), "a new engine", 200)
    cluster.stop(submission)
    cluster.end_of(submission, 200)
    assert cluster.exit_codes()[-1] == ExitCode.STOPPED, cluster.logs(submission)
    assert {record["attempt"] for record in read_steps(folder)} == {1}
    code, output = run("audit", folder)
    assert code == 0, output


def updates(folder: Path) -> list[dict[str, Any]]:
    return [one for one in named(folder, "phase") if one.get("phase") == "update_weights"]


def engine_pids(cluster: RayCluster) -> list[int]:
    """Ids of the processes of the engines that live."""
    return sorted(row["pid"] for row in cluster.alive("actors") if row["class_name"] == "EngineActor")


def started(cluster: RayCluster, job: Path, folder: Path, name: str, steps: int) -> str:
    """Submit a job and wait for its first steps."""
    cluster.submit(job, folder, name)
    wait_for(lambda: newest_step(folder) >= steps, "some steps", 200)
    return name


def asked(folder: Path, path: str, method: str) -> Any:
    """Answer of the driver."""
    address = json.loads((folder / ADDRESS_FILE).read_text())
    request = urllib.request.Request(
        f"http://{address['host']}:{address['port']}{path}", method=method, headers={"Authorization": "Bearer secret"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def engine_nodes(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = asked(folder, names.STATUS_PATH, "GET")["engine_nodes"]
    return found


def want(folder: Path, nodes: int) -> None:
    asked(folder, f"{names.ENGINE_NODES_PATH}?wanted={nodes}", "POST")


def named(folder: Path, event: str) -> list[dict[str, Any]]:
    return [one for one in events(folder) if one["event"] == event]


def test_a_machine_alone_is_one_node(tmp_path: Path) -> None:
    resources = groups({"nodes": 1, "devicesPerNode": 1}, {"nodes": 1, "devicesPerNode": 1})
    code, output = run("run", manifest(tmp_path, **JOB, resources=resources), "--output", tmp_path / "run")
    assert code == 2
    assert "spec.resources.trainer.nodes: 1: this machine is one node, and cannot hold nodes of their own" in output
    assert "spec.resources.rollout.nodes" in output


TINY: dict[str, Any] = {
    "steps": 2,
    "model": {
        "random": {
            "config": {
                "model_type": "qwen3",
                "hidden_size": 64,
                "intermediate_size": 128,
                "head_dim": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
            }
        }
    },
    "data": {"synthetic": {"rows": 64}},
    "reward": {"name": "match"},
    "storage": {},
    "checkpoint": {},
}
PUBLISHED = (("qwen3.5-9b-grpo-8xnpu-async.yaml", "Auto"), ("qwen2.5-7b-rlvr-2x8-apart.yaml", "Disk"))


@pytest.mark.parametrize(
    ("name", "transport"),
    [pytest.param(*one, marks=unless_drawn(f"a published set-up: {one[1]}")) for one in PUBLISHED],
)
def test_published_set_ups_with_devices_apart_run_with_a_tiny_model_on_the_cpu(
    name: str, transport: str, tmp_path: Path
) -> None:
    """All but the model, its data and sizes is what the manifest says, the profile of its NPUs too."""
    document = yaml.safe_load((REPOSITORY / "examples" / name).read_text())
    spec = document["spec"]
    spec |= TINY | {
        "resources": {
            "profile": spec["resources"]["profile"],
            "trainer": {"devicesPerNode": 1},
            "rollout": {"devicesPerNode": 1},
        }
    }
    spec["rollout"] |= {
        "promptsPerStep": 4,
        "samplesPerPrompt": 4,
        "maxResponseTokens": 8,
        "tensorParallel": 1,
        "engineArgs": {},
    }
    spec["training"] |= {"tensorParallel": 1, "globalBatchSize": 8}
    spec.pop("evaluation", None)
    spec["weightSync"] = {**spec.get("weightSync", {}), "transport": transport}
    spec["environment"] = {"variables": {"RLJOB_COMPUTE_DEVICE": "cpu"}}
    spec["network"] = {}
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(document))
    code, output = run("run", job, "--output", tmp_path / "run", environment={"RLJOB_COMPUTE_DEVICE": "cpu"})
    assert code == 0, output
    records = read_steps(tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2]
    check_lanes(records, {"trainer": TRAINER, "engine": ENGINE})
    assert all(record["weights"]["verified"] for record in records)
    if transport == "Disk":
        assert list((tmp_path / "run" / "buckets").iterdir()) == [], "what is on its way is nothing at the end"
