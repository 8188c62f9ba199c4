"""The workers' images for devices: linted, pinned, and nothing of their bases is replaced.

No image is built here: the bases are 10 GB and more, and cannot be had everywhere. The lock files are resolved over
what the bases hold, for both architectures; test_image_builds.py carries out the build stages' lines.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from image_build import instructions, stages
from support.samples import drawn

from rljob_api import roles
from rljob_worker.doctor.versions import VLLM_ASCEND

ROOT = Path(__file__).parents[2]
IMAGES = {path.parent.name: path for path in sorted((ROOT / "images").glob("*/Dockerfile"))}
ON_DEVICES = ("worker-ascend", "worker-cuda")
LOCKS = [(image, machine) for image in ON_DEVICES for machine in ("aarch64", "x86_64")]
PROGRAMS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
REPLACED = {
    "worker-ascend": {"ray": "2.48", "aiohttp": "3.14.3"},
    "worker-cuda": {"transformers": "5.12", "aiohttp": "3.14.1", "yarl": "1.24.2"},
}
"""Packages that the images bring in another version than their base -> the base's."""
ELSEWHERE = {
    "worker-ascend": {"opentelemetry-exporter-prometheus"},
    "worker-cuda": {"datasets", "opentelemetry-exporter-prometheus", "virtualenv"},
}
"""Packages that the base allows in another version only than the one that is tested on CPU."""


