"""Promises of CONTRIBUTING.md: a profile, an algorithm and a policy are one file, a failure reason is two lines.

The packages are copied, a file is added, and all of them take it: types, CRD, command line and rendering.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from manifests import manifest
from support.samples import unless_drawn

from rljob_api.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[2]
PACKAGES = ("crds/rljob_api", "operator/rljob_operator", "worker/rljob_worker", "helm")

PROFILE = '''
"""A card in a cluster of our own."""

from dataclasses import replace

from rljob_api.profiles.ascend_a2 import PROFILE as ASCEND_A2
from rljob_api.profiles.base import MindCluster

PROFILE = replace(
    ASCEND_A2,
    name="atlas-next",
    order=35,
    chip="910C",
    resource_name="example.com/next",
    devices_per_node=4,
    node_selector={"card": "next"},
    init_containers_share_devices=False,
    mind_cluster=MindCluster(super_pods=True),
)
'''
ALGORITHM = '''
"""Each sample against the mean of the others."""

from torch import Tensor

from rljob_api.spec import AlgorithmSpec
from rljob_worker.algorithms.losses import ppo_clip
from rljob_worker.algorithms.registry import Algorithm, register


def leave_one_out(rewards: Tensor, spec: AlgorithmSpec) -> Tensor:
    size = rewards.shape[1]
    return (rewards - rewards.mean(dim=1, keepdim=True)) * size / (size - 1)


register(
    Algorithm(
        name="another",
        min_group_size=3,
        requires_on_policy=True,
        advantages=leave_one_out,
        token_loss=ppo_clip,
    )
)
'''
RENDER = """
import json, sys
from rljob_api.validation import load_manifest
from rljob_operator.render import RenderSettings, check_renderable, render_cluster, role_environment
from rljob_operator.state.observed import JobView

job = load_manifest(json.loads(sys.argv[1]))
view = JobView("team", job.metadata.name, "6d0f7a1e-31c5-4a8e-9b0d-000000000001", 1, 0.0, spec=job.spec)
settings = RenderSettings(worker_image="r.example/worker:1")
problem = check_renderable(view, settings)
print(json.dumps({"problem": problem} if problem else {
    "cluster": render_cluster(view, settings), "rollout": role_environment(job.spec, "rollout")
}))
"""


POLICY = '''
"""A step begins one group at a time."""

from collections.abc import Sequence

from rljob_worker.flow import Group
from rljob_worker.rollouts.policies.whole import WholePolicy
from rljob_worker.rollouts.step import Step


class OneAtATimePolicy(WholePolicy):
    """Groups one after the other."""

    def room(self, step: Step, groups: Sequence[Group]) -> int:
        """One."""
        return min(1, super().room(step, groups))
'''
ENVIRONMENT = '''
"""Say the word that was shown."""

from collections.abc import Mapping
from random import Random

from rljob_api.base import ApiModel
from rljob_worker.environments.base import BuiltInEnvironment


class EchoSettings(ApiModel):
    """Arguments of Echo."""

    words: int = 8
    """Words that are drawn from."""


class Echo:
    """Reward 1 for the word that was shown."""

    def __init__(self, settings: EchoSettings) -> None:
        self._settings = settings

    def reset(self, *, seed: int, options: Mapping[str, object]) -> tuple[str, dict[str, float]]:
        self._word = f"word-{Random(seed).randrange(self._settings.words)}"
        return self._word, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, float]]:
        return "", float(action.strip() == self._word), True, False, {}


ENVIRONMENT = BuiltInEnvironment(EchoSettings, Echo)
'''
BACKEND = '''
"""A backend that names what it was asked to build."""

from rljob_worker.trainer.backend import TrainerBackend


def build_backend(spec, device, *, rank, world_size, store, model_folder, stop, notices) -> TrainerBackend:
    return f"{spec.training.backend} {rank} of {world_size}"
'''
BUILT = """
import json, sys
from rljob_api.validation import load_manifest
from rljob_worker.trainer.build import builder

