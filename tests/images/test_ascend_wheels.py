"""`make ascend-wheels`, on repositories that stand in for the memory saver's and MindSpeed's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from image_build import ROOT

BUILD = """\
test "$*" = "-a memory-saver" || exit 3
mkdir -p output
cp source.txt "output/torch_memory_saver-0.0.8-cp312-cp312-linux_aarch64.whl"
"""
SAVER = "torch_memory_saver-0.0.8-cp312-cp312-linux_aarch64.whl"
BACKEND = """\
import zipfile
def build_wheel(folder, settings=None, metadata=None):
    name, info = "mindspeed-0.16.0-py3-none-any.whl", "mindspeed-0.16.0.dist-info"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.write("source.txt")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: mindspeed\\nVersion: 0.16.0\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def repository(folder: Path, files: dict[str, str]) -> tuple[str, str]:
    """A repository whose branch went on after the commit that is wanted; its place and that commit."""
    folder.mkdir()
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example", "-c", "init.defaultBranch=main"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for text in ("wanted\n", "later\n"):
        for name, content in {**files, "source.txt": f"{folder.name} {text}"}.items():
            (folder / name).write_text(content)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", text], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD~1"], text=True).strip()
    return str(folder), commit


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """The script in a folder of its own, and what it is given."""
    image = tmp_path / "worker-ascend"
    (image / "wheels").mkdir(parents=True)
    shutil.copy(ROOT / "images/worker-ascend/make_wheels.sh", image)
    (image / "wheels" / "mindspeed-0.15.0-py3-none-any.whl").write_text("old")
    saver, saver_commit = repository(tmp_path / "saver", {"build.sh": BUILD})
    mindspeed, mindspeed_commit = repository(tmp_path / "speed", {"backend.py": BACKEND, "pyproject.toml": PROJECT})
    programs = tmp_path / "bin"
    programs.mkdir()
    # The base image's python3 has pip.
    (programs / "python3").symlink_to(sys._base_executable)  # type: ignore[attr-defined]
    given = {
        "SAVER_REPOSITORY": saver, "SAVER_COMMIT": saver_commit, "MINDSPEED_REPOSITORY": mindspeed,
        "MINDSPEED_COMMIT": mindspeed_commit[:8], "PATH": f"{programs}:{os.environ['PATH']}",
    }  # fmt: skip
    return image, given


def make(image: Path, given: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | given
    command = ["bash", str(image / "make_wheels.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_wheels_of_the_wanted_commits_with_their_hashes(made: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    image, given = made
    patch = "--- a/source.txt\n+++ b/source.txt\n@@ -1 +1 @@\n-saver wanted\n+saver patched\n"
    (tmp_path / "saver.patch").write_text(patch)
    done = make(image, given | {"SAVER_PATCH": str(tmp_path / "saver.patch")})
    assert done.returncode == 0, done.stdout + done.stderr
    speed, saver = sorted((image / "wheels").glob("*.whl"))
    assert (speed.name, saver.name) == ("mindspeed-0.16.0-py3-none-any.whl", SAVER), "an older wheel goes"
    assert saver.read_text() == "saver patched\n"
    assert zipfile.ZipFile(speed).read("source.txt") == b"speed wanted\n", "not the branch's newest state"
    subprocess.run(["sha256sum", "--check", "--strict", "wheels/SHA256SUMS"], cwd=image, check=True)
    assert len((image / "wheels/SHA256SUMS").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"SAVER_COMMIT": "main"}, "main is no commit but a name of "),
        ({"MINDSPEED_COMMIT": "0123456789"}, "0123456789"),
        ({"SAVER_REPOSITORY": "/nowhere"}, "/nowhere"),
    ],
)
def test_what_is_not_there_is_named_and_the_wheels_stay(
    made: tuple[Path, dict[str, str]], given: dict[str, str], said: str
) -> None:
    image, known = made
    done = make(image, known | given)
    assert done.returncode != 0
    assert said in done.stderr
    assert [path.name for path in (image / "wheels").iterdir()] == ["mindspeed-0.15.0-py3-none-any.whl"]
