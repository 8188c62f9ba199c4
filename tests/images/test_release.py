"""A release: its files, and its wheel installed with what the lock files list and nothing else."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from support.samples import unless_all

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "images"), str(ROOT / "release"), str(ROOT / "tests" / "operator" / "chart")]
import release  # noqa: E402
import sbom  # noqa: E402
from helm_chart import helm_program  # noqa: E402

WHEEL = "rljob-0.1.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    images = folder / "images"
    images.mkdir()
    (images / "rljob-operator-0.1.0.cdx.json").write_text("{}")
    (images / "rljob-operator-0.0.9.cdx.json").write_text("{}")
    release.release(str(helm_program()), folder / "out", images=images, address="https://charts.example/rljob")
    return folder / "out"


def installed(folder: Path, wheel: Path, lock: str) -> Path:
    """An environment with the wheel and the packages of a lock file, those of this one's; its `bin`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    python = folder / "bin" / "python"
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python, wheel]
    subprocess.run(command, check=True, timeout=120)
    [site] = (folder / "lib").glob("python3.*/site-packages")
    for name in sbom.locked(lock):
        try:
            package = distribution(name)
        except PackageNotFoundError:
            # For another machine.
            continue
        for top in {file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "__pycache__")}:
            there = Path(str(package.locate_file(top)))
            if there.exists() and not (site / top).exists():
                (site / top).symlink_to(there)
    return folder / "bin"


def test_the_files_of_a_release(released: Path) -> None:
    files = {path.name for path in released.iterdir()}
    assert files == {
        "NOTES.md", "SHA256SUMS", "index.yaml", "requirements-cpu.txt", "requirements-operator.txt",
        "requirements-worker-cpu.txt", WHEEL, "rljob-0.1.0.tar.gz", "rljob-0.1.0.tgz", "rljob-0.1.0-oci",
        "rljob-0.1.0.cdx.json", "rljob-operator-0.1.0.cdx.json", "rljob-worker-cpu-0.1.0.cdx.json",
        "image-rljob-operator-0.1.0.cdx.json",
    }  # fmt: skip
    checked = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=released, capture_output=True)
    assert checked.returncode == 0, checked.stdout
    assert len(checked.stdout.splitlines()) == sum(path.is_file() for path in released.rglob("*")) - 1
    [entry] = yaml.safe_load((released / "index.yaml").read_text())["entries"]["rljob"]
    assert entry["urls"] == ["https://charts.example/rljob/rljob-0.1.0.tgz"]
    assert entry["digest"] == hashlib.sha256((released / "rljob-0.1.0.tgz").read_bytes()).hexdigest()
    with tarfile.open(released / "rljob-0.1.0.tar.gz") as archive:
        names = set(archive.getnames())
    assert {f"rljob-0.1.0/{name}" for name in ("Makefile", "README.md", "requirements/cpu.txt")} <= names


def test_the_same_commit_gives_the_same_wheel(released: Path, tmp_path: Path) -> None:
    release.build_package(tmp_path)
    for name in (WHEEL, "rljob-0.1.0.tar.gz"):
        assert (tmp_path / name).read_bytes() == (released / name).read_bytes()


def test_a_lock_files_bill_has_each_package_with_its_hashes(released: Path) -> None:
    bill = json.loads((released / "rljob-operator-0.1.0.cdx.json").read_text())
    by_name = {sbom.normalized(one["name"]): one for one in bill["components"]}
    assert set(by_name) == sbom.locked("operator")
    lock = (released / "requirements-operator.txt").read_text()
    for one in bill["components"]:
        [reference] = one["externalReferences"]
        assert reference["hashes"]
        assert all(f"--hash=sha256:{item['content']}" in lock for item in reference["hashes"])
    listed = sum(len(one["externalReferences"][0]["hashes"]) for one in bill["components"])
    assert listed == lock.count("--hash=sha256:")
    assert by_name["kopf"]["version"] == "1.45.2"
    assert by_name["kopf"]["licenses"] == [{"license": {"name": sbom.licences({"kopf"})["kopf"]}}]


def test_notes_are_the_versions_section_or_the_newest() -> None:
    changelog = "# Changelog\n\nText.\n\n## Next\n\n- c\n\n## 0.2.0 (2027)\n\n- b\n\n### More\n\n## 0.1.0\n\n- a\n"
    assert release.notes(changelog, "0.2.0") == "# RLJob 0.2.0\n\n- b\n\n### More\n"
    assert release.notes(changelog, "0.1.0") == "# RLJob 0.1.0\n\n- a\n"
    assert release.notes(changelog, "0.3.0") == "# RLJob 0.3.0\n\n- c\n"
    with pytest.raises(ValueError, match="has no section"):
        release.notes("# Changelog\n", "0.1.0")


def test_the_operators_install_has_operator_validate_and_plugin(released: Path, tmp_path: Path) -> None:
    programs = installed(tmp_path / "env", released / WHEEL, "operator")
    looked = "import importlib.util; print([n for n in ('ray', 'torch', 'vllm') if importlib.util.find_spec(n)])"
    for command, said in (
        ([programs / "python", "-c", looked], r"\[\]"),
        ([programs / "rljob-operator", "--help"], "usage: rljob-operator"),
        ([programs / "kubectl-rljob", "--help"], "usage: kubectl rljob"),
        (
            [programs / "rljob", "validate", ROOT / "examples" / "qwen3-4b-grpo-8x910b1.yaml"],
            "is valid\nby the API's rules; model, data",
        ),
        ([programs / "rljob", "--help"], "usage: rljob"),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        assert re.search(said, done.stdout), done.stdout
    done = subprocess.run(
        [programs / "rljob", "run", ROOT / "examples" / "quickstart.yaml"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert re.fullmatch(
        r"rljob: run: \w+, a package of the worker, is not installed \(docs/install\.md\)\n", done.stderr
    )


@unless_all("The packages of the lock are what all other tests run with")
def test_the_locks_install_runs_the_quickstart(released: Path, tmp_path: Path) -> None:
    programs = installed(tmp_path / "env", released / WHEEL, "cpu")
    command = [programs / "rljob", "run", ROOT / "examples" / "quickstart.yaml", "--set", "spec.steps=2"]
    done = subprocess.run(
        [*command, "--output", tmp_path / "run"], capture_output=True, text=True, timeout=500, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "report.html").is_file()