def pinned(name: str) -> dict[str, str]:
    """Name -> version of each package in a requirements file."""
    text = (ROOT / f"requirements/{name}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, re.MULTILINE))


def run(command: list[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def program(name: str) -> str:
    path = shutil.which(name, path=PROGRAMS)
    assert path is not None, f"{name} is not installed: `make install`"
    return path


@pytest.mark.parametrize("image", sorted(IMAGES))
def test_hadolint_has_nothing_to_say(image: str) -> None:
    done = run([program("hadolint"), "--no-color", "--config", str(ROOT / ".hadolint.yaml"), str(IMAGES[image])])
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("image", ON_DEVICES)
def test_base_is_a_release_and_the_last_user_is_not_root(image: str) -> None:
    (base,) = (value for name, value in instructions(image) if name == "ARG" and value.startswith("BASE_IMAGE="))
    assert re.fullmatch(r"BASE_IMAGE=[\w./-]+:v0\.23\.0(\.post1)?", base)
    system, build, final = stages(image)
    assert system[0][1] == "${BASE_IMAGE}${BASE_DIGEST:+@${BASE_DIGEST}} AS system"
    assert (build[0][1], final[0][1]) == ("system AS build", "system")
    assert ("USER", "1000:1000") in system
    assert not [value for name, value in final if name == "USER"]


@pytest.mark.parametrize("image", sorted(IMAGES))
def test_nothing_unpinned_and_no_index_or_secret(image: str) -> None:
    text = IMAGES[image].read_text(encoding="utf-8")
    assert not re.search(r"latest|--index-url|--extra-index|--trusted-host|TOKEN|PASSWORD|SECRET", text)
    assert "index" not in (ROOT / f"requirements/{image}.txt").read_text(encoding="utf-8")
    runs = [value for name, value in instructions(image) if name == "RUN"]
    commands = [command for value in runs for command in re.split(r"&&|;", value) if "-m pip " in command]
    assert commands
    for command in commands:
        assert "--no-deps" in command
        hashed = "--require-hashes --only-binary :all:" in command
        # What no index is asked for: wheels whose hashes were checked, and our own package by tools that were.
        assert hashed or "--no-index" in command, command
        if not hashed:
            assert command.rstrip().endswith(".whl") or "--no-build-isolation" in command, command
    assert "://" not in "".join(value for name, value in instructions(image) if name in ("RUN", "ARG", "ADD"))


@pytest.mark.parametrize("image", sorted(IMAGES))
def test_what_is_copied_is_sent_to_the_build(image: str) -> None:
    allowed = [
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"
    ]
    copied = [value.split()[:-1] for name, value in instructions(image) if name == "COPY" and "--from" not in value]
    for source in (source for sources in copied for source in sources):
        assert (ROOT / source).exists(), source
        assert any(Path(source).match(pattern) or source.startswith(pattern.strip("/")) for pattern in allowed), source


def test_environment_of_the_ascend_image() -> None:
    system = dict(
        pair.split("=", 1) for name, value in stages("worker-ascend")[0] if name == "ENV" for pair in value.split()
    )
    assert system["LD_PRELOAD"] == '""', "jemalloc would be the memory saver's neighbour"
    assert system["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:False"
    assert system["HOME"] == "/home/rljob", "root's ~/.bashrc preloads jemalloc"
    assert system["PATH"].startswith("/opt/rljob/bin:")


@pytest.mark.parametrize("image", ON_DEVICES)
def test_lock_has_what_the_base_lacks(image: str) -> None:
    lock, base, tested = pinned(image), pinned(f"{image}-base"), pinned("worker-cpu")
    assert len(base) > 150
    assert not set(lock) & set(base)
    assert set(REPLACED[image]) <= set(lock)
    assert not {"torch", "torch-npu", "vllm", "vllm-ascend", "numpy", "triton"} & set(lock)
    assert {"ray", "megatron-core", "transformers"} <= set(lock) | set(base)
    versions = lock | base
    assert (versions["ray"], versions["megatron-core"], versions["transformers"]) == ("2.60.0", "0.16.1", "5.5.4")
    others = {name for name, version in lock.items() if name in tested and tested[name] != version}
    assert others <= ELSEWHERE[image], "CPU tests say nothing about these: name them, or let `make lock` resolve anew"
    blocks = re.split(r"^(?=\S)", (ROOT / f"requirements/{image}.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)[
        1:
    ]
    assert len(blocks) == len(lock)
    assert all("--hash=sha256:" in block for block in blocks)


def test_the_extra_for_npus_is_what_the_image_holds() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    pins = dict(re.findall(r"^([a-z-]+)==(\S+)$", "\n".join(extras["ascend"]), re.MULTILINE))
    assert set(pins) == {"torch-npu", "vllm-ascend"}
    assert pins.items() <= pinned("worker-ascend-base").items()
    assert pins["vllm-ascend"] == VLLM_ASCEND


@pytest.mark.slow
@pytest.mark.parametrize(("image", "machine"), drawn("locks and bases", LOCKS))
def test_lock_and_base_together_satisfy_the_worker(image: str, machine: str, tmp_path: Path) -> None:
    """With both as constraints there is a solution, and each package of the lock has a wheel with a listed hash."""
    # torch's own packages for CUDA are in no image under these names, and nothing of the worker asks for them.
    (tmp_path / "excludes.txt").write_text("torch\n", encoding="utf-8")
    both = pinned(image) | pinned(f"{image}-base")
    (tmp_path / "all.txt").write_text(
        "".join(f"{name}=={version}\n" for name, version in both.items()), encoding="utf-8"
    )
    platform = ["--python-version", "3.12", "--python-platform", f"{machine}-manylinux_2_35"]
    extra = "cuda" if image == "worker-cuda" else "worker"
    resolve = [program("uv"), "pip", "compile", str(ROOT / "pyproject.toml"), "--extra", extra, *platform, "--quiet"]
    resolve += ["--constraints", str(tmp_path / "all.txt"), "--excludes", str(tmp_path / "excludes.txt"), "--no-header"]
    done = run([*resolve, "--no-annotate"])
    assert done.returncode == 0, done.stderr
    wanted = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", done.stdout, re.MULTILINE))
    assert wanted.items() <= both.items(), "the worker needs what is neither in the base nor in the lock"
    install = [program("uv"), "pip", "install", "--dry-run", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    install += [*platform, "--target", str(tmp_path / "packages"), "-r", str(ROOT / f"requirements/{image}.txt")]
    done = run(install)
    assert done.returncode == 0, done.stderr
    assert f"Would install {len(pinned(image))} packages" in done.stderr


def make_packages(folder: Path, *names: str) -> Path:
    packages = folder / "packages"
    packages.mkdir(parents=True)
    for name in names:
        (packages / name).write_bytes(name.encode())
    (folder / "lib").mkdir()
    return packages


def link(environment: Path, packages: Path, major: int | None) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from pathlib import Path; import link_memory_saver as saver;"
        f"print(saver.link(Path({str(environment)!r}), Path({str(packages)!r}), {major}), end='')"
    )
    return run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'images')!r}); {code}"])


@pytest.mark.parametrize(
    ("suffixes", "major"), [([".abi3"], None), ([".abi3", "_cu12.abi3", "_cu13.abi3"], 13)], ids=["ascend", "cuda"]
)
def test_memory_saver_is_linked_and_its_digests_are_written_down(
    suffixes: list[str], major: int | None, tmp_path: Path
) -> None:
    stems = [f"torch_memory_saver_hook_mode_{mode}" for mode in ("preload", "torch")]
    packages = make_packages(tmp_path, *(f"{stem}{suffix}.so" for stem in stems for suffix in suffixes))
    done = link(tmp_path, packages, major)
    assert done.returncode == 0, done.stderr
    target = tmp_path / Path(roles.MEMORY_SAVER_LIBRARY).relative_to("/opt/rljob")
    assert target.is_symlink()
    assert target.resolve().name == f"{stems[0]}{suffixes[-1]}.so"
    # What a trainer preloads, and what each hook mode loads.
    lines = (tmp_path / "memory-saver.sha256").read_text(encoding="utf-8")
    assert lines == done.stdout
    assert re.fullmatch(rf"([0-9a-f]{{64}}  {tmp_path}/\S+\.so\n){{3}}", lines)
    assert run(["sha256sum", "--check", str(tmp_path / "memory-saver.sha256")]).returncode == 0
    target.resolve().write_bytes(b"another library")
    assert (
        "2 computed checksums did NOT match"
        in run(["sha256sum", "--check", str(tmp_path / "memory-saver.sha256")]).stderr
    )


@pytest.mark.parametrize("names", [[], ["torch_memory_saver_hook_mode_preload.abi3.so"]], ids=["none", "no torch mode"])
def test_a_missing_library_ends_the_build(names: list[str], tmp_path: Path) -> None:
    done = link(tmp_path, make_packages(tmp_path, *names), None)
    assert done.returncode == 1
    assert "must have one library torch_memory_saver_hook_mode_" in done.stderr


def test_two_libraries_of_one_mode_end_the_build(tmp_path: Path) -> None:
    """The package itself asserts that there is one, in its folder and the one above, so the build says it first."""
    packages = make_packages(tmp_path, "torch_memory_saver_hook_mode_preload.abi3.so")
    copied = packages / "torch_memory_saver" / "torch_memory_saver_hook_mode_preload.abi3.so"
    copied.parent.mkdir()
    copied.write_bytes(b"")
    assert "found: " in link(tmp_path, packages, None).stderr


def check(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    script = f"import sys, runpy; sys.path.insert(0, {path!r}) if {path!r} else None; sys.argv = {['x', *arguments]!r};"
    script += f"runpy.run_path({str(ROOT / 'images/check_requirements.py')!r}, run_name='__main__')"
    return run([sys.executable, "-c", script])


def test_requirements_of_the_worker_are_walked() -> None:
    done = check("rljob[worker]")
    assert (done.returncode, done.stderr) == (0, "")


def test_wrong_missing_and_replaced_packages_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "numpy-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: numpy\nVersion: 1.0\n"
        "Requires-Dist: surely-not-there>=2\nRequires-Dist: unneeded; extra == 'other'\n",
        encoding="utf-8",
    )
    done = check("rljob[worker]", "--base", "torch", path=str(tmp_path))
    assert done.returncode == 1
    assert "rljob needs numpy>=2.0" in done.stderr
    assert "and 1.0 is installed" in done.stderr
    assert "numpy needs surely-not-there>=2, which is not installed" in done.stderr
    assert "torch must be the base image's own" in done.stderr
    assert "unneeded" not in done.stderr


def test_lint_is_told_why_what_is_ignored_is() -> None:
    text = (ROOT / ".hadolint.yaml").read_text(encoding="utf-8")
    ignored = yaml.safe_load(text)["ignored"]
    assert ignored
    assert all(re.search(rf"- {rule} # \S+", text) for rule in ignored)