spec = load_manifest(json.loads(sys.argv[1])).spec
print(builder(spec)(spec, None, rank=1, world_size=2, store="", model_folder=None, stop=None, notices=None))
"""
ROUTE = '''
"""Buckets by post: a slot is copied into the members' common memory."""

from rljob_worker.weightsync.routes import NetworkRoute


class PostRoute(NetworkRoute):
    """A route that says which version a member joins."""

    def carrier(self, place, version, deadline):
        return f"carrier of version {version}"
'''
TAKEN = """
import json, sys
from pathlib import Path
from rljob_api.validation import load_manifest
from rljob_worker.weightsync.meeting import NetworkMeeting
from rljob_worker.weightsync.routes import network_route, route_from

transport = load_manifest(json.loads(sys.argv[1])).spec.weight_sync.transport
made = network_route(transport).made(NetworkMeeting("h", 1, "h", "s", 1, 1, 1.0), Path("/run"))
again = route_from(made.at("other").to_json())
print(type(again).__name__, again.meeting.address, again.carrier(None, 7, 0.0))
"""
CHOSEN = """
import json, sys
from rljob_api.validation import load_manifest
from rljob_worker.rollouts.policies import policy_of

policy = policy_of(load_manifest(json.loads(sys.argv[1])).spec)
print(type(policy).__name__)
"""
SAID = """
import json, sys
from rljob_api.spec import FailureReason
from rljob_operator.state.causes import Cause
from rljob_operator.state.reasons import FACTS, said_of, severity

missing = [reason.name for reason in FailureReason if reason not in FACTS]
order = sorted(FailureReason, key=lambda reason: severity(Cause(reason, "")))
print(json.dumps({"missing": missing, "order": order, "said": said_of("FabricLost", None)}))
"""


class Copy:
    """The packages in a folder of their own, as they were compiled."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in PACKAGES:
            # Another process of the tests may be writing bytecode: under a name of its own, which is gone when it has.
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("*.pyc.*"))
        (root / "docs/zh").mkdir(parents=True)
        for name in ("crds/rljob.dev_rljobs.yaml", "docs/reference.md", "docs/zh/reference.md"):
            shutil.copy(ROOT / name, root / name)

    def add(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(exist_ok=True)
        (self.root / path).write_text(text.lstrip(), encoding="utf-8")

    def insert(self, path: str, line: str, before: str) -> None:
        """Add a line to a file, before the one that begins with this text."""
        lines = (self.root / path).read_text(encoding="utf-8").splitlines(keepends=True)
        (place,) = [number for number, one in enumerate(lines) if one.startswith(before)]
        (self.root / path).write_text("".join([*lines[:place], f"{line}\n", *lines[place:]]), encoding="utf-8")

    def run(self, *arguments: str, status: int = 0) -> str:
        path = os.pathsep.join(str(self.root / name) for name in ("crds", "operator", "worker"))
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def validate(self, document: dict, status: int = 0) -> str:
        (self.root / "job.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
        return self.run("-m", "rljob_worker.cli.main", "validate", "job.yaml", status=status)

    def spec_schema(self) -> dict:
        crd = yaml.safe_load((self.root / "crds/rljob.dev_rljobs.yaml").read_text(encoding="utf-8"))
        return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]

    def rendered(self, document: dict) -> dict:
        return json.loads(self.run("-c", RENDER, json.dumps(document)).splitlines()[-1])


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def on(profile: str, **resources: object) -> dict:
    document = manifest()
    document["spec"]["resources"] = {"profile": profile, **resources}
    document["spec"]["checkpoint"] = {"path": "/storage/runs"}
    document["spec"]["storage"] = {"volumes": [{"name": "storage", "mountPath": "/storage", "claim": "rl"}]}
    return document


@unless_drawn("a profile is added")
def test_a_profile_is_one_file(copy: Copy) -> None:
    job = on("atlas-next", devicesPerNode=4)
    assert "atlas-next" in copy.validate(job, status=2)

    copy.add("crds/rljob_api/profiles/atlas_next.py", PROFILE)
    copy.validate(job)
    copy.run("-m", "rljob_api.generate")
    copy.run("helm/chart_readme.py")
    names = ["ascend-a2", "ascend-a3", "ascend-950", "atlas-next", "cce", "hami", "cuda", "cpu"]
    assert copy.spec_schema()["resources"]["properties"]["profile"]["enum"] == names
    values = json.loads((copy.root / "helm/rljob/values.schema.json").read_text(encoding="utf-8"))
    assert values["properties"]["jobs"]["properties"]["images"]["propertyNames"]["enum"] == names

    found = copy.rendered(job)
    pod = found["cluster"]["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    assert pod["nodeSelector"] == {"card": "next"}
    assert pod["containers"][0]["resources"]["limits"]["example.com/next"] == "4"
    assert "example.com/next" not in pod["initContainers"][0]["resources"]["limits"]
    assert found["rollout"]["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert "atlas-next have fewer" in copy.validate(on("atlas-next", devicesPerNode=8), status=2)
    kinds = "from rljob_worker.devices.kinds import kind_of; print(kind_of('atlas-next').name)"
    assert copy.run("-c", kinds).split()[-1] == "npu"


def test_a_profile_in_a_file_of_another_name_is_refused(copy: Copy) -> None:
    copy.add("crds/rljob_api/profiles/other.py", PROFILE)
    assert "other.py: its profile is called 'atlas-next'" in copy.validate(manifest(), status=1)


@pytest.mark.slow
@unless_drawn("an algorithm is added")
def test_an_algorithm_is_one_file(copy: Copy) -> None:
    job = manifest("algorithm.name=another")
    assert "allowed: one of grpo" in copy.validate(job, status=2)

    copy.add("worker/rljob_worker/algorithms/another.py", ALGORITHM)
    copy.run("-m", "rljob_worker.generate", "--check", status=1)
    copy.run("-m", "rljob_worker.generate")
    copy.run("-m", "rljob_api.generate")
    first, *others = ALGORITHMS
    assert copy.spec_schema()["algorithm"]["properties"]["name"]["enum"] == [first, *sorted([*others, "another"])]
    copy.validate(job)
    copy.validate(manifest("rollout.samplesPerPrompt=2", "training.globalBatchSize=null"))
    too_few = copy.validate(
        manifest("algorithm.name=another", "rollout.samplesPerPrompt=2", "training.globalBatchSize=64"), status=2
    )
    assert (
        "spec.rollout.samplesPerPrompt: 2: the advantages of a group of one are all zero; allowed: 3 or more" in too_few
    )
    twice = copy.validate(manifest("algorithm.name=another", "training.globalBatchSize=128"), status=2)
    assert "spec.training.globalBatchSize: 128: the second update of a step would learn from samples" in twice

    rendered = on("cpu")
    rendered["spec"]["algorithm"] = {"name": "another"}
    assert "cluster" in copy.rendered(rendered)
    advantages = (
        "import torch; from rljob_worker.algorithms import get_algorithm; from rljob_api.spec import AlgorithmSpec; "
        "found = get_algorithm('another').advantages(torch.tensor([[1., 0., -1.]]), AlgorithmSpec(name='another')); "
        "print(found.tolist())"
    )
    assert copy.run("-c", advantages).splitlines()[-1] == "[[1.5, 0.0, -1.5]]"


@unless_drawn("a failure reason is added")
def test_a_failure_reason_is_a_member_and_a_row(copy: Copy) -> None:
    copy.insert("crds/rljob_api/spec/lifecycle.py", '    FABRIC_LOST = "FabricLost"', '    HCCL_FAILED = "')
    assert json.loads(copy.run("-c", SAID).splitlines()[-1])["missing"] == ["FABRIC_LOST"]

    row = '    FailureReason.FABRIC_LOST: ReasonFacts("The fabric between the nodes is gone"),'
    copy.insert("operator/rljob_operator/state/reasons.py", row, "    FailureReason.HCCL_FAILED:")
    found = json.loads(copy.run("-c", SAID).splitlines()[-1])
    assert found["missing"] == []
    assert found["said"] == "The fabric between the nodes is gone."
    assert found["order"][-3:] == ["FabricLost", "HcclFailed", "DriverExited"], "it explains those after it"
    copy.run("-m", "rljob_api.generate")
    assert '"FabricLost"' in json.dumps(copy.spec_schema()["failurePolicy"])


@pytest.mark.slow
@unless_drawn("a policy is added")
def test_a_policy_is_a_file_and_two_lines(copy: Copy) -> None:
    jobs = [json.dumps(manifest(*more)) for more in ([], ["algorithm.name=gspo"])]
    copy.add("worker/rljob_worker/rollouts/policies/one_at_a_time.py", POLICY)
    chooser = "worker/rljob_worker/rollouts/policies/__init__.py"
    imported = "from rljob_worker.rollouts.policies.one_at_a_time import OneAtATimePolicy"
    copy.insert(chooser, imported, "from rljob_worker.rollouts.policies.overlapped ")
    line = '    if spec.algorithm.name == "gspo": return OneAtATimePolicy(spec)'
    copy.insert(chooser, line, "    if spec.rollout.partial is not None:")
    chosen = [copy.run("-c", CHOSEN, job).splitlines()[-1] for job in jobs]
    assert chosen == ["WholePolicy", "OneAtATimePolicy"]


@pytest.mark.slow
@unless_drawn("an environment is added")
def test_an_environment_is_a_file_and_a_member(copy: Copy) -> None:
    turns = ["reward={name: environment}", "episodes={maxTurns: 2, maxTokens: 512}", "rollout.maxResponseTokens=64"]
    job = manifest("data={seeds: {count: 8}, environment: {name: Echo, args: {words: 2}, perProcess: 256}}", *turns)
    copy.add("worker/rljob_worker/environments/echo.py", ENVIRONMENT)
    copy.insert("crds/rljob_api/environments.py", '    ECHO = "Echo"', '    SOKOBAN = "')
    copy.run("-m", "rljob_api.generate")
    assert '"Echo", "Sokoban"' in json.dumps(copy.spec_schema()["data"])
    copy.validate(job)
    played = copy.run("-m", "rljob_worker.cli.main", "env", "Echo", "--seed", "3", "--actions", "word-1")
    assert "word-" in played
    assert "reward" in played


@unless_drawn("a backend is added")
def test_a_backend_is_a_file_and_a_member(copy: Copy) -> None:
    job = manifest("training.backend=Another")
    copy.add("worker/rljob_worker/trainer/another/backend.py", BACKEND)
    copy.insert("crds/rljob_api/spec/training.py", '    ANOTHER = "Another"', '    FSDP = "FSDP"')
    copy.run("-m", "rljob_api.generate")
    assert "Another" in copy.spec_schema()["training"]["properties"]["backend"]["enum"]
    assert copy.run("-c", BUILT, json.dumps(job)).splitlines()[-1] == "Another 1 of 2"


@unless_drawn("a route is added")
def test_a_route_is_a_file_a_member_and_a_row(copy: Copy) -> None:
    apart = ["mode=Disaggregated", "training.tensorParallel=1", "rollout.tensorParallel=1"]
    apart += ["resources={profile: cpu, trainer: {devicesPerNode: 1}, rollout: {devicesPerNode: 1}}"]
    job = manifest(*apart, "weightSync.transport=Post")
    copy.add("worker/rljob_worker/weightsync/post.py", ROUTE)
    copy.insert("crds/rljob_api/spec/colocation.py", '    POST = "Post"', '    DISK = "Disk"')
    row = '    WeightTransport.POST: "rljob_worker.weightsync.post:PostRoute",'
    copy.insert("worker/rljob_worker/weightsync/routes.py", row, "    WeightTransport.DISK:")
    copy.run("-m", "rljob_api.generate")
    assert copy.run("-c", TAKEN, json.dumps(job)).splitlines()[-1] == "PostRoute other carrier of version 7"
    assert "weightSync.transport" in copy.validate(manifest("weightSync.transport=Post"), status=2)
