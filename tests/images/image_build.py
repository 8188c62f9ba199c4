"""Carries out a stage of a Dockerfile in a folder, without a container: its COPY and RUN lines, at other paths."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pydantic

ROOT = Path(__file__).parents[2]


def dockerfile(image: str) -> Path:
    return ROOT / "images" / image / "Dockerfile"


def instructions(image: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile(image).read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, value) for name, _, value in (line.partition(" ") for line in lines if line.strip())]


def stages(image: str) -> list[list[tuple[str, str]]]:
    """The instructions of each stage, its FROM first."""
    found: list[list[tuple[str, str]]] = []
    for instruction in instructions(image):
        if instruction[0] == "FROM":
            found.append([])
        if found:
            found[-1].append(instruction)
    return found


class Build:
    """A stage's lines, one after another; `/opt/rljob` and `/build` are folders below `folder`.

    Args:
        folder: an empty folder.
        arguments: build arguments (`--build-arg`), and variables of the base image.
        requirements: packages of the lock file that are installed; the others would take minutes.
    """

    def __init__(self, folder: Path, arguments: dict[str, str], requirements: tuple[str, ...]) -> None:
        self.folder, self.given, self.requirements = folder, arguments, requirements
        self.environment, self.build = folder / "opt/rljob", folder / "build"
        programs = folder / "bin"
        for made in (self.build, programs, self.environment.parent):
            made.mkdir(parents=True)
        # The base image's python3: one with pip, and not in an environment of its own.
        (programs / "python3").symlink_to(sys._base_executable)  # type: ignore[attr-defined]
        self.variables = {**os.environ, **arguments, "PATH": f"{self.environment}/bin:{programs}:/usr/bin:/bin"}
        self.variables.pop("PYTHONPATH", None)

    def here(self, text: str) -> str:
        """The text with the image's paths replaced."""
        return text.replace("/opt/rljob", str(self.environment)).replace("/build/", f"{self.build}/")

    def carry_out(self, instruction: tuple[str, str]) -> subprocess.CompletedProcess[str] | None:
        """One line; the outcome of a RUN."""
        name, value = instruction
        if name == "ARG":
            argument, _, default = value.partition("=")
            self.variables[argument] = self.given.get(argument, default.strip('"'))
        elif name == "COPY":
            self._copy(value.split())
        elif name == "RUN":
            command = ["bash", "-eo", "pipefail", "-c", self.here(value)]
            return subprocess.run(
                command, cwd=self.build, env=self.variables, capture_output=True, text=True, timeout=300, check=False
            )
        return None

    def _copy(self, paths: list[str]) -> None:
        *sources, target = paths
        place = Path(self.here(target))
        for source in sources:
            into = place / Path(source).name if target.endswith("/") else place
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                into.parent.mkdir(parents=True, exist_ok=True)
                into.write_text(self._shortened(ROOT / source), encoding="utf-8")

    def _shortened(self, source: Path) -> str:
        text = source.read_text(encoding="utf-8")
        if source.parent.name != "requirements" or source.stem == "build":
            return text
        blocks = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
        return "".join(block for block in blocks if block.split("==")[0] in self.requirements)

    def see_packages_of_the_tests(self) -> None:
        """Let the environment see what the tests run with, as it sees what its base holds."""
        packages = self.environment / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        (packages / "base.pth").write_text(f"{Path(pydantic.__file__).parents[1]}\n", encoding="utf-8")
