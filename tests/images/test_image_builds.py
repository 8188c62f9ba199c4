"""The lines of the images' build stages, carried out where no base image and no CANN is needed.

Small wheels stand in for those that the image's builder brings, and of the lock files one package is installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from image_build import Build, stages
from support.samples import drawn

pytestmark = pytest.mark.slow

_LIBRARIES = [f"torch_memory_saver_hook_mode_{mode}.abi3.so" for mode in ("preload", "torch")]


def wheel(folder: Path, package: str, version: str, files: dict[str, str]) -> None:
    """A wheel with some files, as pip installs it."""
    info = f"{package}-{version}.dist-info"
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w") as archive:
        for name, text in {**files, **{f"{info}/{name}": text for name, text in about.items()}}.items():
            archive.writestr(name, text)


def sums(build: Build) -> None:
    """Write the sums as the image's builder does."""
    made = sorted(f"wheels/{path.name}" for path in (build.build / "wheels").glob("*.whl"))
    said = subprocess.check_output(["sha256sum", *made], text=True, cwd=build.build)
    (build.build / "wheels" / "SHA256SUMS").write_text(said, encoding="utf-8")


def fails_with(outcome: subprocess.CompletedProcess[str]) -> set[str]:
    assert outcome.returncode != 0
    return set(re.findall(r"^(\S+) must be the base image's own", outcome.stderr, re.MULTILINE))


def carry_out(build: Build, lines: list[tuple[str, str]]) -> subprocess.CompletedProcess[str]:
    """The lines up to the check of the requirements, which ends it: the base's packages for devices are not here."""
    for line in lines:
        outcome = build.carry_out(line)
        if outcome is None:
            continue
        if "check_requirements" in line[1]:
            return outcome
        assert outcome.returncode == 0, f"{line[1]}\n{outcome.stdout}\n{outcome.stderr}"
        if "-m venv" in line[1]:
            build.see_packages_of_the_tests()
    raise AssertionError("the build does not check its requirements")


def test_ascend_build_stage(tmp_path: Path) -> None:
    library = tmp_path / "cann/lib64/libascendcl.so"
    library.parent.mkdir(parents=True)
    library.touch()
    build = Build(tmp_path / "image", {"ASCEND_TOOLKIT_HOME": str(tmp_path / "cann")}, ("markdown",))
    wheels = build.build / "wheels"
    wheels.mkdir()
    wheel(
        wheels, "torch_memory_saver", "0.0.8", {name: name for name in [*_LIBRARIES, "torch_memory_saver/__init__.py"]}
    )
    wheel(wheels, "mindspeed", "0.16.0", {"mindspeed/__init__.py": "here = True\n"})
    sums(build)
    _, stage, final = stages("worker-ascend")
    outcome = carry_out(build, stage)
    assert fails_with(outcome) == {"torch-npu", "vllm", "vllm-ascend"}
    digests = (build.environment / "wheels.sha256").read_text(encoding="utf-8").splitlines()
    assert [line.split()[1] for line in digests] == [f"wheels/{path.name}" for path in sorted(wheels.glob("*.whl"))]
    found = "import mindspeed, markdown, rljob_worker as ours; print(mindspeed.here, markdown.__file__, ours.__file__)"
    python3 = [str(build.environment / "bin/python"), "-c", found]
    printed = subprocess.check_output(python3, text=True, timeout=60, env=build.variables, cwd=tmp_path).split()
    assert printed[0] == "True"
    assert all(path.startswith(str(build.environment)) for path in printed[1:]), "not from the test's own packages"
    (last,) = (line for line in final if line[0] == "RUN")
    ended = build.carry_out(last)
    assert ended is not None
    assert ended.returncode == 0, ended.stderr
    (build.environment / "lib" / _LIBRARIES[0]).resolve().write_text("another", encoding="utf-8")
    ended = build.carry_out(last)
    assert ended is not None
    assert ended.returncode != 0, "a library that was exchanged must end the build"


