"""Every change of upstream's software: where it is, what it touches, which versions it is for."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.samples import SEED, drawn
from support.warm.scripts import answer_in

from rljob_api.spec import RLJobSpec, TrainingBackend
from rljob_worker.cli.main import main
from rljob_worker.errors import UserError
from rljob_worker.trainer.environment import trainer_environment
from rljob_worker.upstream import install as installing
from rljob_worker.upstream.install import PATCHES, check, patches_of
from rljob_worker.upstream.patch import Patch, Process

ROOT = Path(__file__).resolve().parents[3]
CHANGES = Path(__file__).with_name("changes.py")
KINDS = drawn("changes of upstream", ["import", "patches"])
"""Each looks at all attributes of all modules several times."""
LEFT_OUT = f"RLJOB_SEED={SEED} drew {KINDS}: make test-faults runs it"
WHOLE = [patch for patch in PATCHES if not patch.scoped and patch.devices != ("npu",)]


@pytest.fixture(scope="module")
def changes() -> Any:
    """Changes of one process, which imports everything once and is forked for the rest."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, CHANGES, *KINDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return answer_in(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif("import" not in KINDS, reason=LEFT_OUT)
def test_importing_the_worker_changes_nothing_of_upstream(changes: Any) -> None:
    assert changes["import"] == []


@pytest.mark.slow
@pytest.mark.skipif("patches" not in KINDS, reason=LEFT_OUT)
def test_each_patch_changes_its_targets_and_nothing_else(changes: Any) -> None:
    assert changes["patches"] == {patch.name: sorted(patch.targets) for patch in WHOLE}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_patch_is_in_its_folder_and_names_its_test(patch: Patch) -> None:
    assert (ROOT / "worker" / patch.file).parent == ROOT / "worker/rljob_worker/upstream"
    file, _, function = patch.test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_what_is_for_megatron_is_in_its_trainers_alone(device: str) -> None:
    def names(backend: str) -> set[str]:
        return {patch.name for patch in patches_of(Process.TRAINER, device, backend)}

    assert names("Megatron") > names("FSDP") > {"torch-gloo-loop"}
    of_megatron = names("Megatron") - names("FSDP")
    assert of_megatron == {name for name in names("Megatron") if not name.startswith(("torch-gloo", "torch-groups"))}
    assert ("mindspeed" in of_megatron) == (device == "npu")
    assert {patch.backend for patch in PATCHES} == {"", TrainingBackend.MEGATRON.value}


def test_a_trainers_patches_go_by_its_backend() -> None:
    with pytest.raises(ValueError, match="trainer with the training backend '': trainers have one"):
        patches_of(Process.TRAINER, "cpu")
    with pytest.raises(
        ValueError, match="engine with the training backend 'Megatron': trainers have one, and nothing else has"
    ):
        patches_of(Process.ENGINE, "cpu", "Megatron")


@pytest.mark.parametrize(("backend", "connections"), [("Megatron", "1"), ("FSDP", None)])
def test_one_queue_is_asked_for_megatron_alone(backend: str, connections: str | None) -> None:
    spec = RLJobSpec.model_validate(yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())["spec"])
    training = spec.training.model_copy(update={"backend": TrainingBackend(backend)})
    assert (
        trainer_environment(spec.model_copy(update={"training": training})).get("CUDA_DEVICE_MAX_CONNECTIONS")
        == connections
    )


def test_names_are_given_once() -> None:
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)


@pytest.mark.parametrize(("version", "found"), [("0.24.0", "vllm 0.24.0"), (None, "vllm not installed")])
def test_another_version_names_the_patches_to_look_at(
    version: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(Process.ENGINE_WORKER, "cpu")
    true_version = installing._version
    monkeypatch.setattr(installing, "_version", lambda name: version if name == "vllm" else true_version(name))
    with pytest.raises(UserError) as refused:
        installing.install(Process.ENGINE_WORKER, "cpu")
    lines = str(refused.value).splitlines()
    assert lines[0].startswith("engine worker: installed versions for which RLJob has not been adapted")
    assert lines[1:] == [
        f"  {found}: patch {patch.name} ({patch.file}) is for "
        f"{', '.join(f'{package} {versions}' for package, versions in patch.versions.items())}; its test: {patch.test}"
        for patch in PATCHES
        if Process.ENGINE_WORKER in patch.processes and "cpu" in patch.devices and "vllm" in patch.versions
    ]


def test_the_doctor_lists_them(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor", "--patches", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in document["patches"]] == [patch.name for patch in PATCHES]
    rng = next(entry for entry in document["patches"] if entry["name"] == "megatron-rng-on-cpu")
    assert rng["installed"] == {"megatron-core": "0.16.1"}
    assert (rng["status"], rng["processes"], rng["devices"]) == ("ok", ["trainer"], ["cpu"])
    ascend = next(entry for entry in document["patches"] if entry["versions"].keys() == {"vllm-ascend"})
    assert ascend["status"] == "not applicable", "its package is not installed, and this machine has no NPU"

    assert main(["doctor", "--patches"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("ok ") for line in lines) == len(PATCHES) - 1
    assert any("megatron-rng-on-cpu: megatron-core 0.16.1; wanted: megatron-core ==0.16.*" in line for line in lines)

    monkeypatch.setattr("rljob_worker.doctor.patches.installed_version", lambda package: "9.0")
    assert main(["doctor", "--patches"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "fix: see whether rljob_worker/upstream/torch_gloo.py still holds (docs/upstream.md)" in "\n".join(lines)


def test_ray_reads_its_settings() -> None:
    import ray

    raylet = Path(ray.__file__).parent / "core/src/ray/raylet/raylet"
    program = raylet.read_bytes()
    for patch in PATCHES:
        for target in patch.targets:
            if target.startswith("env:RAY_"):
                assert target.removeprefix("env:RAY_").encode() in program


@pytest.fixture
def trainer(changes: Any) -> Any:
    return changes["trainer"]


@pytest.fixture
def engine_worker(changes: Any) -> Any:
    return changes["engine_worker"]


@pytest.mark.slow
def test_torch_answers_to_cuda_names(trainer: Any) -> None:
    assert trainer["devices"] == ["cpu"] * 5
    assert (trainer["current"], trainer["type"], trainer["moved"]) == ("cpu", "torch.cuda.FloatTensor", "cpu")


@pytest.mark.slow
def test_megatron_tracks_the_cpu_generator(trainer: Any) -> None:
    assert trainer["drawn"]
    assert trainer["untouched"]


@pytest.mark.slow
def test_a_rank_alone_copies_nothing_to_exchange_it(trainer: Any) -> None:
    assert max(trainer["taken_mib"]) < 16, "of a buffer of 64 MiB"
    assert trainer["apart"] == [0.0, 1.0, 2.0]


@pytest.mark.slow
def test_torch_multiplies_for_vllm(engine_worker: Any) -> None:
    assert engine_worker["replaced"] == [False, True]
    assert engine_worker["close"]


@pytest.mark.slow
def test_the_moe_activation_needs_no_object(engine_worker: Any) -> None:
    assert engine_worker["activated"]
