"""Checks that take processes: `--deep` on the CPU, and all nodes of a real Ray cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from doctor_cases import node
from ray.cluster_utils import Cluster
from support.samples import unless_drawn

from rljob_api.spec import Profile
from rljob_api.wanted import Wanted
from rljob_worker.doctor import deep, deep_steps
from rljob_worker.doctor.findings import Status
from rljob_worker.doctor.nodes import look_everywhere
from rljob_worker.upstream.ray_node import without_helpers

pytestmark = pytest.mark.slow


@unless_drawn("doctor --deep on CPUs")
def test_deep_uses_what_a_job_uses() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rljob_worker.cli.main", "doctor", "--deep", "--json"],
        capture_output=True,
        text=True,
        timeout=500,
    )
    report = json.loads(done.stdout)
    by_name = {finding["name"]: finding for finding in report["findings"]}
    steps = ["memory given back and taken again", "a tensor shared between two processes",
             "all-reduce over the visible devices", "memory after vLLM's sleep"]  # fmt: skip
    assert [by_name[name]["status"] for name in steps] == ["ok"] * 4, [by_name[name] for name in steps]
    assert by_name["captured graphs over a sleep and new weights"]["status"] == "not applicable"
    assert by_name[steps[0]]["found"].startswith("256 MiB of 256 MiB given back")
    assert by_name[steps[2]]["found"].startswith("256 MiB over 2 in ")
    assert "KiB given back" in by_name[steps[3]]["found"]
    assert not by_name[steps[3]]["found"].startswith("0 KiB")
    assert done.returncode == 0


@unless_drawn("a step of the doctor that dies")
def test_a_step_that_dies_is_a_problem_and_not_the_end() -> None:
    """A device that this version or machine does not have: every step ends, and each says so."""
    facts = node(kind="npu", device_files=(0,), trainer=node().trainer)
    found = deep.deep_findings(facts, None)
    assert len(found) == 6
    assert found[-1].status is Status.WARNING, "only jobs with graphs need them"
    assert found[0].status is Status.PROBLEM
    assert "exit code" in found[0].found
    assert found[0].fix


@unless_drawn("a library's last word in a step of the doctor")
def test_a_librarys_last_word_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = "import atexit, sys\natexit.register(lambda: print('[W] still 1 communicator', file=sys.stderr))\n"
    (tmp_path / "sitecustomize.py").write_text(late)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(deep_steps, "BYTES", 1 << 20)
    found = deep_steps.collective({"kind": "cpu", "devices": ["0", "1"]})
    assert found.status is Status.OK, found
    wrong = deep_steps.collective({"kind": "npu", "devices": ["0", "1"]})
    assert wrong.status is Status.PROBLEM
    assert "rank 0: " in wrong.found


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with without_helpers():
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        made.add_node(num_cpus=1)
        made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def test_every_node_of_a_cluster_is_looked_at(cluster: Cluster, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    wanted = Wanted(profile=Profile.CPU, nodes=2, devices=1, runs=str(runs / "later"))
    facts, together = look_everywhere(wanted)
    assert len(facts) == 2, "the head holds no devices"
    named = {finding.name: finding for finding in together}
    assert named["nodes"].status is Status.OK
    assert named["image"].status is Status.OK
    assert named["run folder on all nodes"].status is Status.OK
    assert list(tmp_path.iterdir()) == [], "the marker is gone"
    assert all(f.runs is not None and f.runs.base == str(tmp_path) for f in facts)
    gcs = cluster.address.rpartition(":")[2]
    assert {where.rpartition(":")[2]: bool(why) for where, why in facts[0].unreachable.items()} == {
        gcs: False,
        "8265": True,
    }

    command = [sys.executable, "-m", "rljob_worker.cli.main", "doctor", "--ray", cluster.address, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    report = json.loads(done.stdout)
    assert (report["scope"], len(report["nodes"])) == ("cluster", 2)
    assert [f["node"] for f in report["findings"] if f["name"] == "python"] == report["nodes"]
    assert [f["status"] for f in report["findings"] if f["name"] == "image" and f["node"] is None] == ["ok"]
