"""All files of a release: `python release/release.py --helm HELM [--output dist/release]`, which `make release` calls.

Nothing is published. The folder holds the wheel and the source archive, the lock files that go with them, the chart as
an archive, as an OCI image layout and with the index of a chart repository, bills of materials, notes and checksums:
what a release page, a registry and a package index are given. Two runs on one commit give the same wheel and source
archive to the bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "images"))
import sbom  # noqa: E402

LOCKS = {"cpu": "rljob", "operator": "rljob-operator", "worker-cpu": "rljob-worker-cpu"}
"""Lock files that are shipped beside the wheel, and what their bills of materials are called."""
SUMS = "SHA256SUMS"


def version() -> str:
    """Of the package, which is that of the chart."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def notes(changelog: str, of: str) -> str:
    """The part of the changelog for a version: its own section, or the first one where it has none yet.

    Raises:
        ValueError: there is no section.
    """
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    if not sections:
        raise ValueError("CHANGELOG.md has no section that begins with '## '")
    own = [one for one in sections if one.split("\n", 1)[0].split()[:1] == [of]]
    _, _, text = (own or sections)[0].partition("\n")
    return f"# RLJob {of}\n\n{text.strip()}\n"


def build_package(output: Path) -> None:
    """Wheel and source archive, without isolation, which would fetch whatever version of the build tools is newest."""
    made = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    environment = {**os.environ, "SOURCE_DATE_EPOCH": made.stdout.strip()}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, env=environment, timeout=600, stdout=subprocess.DEVNULL)


def build_chart(helm: str, output: Path, address: str | None) -> None:
    """The chart, and `index.yaml` of a repository that has it alone, at `address` where that is known."""
    command = [sys.executable, str(ROOT / "helm" / "package.py"), "--helm", helm, "--output", str(output)]
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
    url = ["--url", address] if address else []
    subprocess.run([helm, "repo", "index", str(output), *url], check=True, timeout=60)


def sums(folder: Path) -> str:
    """A line for each file, as `sha256sum --check` reads it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}\n" for path in files
    )


def release(helm: str, output: Path, *, images: Path, address: str | None = None) -> None:
    """Write all files of a release into a folder, which is emptied before.

    Args:
        helm: the program.
        output: the folder.
        images: where `make image-...` left bills of materials of images; those that are there are taken along.
        address: of the chart repository.

    Raises:
        subprocess.CalledProcessError: a build failed, and said why.
        ValueError: CHANGELOG.md has nothing to tell.
    """
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    of = version()
    (output / "NOTES.md").write_text(notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), of), encoding="utf-8")
    build_package(output)
    build_chart(helm, output, address)
    for lock, name in LOCKS.items():
        text = (ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf-8")
        (output / f"requirements-{lock}.txt").write_text(text, encoding="utf-8")
        _write_json(output / f"{name}-{of}.cdx.json", sbom.bill_of_lock(name, of, lock))
    for bill in sorted(images.glob(f"rljob-*-{of}.cdx.json")):
        shutil.copy(bill, output / f"image-{bill.name}")
    (output / SUMS).write_text(sums(output), encoding="utf-8")


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Write a release as the command line says."""
    parser = argparse.ArgumentParser(description="Write all files of a release into a folder; nothing is published.")
    parser.add_argument("--helm", default="helm", help="the helm program")
    parser.add_argument("--output", type=Path, default=Path("dist/release"), help="folder, emptied before")
    parser.add_argument("--images", type=Path, default=Path("dist"), help="where make image-... left the images' SBOMs")
    parser.add_argument("--charts", help="address of the chart repository, for index.yaml")
    given = parser.parse_args()
    try:
        release(given.helm, given.output, images=given.images, address=given.charts)
    except FileNotFoundError as error:
        sys.exit(f"{error.filename or given.helm} is not there: install it, or name helm with --helm")
    except ValueError as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
    print((given.output / SUMS).read_text(encoding="utf-8"), end="")
    print(f"files in {given.output}; nothing was published (docs/install.md: what each is for)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
