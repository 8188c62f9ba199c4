"""The Secret, the NetworkPolicy and what is posted to Ray."""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import shlex
import signal
import string
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from render_cases import EXAMPLES, SETTINGS, UID, base, view

from rljob_api import RLJob
from rljob_api.validation import load_manifest
from rljob_api.wire.run_status import RunOutcome
from rljob_operator.render import (
    RenderError,
    check_renderable,
    driver_manifest,
    policy_digest,
    policy_to_apply,
    render_claim,
    render_cluster,
    render_policy,
    render_secret,
    run_folder,
    submission,
)
from rljob_worker.records.summary import summarize, write_summary


def unpacked(body: dict[str, Any]) -> RLJob:
    packed = body["runtime_env"]["env_vars"]["RLJOB_MANIFEST"]
    return load_manifest(json.loads(gzip.decompress(base64.b64decode(packed))))


def test_secret() -> None:
    secret = render_secret(base(), "tökén")
    assert secret["metadata"]["name"] == "base-driver"
    assert base64.b64decode(secret["data"]["token"]).decode() == "tökén"
    owner = secret["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (
        "RLJob",
        UID,
        True,
        False,
    )


def allowed_ports(rule: dict[str, Any]) -> set[int]:
    ports = rule.get("ports")
    if ports is None:
        return set(range(1, 65536))
    return {port for entry in ports for port in range(entry["port"], entry.get("endPort", entry["port"]) + 1)}


