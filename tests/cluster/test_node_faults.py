"""Faults on a real node, at random instants: each job ends in the same bits as a run on this machine without any.

`make test` runs one of them or none, by RLJOB_SEED; `make test-faults` all, one at a time and in ten random pairs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import combinations

import pytest
from dashboard_queries import dashboard_queries
from images import REPOSITORY
from jobs import final_state, run
from kube import wait_until
from kueue_process import FLAVOR_LABEL, running_kueue
from node_cluster import NODE
from node_faults import FAULTS, HARMLESS, PREEMPTED, QUEUE_CPUS, settle
from node_jobs import NodeJob
from support.samples import ALL, SEED, unless_drawn
from whole_system import WholeSystem

from rljob_worker.records.event_lines import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.timeout(1800), unless_drawn("a node: faults")]

STEPS = 100 if ALL else 50
EVERY = 5
FIXED_SEED = 20261122
SETTINGS = (
    f"steps={STEPS}",
    "resources.threadsPerDevice=1",  # sums of floating-point numbers depend on how many threads share them
    f"checkpoint.everySteps={EVERY}",
    "failurePolicy.backoffSeconds=0.5",
    "failurePolicy.maxRestarts=6",
)
RESTART_PANELS = ("rljob-fleet: Restarts A", "rljob-job: Restarts and lost work A")
CHOSEN = [(random.Random(SEED).choice(["engine killed", "head pod deleted", PREEMPTED]),)]
PAIRS = random.Random(FIXED_SEED).sample(list(combinations(FAULTS, 2)), 10)
CASES = [*((name,) for name in FAULTS), *PAIRS] if ALL else CHOSEN


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """State at the end of a run that nothing happened to: without a cluster, by `rljob run`."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    settings = [f"--set=spec.{setting}" for setting in SETTINGS]
    code, output = run("run", REPOSITORY / "examples" / "quickstart.yaml", *settings, "--output", folder)
    assert code == 0, output
    return final_state(folder)


@pytest.fixture(scope="module")
def queue(system: WholeSystem) -> Iterator[tuple[str, ...]]:
    """Settings of a job in a queue of Kueue's, which has room for one."""
    system.kube.patch("Node", None, NODE, {"metadata": {"labels": {FLAVOR_LABEL: "a2"}}})
    with running_kueue(system.cluster) as kueue:
        kueue.queue("default", 0, QUEUE_CPUS)
        yield "scheduling.system=Kueue", "scheduling.queue=rl"


@pytest.mark.parametrize("faults", CASES, ids=" + ".join)
def test_it_ends_in_the_same_bits(
    faults: tuple[str, ...],
    calm: dict[str, str],
    system: WholeSystem,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    queued = request.getfixturevalue("queue") if PREEMPTED in faults else ()
    job = NodeJob(system, "fault", *SETTINGS, *queued).create()
    try:
        told = go_through(faults, job)
        status = job.status()
        with capsys.disabled():
            print(f"\n  {told}, {status.get('restarts', 0)} restarts")
        assert final_state(job.run_folder) == calm
        if set(faults) <= HARMLESS:
            assert status.get("restarts", 0) == 0
        check_the_metrics(job, system)
        if status.get("restarts"):
            queries = dashboard_queries("default", job.name, "10m")
            assert all(system.query(queries[panel]) for panel in RESTART_PANELS)
    finally:
        # Also where it failed: what is left would slow the next job down until it fails too.
        job.delete()
    assert wait_until(lambda: not orphans(job), 60, 0.5), orphans(job)


def go_through(faults: tuple[str, ...], job: NodeJob) -> str:
    """Do all that to a running job and wait for its end; returns what was done, when, and how long it took."""
    chance = random.Random(f"{FIXED_SEED} {faults}")
    began = time.monotonic()
    told = []
    instants = sorted(chance.uniform(0.1, 0.6) for _ in faults)
    # The job goes on, to its end maybe, while the API server is away: that fault comes last.
    for name, instant in zip(sorted(faults, key=lambda name: name == "API server stopped"), instants):
        assert last_step(job) < STEPS, f"the job ended before it came to: {name}"
        job.wait_step(max(int(instant * STEPS), last_step(job) + 1))
        time.sleep(chance.uniform(0, 0.3))
        told.append(f"{name} at step {last_step(job)} in {phase_alive(job)}")
        FAULTS[name](job)
        settle(job)
    job.wait("Succeeded")
    return f"{'; '.join(told)}: done after {time.monotonic() - began:.0f} s"


def last_step(job: NodeJob) -> int:
    records = job.records()
    return int(records[-1]["step"]) if records else 0


def phase_alive(job: NodeJob) -> str:
    """The phase that the events file says has begun last: proof of what was alive."""
    phases = [event.get("phase") for event in read_events(job.run_folder)]
    return next((phase for phase in reversed(phases) if phase), "start")


def check_the_metrics(job: NodeJob, system: WholeSystem) -> None:
    """Every executed step is counted once, steps that were run again as lost work."""
    records = job.records()
    wanted = {"rljob_step_seconds_count": len(records), "rljob_lost_steps_total": sum(r["rerun"] for r in records)}
    assert sorted({record["step"] for record in records}) == list(range(1, STEPS + 1))

    def counted() -> dict[str, float | None]:
        return {series: system.value(f'sum({series}{{rljob="{job.name}"}})') for series in wanted}

    assert wait_until(lambda: counted() == wanted, 30, 0.5), (wanted, counted())


def orphans(job: NodeJob) -> list[str]:
    """Objects left of a job that was deleted."""
    kinds = ("RayCluster", "Secret", "NetworkPolicy", "Pod", "Service")
    return [
        f"{kind} {item['metadata']['name']}"
        for kind in kinds
        for item in job.kube.list(kind, "default")
        if job.name in item["metadata"]["name"]
    ]
