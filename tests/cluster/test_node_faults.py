"""Faults on a real node, at random instants: each job ends in the same bits as a run on this machine without any.

`make test` runs one of them or none, by RLJOB_SEED; `make test-faults` all, one at a time and in ten random pairs.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest
import yaml
from dashboard_queries import dashboard_queries
from images import REPOSITORY, worker_image
from jobs import KV_CACHE_BYTES, final_state, run
from kube import wait_until
from kueue_process import FLAVOR_LABEL, running_kueue
from node_cluster import NODE
from node_faults import FAULTS, HARMLESS, HOSTS_KILLED, OF_EPISODES, PREEMPTED, QUEUE_CPUS, settle
from node_jobs import START_SECONDS, NodeJob
from support.samples import ALL, SEED, unless_drawn
from support.trace_rules import lanes_of, read_strictly
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
    "pods.imagePullPolicy=Always",
)
RESTART_PANELS = ("rljob-fleet: Restarts A", "rljob-job: Restarts and lost work A")
ENVIRONMENT_PANELS = ("rljob-job: Environments A", "rljob-job: Failures of environments A")
EPISODES = ("model", "data", "episodes", "algorithm", "rollout", "training", "evaluation")
"""Sections that make the node's job one of examples/frozen-lake.yaml; its reward is that of any with environments."""
CHOSEN = [(random.Random(SEED).choice(["engine killed", "head pod deleted", PREEMPTED]),)]
PAIRS = random.Random(FIXED_SEED).sample(list(combinations(FAULTS, 2)), 10)
CALM_SECONDS = 1200.0
"""A minute where nothing runs beside it."""
WITH_EPISODES = (HOSTS_KILLED,) * 3, (HOSTS_KILLED, "engine killed")
CASES = [*((name,) for name in FAULTS), *PAIRS, *WITH_EPISODES] if ALL else CHOSEN
Calm = Callable[[tuple[str, ...]], dict[str, str]]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """State at the end of a run with settings that nothing happened to: without a cluster, by `rljob run`."""
    known: dict[tuple[str, ...], dict[str, str]] = {}

    def state(settings: tuple[str, ...]) -> dict[str, str]:
        if settings not in known:
            folder = tmp_path_factory.mktemp("calm") / "run"
            given = [f"--set=spec.{setting}" for setting in (*SETTINGS, *settings)]
            quickstart = REPOSITORY / "examples" / "quickstart.yaml"
            code, output = run("run", quickstart, *given, "--output", folder, seconds=CALM_SECONDS)
            assert code == 0, output
            known[settings] = final_state(folder)
        return known[settings]

    return state


def with_episodes() -> tuple[str, ...]:
    """Settings that make a job the one of examples/frozen-lake.yaml, with fewer episodes a step."""
    spec = yaml.safe_load((REPOSITORY / "examples" / "frozen-lake.yaml").read_text())["spec"]
    spec["rollout"] |= {"kvCacheBytes": KV_CACHE_BYTES, "promptsPerStep": 4}
    # Its record would be of no step.
    del spec["evaluation"]["atStart"]
    return "reward={name: environment}", *(f"{name}={json.dumps(spec[name])}" for name in EPISODES)


@pytest.fixture(scope="module", autouse=True)
def registry(system: WholeSystem) -> None:
    """The registry that the node pulls the worker's image from."""
    _, archive = worker_image()
    command = [sys.executable, str(REPOSITORY / "tests" / "cluster" / "registry.py"), str(archive)]
    system.cluster.keep("registry", command, lambda: system.cluster.http_ok(80, "/v2/"))


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
    calm: Calm,
    system: WholeSystem,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    queued = request.getfixturevalue("queue") if PREEMPTED in faults else ()
    episodes = with_episodes() if HOSTS_KILLED in faults else ()
    job = NodeJob(system, "fault", *SETTINGS, *queued, *episodes).create()
    try:
        told = go_through(faults, job)
        status = job.status()
        with capsys.disabled():
            print(f"\n  {told}, {status.get('restarts', 0)} restarts")
        assert final_state(job.run_folder) == calm(episodes)
        if set(faults) <= HARMLESS:
            assert status.get("restarts", 0) == 0
        check_the_metrics(job, system)
        if episodes:
            check_the_environments(job, system)
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
        (FAULTS | OF_EPISODES)[name](job)
        settle(job)
    if len(faults) == 1:
        check_the_trace(job, set(faults) <= HARMLESS)
    job.wait("Succeeded")
    return f"{'; '.join(told)}: done after {time.monotonic() - began:.0f} s"


def check_the_trace(job: NodeJob, harmless: bool) -> None:
    """`kubectl rljob trace` of a job that runs has its waits, pulls, attempts and phases, on one clock."""
    first = 0 if harmless else 1

    def recorded() -> bool:
        newest = job.status()["attempts"][-1]
        own = any(record["attempt"] == newest["number"] for record in job.records())
        return own and newest["number"] >= first and "endTime" not in newest

    assert wait_until(recorded, START_SECONDS, 0.25), job.describe()
    file = job.system.folder / f"{job.name}.trace.json"
    said = job.system.cluster.kubectl("rljob", "trace", job.name, "-o", str(file))
    status = job.status()
    lanes = lanes_of(read_strictly(file.read_text()))
    of_cluster = {name: slices for (process, name), slices in lanes.items() if process == 0}
    attempts = [one["name"] for one in of_cluster["job"]]
    expected = ["queued and starting", *_alternating(len(status["attempts"]))]
    assert attempts == expected, (attempts, said)
    pods = {name: {one["name"] for one in slices} for name, slices in of_cluster.items() if job.name in name}
    assert {"waits for a node", "image pull"} <= set.union(*pods.values()), pods
    if status["phase"] != "Running":
        return
    phases = [one for (process, name), slices in lanes.items() if process and name == "phases" for one in slices]
    assert {"rollout", "actor_train", "update_weights"} <= {one["name"] for one in phases}, said
    begun, last = of_cluster["job"][1], of_cluster["job"][-1]
    assert all(begun["ts"] <= one["ts"] <= last["ts"] + last["dur"] for one in phases)


def _alternating(attempts: int) -> list[str]:
    """Names of slices: attempts with the restarts between them."""
    return [name for number in range(attempts) for name in ("restart", f"attempt {number}")][1:]


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


def check_the_environments(job: NodeJob, system: WholeSystem) -> None:
    """Prometheus has the time in which environments were waited for, and the lost hosts, as the records have them."""
    waited = sum(record["phases"].get("env_wait", 0.0) for record in job.records())
    name = "rollout/episodes/failures/infra"
    lost = sum(record["metrics"].get(name, 0) for record in job.records())
    assert min(waited, lost) > 0
    found = system.value(f'sum(rljob_phase_seconds_sum{{rljob="{job.name}", phase="env_wait"}})')
    assert found == pytest.approx(waited, rel=1e-3)
    assert system.value(f'sum(rljob_environment_failures_total{{rljob="{job.name}", class="infra"}})') == lost
    queries = dashboard_queries("default", job.name, "10m")
    assert all(system.query(queries[panel]) for panel in ENVIRONMENT_PANELS)


def orphans(job: NodeJob) -> list[str]:
    """Objects left of a job that was deleted."""
    kinds = ("RayCluster", "Secret", "NetworkPolicy", "Pod", "Service")
    return [
        f"{kind} {item['metadata']['name']}"
        for kind in kinds
        for item in job.kube.list(kind, "default")
        if job.name in item["metadata"]["name"]
    ]