def test_policy_closes_head_and_workers() -> None:
    policy = render_policy(base(), SETTINGS)
    assert policy is not None
    assert policy["spec"]["podSelector"] == {"matchLabels": {"ray.io/cluster": "base"}}, "KubeRay's label of both"
    own, operator = policy["spec"]["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": {"rljob.dev/job": "base"}}}]}
    assert allowed_ports(operator) == {8265, 8300}
    assert operator["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "rljob-system"}
    anywhere = render_policy(base(), replace(SETTINGS, operator_namespace=""))
    assert anywhere is not None
    assert anywhere["spec"]["ingress"][1]["from"][0]["namespaceSelector"] == {}
    assert render_policy(base("network.networkPolicy=false"), SETTINGS) is None


def test_policy_with_workers_in_the_nodes_network() -> None:
    policy = render_policy(base("network.hostNetwork=true"), SETTINGS)
    assert policy is not None
    everyone = policy["spec"]["ingress"][2]
    assert "from" not in everyone
    assert set(range(1, 65536)) - allowed_ports(everyone) == {8265, 8300, 10001}


def test_policy_tells_with_what_spec_it_was_rendered() -> None:
    policies = [
        render_policy(base(), SETTINGS),
        render_policy(base("network.hostNetwork=true"), SETTINGS),
        render_policy(base(), replace(SETTINGS, operator_namespace="elsewhere")),
        render_policy(base(), replace(SETTINGS, operator_pod_labels={"app": "other"})),
        policy_to_apply(base("network.networkPolicy=false"), SETTINGS, there=True),
    ]
    digests = {policy_digest(policy) for policy in policies if policy is not None}
    assert len(digests) == len(policies)
    again = render_policy(base("steps=7"), SETTINGS)
    assert again is not None
    assert policy_digest(again) in digests, "what is no part of it does not change it"
    assert policy_digest({"metadata": {}}) == ""


def test_policy_that_is_no_longer_wanted_selects_no_pod() -> None:
    off = base("network.networkPolicy=false")
    assert policy_to_apply(off, SETTINGS, there=False) is None
    policy = policy_to_apply(off, SETTINGS, there=True)
    assert policy is not None
    assert policy["spec"]["podSelector"]["matchLabels"] == {"ray.io/cluster": "base", "ray.io/node-type": "none"}
    assert policy["spec"]["ingress"] == [], "it opens nothing that another policy closes"
    for there in (False, True):
        assert policy_to_apply(base(), SETTINGS, there) == render_policy(base(), SETTINGS)


def test_submission() -> None:
    body = submission(base(), 3, SETTINGS)
    assert body["submission_id"] == f"rljob-{UID}-3"
    assert body["entrypoint_num_cpus"] == 0
    assert body["entrypoint"] == (
        "trap : TERM; printenv RLJOB_MANIFEST | base64 -d | gunzip | "
        "rljob run - --output /storage/runs/team/base-6d0f7a1e --resume auto && "
        '{ grep -qs \'"outcome": "Succeeded"\' /storage/runs/team/base-6d0f7a1e/summary.json || '
        "{ echo 'rljob: the driver ended before it had written that the job is done'; exit 1; }; }"
    )
    assert all(isinstance(value, str) for value in body["metadata"].values())
    assert body == submission(base(), 3, SETTINGS), "the same job gives the same bytes"


def test_manifest_that_the_driver_gets() -> None:
    job = base(
        "data.labelKey=null",
        "reward={python: a:b}",
        "model={random: {config: {model_type: qwen3}}}",
        "records.tensorboard=false",
    )
    assert job.spec is not None
    found = unpacked(submission(job, 0, SETTINGS))
    assert (found.metadata.name, found.metadata.namespace, found.metadata.uid) == ("base", "team", UID)
    spec = found.spec
    assert spec.checkpoint.path is None
    assert (spec.records.http_port, spec.records.http_host, spec.records.linger_seconds) == (8300, "0.0.0.0", 300.0)
    changed = {"records", "checkpoint", "resources"}
    assert spec.model_dump(exclude=changed) == job.spec.model_dump(exclude=changed)
    assert spec.data.label_key is None, "a null that replaces a default is handed on"
    assert spec.resources.threads_per_device == 1
    assert unpacked(submission(base("records.lingerSeconds=5"), 0, SETTINGS)).spec.records.linger_seconds == 5


def test_a_driver_gets_the_addresses_of_its_sandboxes_in_place_of_the_pool() -> None:
    reward = "reward={name: code, args: {kind: Calls, tests: tests}}"
    job = base(reward, "sandbox={isolation: Service, service: {warmPool: {name: pool, count: 2}, concurrency: 7}}")
    addresses = ["http://10.0.0.1:8080", "http://[2001:db8::1]:8080"]
    found = unpacked(submission(job, 0, SETTINGS, addresses)).spec.sandbox
    assert found is not None
    assert found.service is not None
    assert (found.service.urls, found.service.warm_pool, found.service.concurrency) == (addresses, None, 7)
    assert job.spec is not None
    assert unpacked(submission(job, 0, SETTINGS)).spec.sandbox is not None, "its size is known before the claims are"
    assert unpacked(submission(base(), 0, SETTINGS)).spec.sandbox is None


def test_a_pool_is_refused_where_the_operator_may_make_no_claims() -> None:
    reward = "reward={name: code, args: {kind: Calls, tests: tests}}"
    job = base(reward, "sandbox={isolation: Service, service: {warmPool: {name: pool}}}")
    with pytest.raises(RenderError, match=r"needs settings\.sandboxClaims: true of its chart") as error:
        render_cluster(job, replace(SETTINGS, sandbox_claims=False))
    assert error.value.field == "spec.sandbox.service.warmPool"
    for known in (True, None):
        assert render_cluster(job, replace(SETTINGS, sandbox_claims=known))
    assert render_cluster(base(), replace(SETTINGS, sandbox_claims=False))


def test_a_claim_asks_for_a_sandbox_of_the_pool_and_sets_nothing_of_it() -> None:
    reward = "reward={name: code, args: {kind: Calls, tests: tests}}"
    job = base(reward, "sandbox={isolation: Service, service: {warmPool: {name: pool}}}")
    claim = render_claim(job, "base-sandbox-0")
    assert claim["spec"] == {"warmPoolRef": {"name": "pool"}}, "all else is made cold"
    assert (claim["metadata"]["name"], claim["metadata"]["namespace"]) == ("base-sandbox-0", "team")
    assert claim["metadata"]["labels"]["rljob.dev/job"] == "base"
    assert claim["metadata"]["ownerReferences"][0]["uid"] == UID


@pytest.mark.parametrize(
    ("settings", "threads"),
    [
        (["resources.profile=cpu", "resources.worker.cpu='32'"], 4),
        (["resources.profile=cpu", "resources.worker.cpu=500m"], 1),
        (["resources.profile=cuda"], 12),
        (["resources.tuning.ompNumThreads=7"], 7),
        (["resources.threadsPerDevice=3", "resources.tuning.ompNumThreads=7"], 3),
    ],
)
def test_threads_are_a_share_of_the_pods_cores(settings: list[str], threads: int) -> None:
    assert unpacked(submission(base(*settings), 0, SETTINGS)).spec.resources.threads_per_device == threads


def test_entry_point_in_a_shell(tmp_path: Path) -> None:
    folder = '/storage/runs/it\'s $(touch pwned); `x` "q"'
    job = base("checkpoint.path=PLACEHOLDER".replace("PLACEHOLDER", json.dumps(folder)))
    body = submission(job, 0, SETTINGS)
    fake = tmp_path / "rljob"
    fake.write_text('#!/bin/sh\ncat > got\nprintf "%s\\n" "$@" > arguments\nexit 75\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **body["runtime_env"]["env_vars"]}
    run = subprocess.run(["/bin/sh", "-c", body["entrypoint"]], env=environment, cwd=tmp_path, timeout=20)
    assert run.returncode == 75, "the driver's exit code is the command's"
    assert (tmp_path / "arguments").read_text().splitlines() == [
        "run", "-", "--output", f"{folder}/team/base-6d0f7a1e", "--resume", "auto",
    ]  # fmt: skip
    assert not (tmp_path / "pwned").exists()
    assert load_manifest((tmp_path / "got").read_text()).metadata.uid == UID
    assert run_folder(job) in shlex.split(body["entrypoint"])


@pytest.mark.parametrize(("outcome", "code"), [(None, 1), (RunOutcome.STOPPED, 1), (RunOutcome.SUCCEEDED, 0)])
def test_an_end_without_a_word_is_a_failure(outcome: RunOutcome | None, code: int, tmp_path: Path) -> None:
    folder = f"{tmp_path}/it's $(touch pwned)"
    body = submission(base(f"checkpoint.path={json.dumps(folder)}"), 0, SETTINGS)
    fake = tmp_path / "rljob"
    fake.write_text('#!/bin/sh\nmkdir -p "$4"\ncp summary.json "$4" 2> /dev/null\nexit 0\n')
    fake.chmod(0o755)
    if outcome is not None:
        write_summary(tmp_path, summarize([], outcome, "12 steps", 1))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **body["runtime_env"]["env_vars"]}
    shell = subprocess.run(
        body["entrypoint"], shell=True, env=environment, cwd=tmp_path, timeout=20, capture_output=True, text=True
    )
    assert shell.returncode == code
    assert ("before it had written that the job is done" in shell.stdout) == (code == 1)
    assert not (tmp_path / "pwned").exists()


def test_manifest_that_does_not_fit() -> None:
    noise = random.Random(0)
    values = {f"V{i}": "".join(noise.choices(string.printable, k=4000)) for i in range(60)}
    job = base(f"environment.variables={json.dumps(values)}")
    with pytest.raises(RenderError, match=r"98304 fit; the largest are spec\.environment \(\d+ bytes\)") as error:
        render_cluster(job, SETTINGS)
    assert error.value.field == "spec.environment"
    assert check_renderable(job, SETTINGS).startswith("spec.environment: the manifest has")
    fits = dict.fromkeys(values, "x" * 4000)
    assert check_renderable(base(f"environment.variables={json.dumps(fits)}"), SETTINGS) == ""


def test_the_shell_takes_the_drivers_exit_status_when_ray_stops_the_job(tmp_path: Path) -> None:
    program = tmp_path / "rljob"
    program.write_text("#!/bin/sh\ntrap 'sleep 0.5; exit 75' TERM\necho up\nwhile :; do sleep 0.1; done\n")
    program.chmod(0o755)
    body = submission(base(), 0, SETTINGS)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **body["runtime_env"]["env_vars"]}
    # As Ray starts it, and stops it: the shell and all that it has started, each by its pid.
    shell = subprocess.Popen(
        body["entrypoint"], shell=True, start_new_session=True, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert shell.stdout is not None
    assert shell.stdout.readline() == "up\n"
    os.killpg(shell.pid, signal.SIGTERM)
    assert shell.wait(10) == 75


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_driver_gets_what_differs_from_the_defaults_and_reads_the_same_spec(path: Path) -> None:
    """A driver of the version before does not know the fields of this one."""
    job = view(path)
    given = driver_manifest(job, SETTINGS)
    again = load_manifest(given).spec
    own = {"records", "checkpoint", "resources", "timeouts"}
    assert job.spec is not None
    assert again.model_dump(exclude=own) == job.spec.model_dump(exclude=own)
    assert not {"seed", "mode", "hccl", "suspend"} & given["spec"].keys() - job.spec.model_fields_set