@pytest.mark.parametrize("given", [[], ["0.0.8", "0.0.9"]], ids=["no wheel", "two wheels"])
def test_ascend_build_says_which_wheel_it_wants(tmp_path: Path, given: list[str]) -> None:
    build = Build(tmp_path / "image", {}, ())
    (build.build / "wheels").mkdir()
    for version in given:
        wheel(build.build / "wheels", "torch_memory_saver", version, {})
    (line,) = (line for line in stages("worker-ascend")[1] if line[0] == "RUN" and "wheels" in line[1])
    outcome = build.carry_out(line)
    assert outcome is not None
    assert outcome.returncode == 1
    assert f"has {len(given)} wheels of torch_memory_saver, wanted: one" in outcome.stderr


@pytest.mark.parametrize("wrong", ["no file", "no hash", "another hash"])
def test_ascend_build_takes_no_wheel_without_its_hash(tmp_path: Path, wrong: str) -> None:
    build = Build(tmp_path / "image", {}, ())
    wheels = build.build / "wheels"
    wheels.mkdir()
    for package in ("torch_memory_saver", "mindspeed"):
        wheel(wheels, package, "1.0", {})
    sums(build)
    text = (wheels / "SHA256SUMS").read_text(encoding="utf-8")
    if wrong == "no file":
        (wheels / "SHA256SUMS").unlink()
    else:
        other = text.splitlines(keepends=True)[0] if wrong == "no hash" else text.replace(text[:4], "0123", 1)
        (wheels / "SHA256SUMS").write_text(other, encoding="utf-8")
    (line,) = (line for line in stages("worker-ascend")[1] if line[0] == "RUN" and "wheels" in line[1])
    outcome = build.carry_out(line)
    assert outcome is not None
    assert outcome.returncode == 1
    said = "FAILED" if wrong == "another hash" else "SHA256SUMS has no hash of wheels/"
    assert said in outcome.stdout + outcome.stderr
    assert not (build.environment / "wheels.sha256").exists()


def test_cuda_build_stage_takes_the_library_of_its_torch(tmp_path: Path) -> None:
    """With the real package of the memory saver, which has libraries for CUDA 12 and 13."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "torch.py").write_text("class version:\n    cuda = '13.0'\n", encoding="utf-8")
    build = Build(tmp_path / "image", {}, ("torch-memory-saver",))
    build.variables["PYTHONPATH"] = str(stubs)
    outcome = carry_out(build, stages("worker-cuda")[1])
    assert fails_with(outcome) == {"vllm"}
    linked = (build.environment / "lib" / _LIBRARIES[0]).resolve()
    assert linked.name == "torch_memory_saver_hook_mode_preload_cu13.abi3.so"
    assert linked.is_relative_to(
        build.environment / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    )


IMAGES_AND_TRACKERS = [
    f"{image} {given}" for image in ("worker-cpu", "worker-ascend", "worker-cuda") for given in ("all", "", "wandb")
]


@pytest.mark.parametrize("of_both", drawn("images and trackers", IMAGES_AND_TRACKERS, 2))
def test_trackers_are_a_build_argument(tmp_path: Path, of_both: str) -> None:
    image, _, given = of_both.partition(" ")
    build = Build(tmp_path / "image", {"TRACKERS": given}, ("smmap",))
    build.carry_out(("COPY", "requirements/trackers.txt /build/trackers.txt"))
    lines = [line for stage in stages(image) for line in stage]
    (argument,) = (line for line in lines if line[0] == "ARG" and line[1].startswith("TRACKERS"))
    (line,) = (line for line in lines if line[0] == "RUN" and "TRACKERS" in line[1])
    # The image for CPU devices mounts what the others copy.
    command = re.sub(r'^--mount=\S+\s+PATH="[^"]*" && ', "", line[1]).replace("-r /trackers", "-r /build/trackers")
    build.carry_out(argument)
    outcome = build.carry_out(("RUN", command))
    assert outcome is not None
    found = [path.name for path in (build.environment / "trackers").glob("lib/*/site-packages/smmap")]
    assert (outcome.returncode, found) == {"all": (0, ["smmap"]), "": (0, []), "wandb": (1, [])}[given], outcome.stderr
    assert ("wanted: all, or nothing" in outcome.stderr) is (given == "wandb")
