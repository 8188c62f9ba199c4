"""The operator's image and lock file: what it needs, nothing heavy, nothing that is not pinned."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "images/operator/Dockerfile").read_text(encoding="utf-8")
LOCK = (ROOT / "requirements/operator.txt").read_text(encoding="utf-8")
FORBIDDEN = ("torch", "ray", "vllm", "megatron", "numpy", "transformers", "rljob_worker")

ENTRY_POINTS = ("rljob_operator.main", "rljob_operator.plugin.main")


def locked() -> dict[str, str]:
    """Name -> version of each package in the lock file."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", LOCK, re.MULTILINE))


def imported_packages() -> set[str]:
    """Top-level packages that the image's code imports, inside functions too, apart from the standard library's."""
    names = set()
    for folder in ("crds/rljob_api", "operator/rljob_operator"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module.split(".")[0])
    return names - sys.stdlib_module_names - {"rljob_api", "rljob_operator"}


@pytest.mark.parametrize("module", ENTRY_POINTS)
def test_it_runs_without_the_workers_packages(module: str) -> None:
    code = textwrap.dedent(f"""
        import importlib, sys

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {FORBIDDEN!r}:
                    raise ImportError(f"the operator imports {{name}}")

        sys.meta_path.insert(0, Refuse())
        assert callable(importlib.import_module({module!r}).main)
        print(*sorted({{name.split(".")[0] for name in sys.modules}}))
    """)
    path = f"{ROOT / 'crds'}:{ROOT / 'operator'}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert not set(FORBIDDEN) & set(done.stdout.split())


def test_it_starts_as_a_user_without_a_name() -> None:
    """The user has no entry in the system's list, as in its image: only the environment has a home folder."""
    code = textwrap.dedent("""
        import pwd, runpy, sys

        def nobody(uid):
            raise KeyError(uid)

        pwd.getpwuid = nobody
        sys.argv = ["rljob-operator", "--help"]
        runpy.run_module("rljob_operator.main", run_name="__main__")
    """)
    (line,) = re.findall(r"^ENV (.+)$", DOCKERFILE, re.MULTILINE)
    given = dict(pair.split("=", 1) for pair in line.split())
    path = f"{ROOT / 'crds'}:{ROOT / 'operator'}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=given | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_lock_has_every_imported_package_with_hashes() -> None:
    distributions = {"yaml": "pyyaml", "prometheus_client": "prometheus-client", "pydantic_core": "pydantic-core"}
    wanted = {distributions.get(name, name.replace("_", "-")) for name in imported_packages()}
    assert {"pydantic", "pyyaml"} <= wanted <= set(locked())
    assert not set(FORBIDDEN) & set(locked())
    blocks = re.split(r"^(?=\S)", LOCK, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(locked()) <= 40
    assert all("--hash=sha256:" in block for block in blocks)


def test_lock_agrees_with_the_lock_of_the_development_environment() -> None:
    """The tested versions are those that run."""
    text = (ROOT / "requirements/cpu.txt").read_text(encoding="utf-8")
    tested = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE))
    assert {name: tested.get(name) for name in locked()} == locked()


def test_lock_has_wheels_for_both_architectures() -> None:
    markers = re.findall(r"^[^\s#][^;]*;(.*)\\$", LOCK, re.MULTILINE)
    assert markers
    for marker in markers:
        assert ("x86_64" in marker) == ("aarch64" in marker), marker


def test_project_names_the_commands_and_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"]["rljob-operator"] == "rljob_operator.main:main"
    assert project["project"]["scripts"]["kubectl-rljob"] == "rljob_operator.plugin.main:main"
    assert "operator/rljob_operator" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    extra = {
        re.split(r"[<>=\[]", entry)[0].lower() for entry in project["project"]["optional-dependencies"]["operator"]
    }
    base = {re.split(r"[<>=\[]", entry)[0].lower() for entry in project["project"]["dependencies"]}
    assert extra | base <= set(locked())


def test_image_runs_as_a_numbered_user_from_a_pinned_base() -> None:
    instructions = [line.split(maxsplit=1) for line in DOCKERFILE.splitlines() if re.match(r"[A-Z]+ ", line)]
    stages = [index for index, (name, _) in enumerate(instructions) if name == "FROM"]
    final = instructions[stages[-1] :]
    (user,) = [value for name, value in final if name == "USER"]
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user), "a name cannot be checked against runAsNonRoot"
    assert not [value for name, value in final if name == "RUN"]
    assert all("${BASE_IMAGE}" in instructions[index][1] for index in stages)
    (base,) = [value for name, value in instructions if name == "ARG" and value.startswith("BASE_IMAGE=")]
    assert re.fullmatch(r"BASE_IMAGE=python:3\.1[12]\.\d+-slim-\w+", base)


def test_image_names_no_index_and_installs_only_what_is_locked() -> None:
    assert not re.search(r"https?://|--index-url|--extra-index|--trusted-host|apt-get|curl|wget", DOCKERFILE)
    assert not re.search(r"https?://|--index-url", LOCK)
    assert DOCKERFILE.count(" install ") == 1
    for option in ("--require-hashes", "--only-binary :all:", "--no-deps", "-r /build/operator.txt"):
        assert option in DOCKERFILE
    for source in re.findall(r"^COPY (?!--from)(\S+)", DOCKERFILE, re.MULTILINE):
        assert (ROOT / source).exists(), source
