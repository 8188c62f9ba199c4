"""Files beside a manifest."""

from __future__ import annotations

from pathlib import Path

import pytest
from manifests import manifest

from rljob_api.local_files import local_files, resolved
from rljob_api.rewards import function_file
from rljob_api.validation import load_manifest


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("a.b:f", None),
        (None, None),
        ("a.py:f", ("a.py", "f")),
        ("./x y/a.py:f", ("./x y/a.py", "f")),
        ("/a/b.py:f", ("/a/b.py", "f")),
    ],
)
def test_what_is_a_file(path: str | None, file: tuple[str, str] | None) -> None:
    assert function_file(path) == file


def test_relative_files_are_those_of_the_manifests_folder(tmp_path: Path) -> None:
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("")
    job = load_manifest(
        manifest(
            "reward={parts: [{python: ./one.py:f}, {python: package.module:g}]}",
            "evaluation.data={path: c, applyChatTemplate: true, chat: {templateFile: two.py}}",
            "data={sources: [{path: a, reward: {python: two.py:h}}, {path: b, reward: {python: /elsewhere/x.py:f}}]}",
        )
    )
    assert list(local_files(job.spec)) == [
        ("spec.data.sources[0].reward.python", "two.py"),
        ("spec.data.sources[1].reward.python", "/elsewhere/x.py"),
        ("spec.reward.parts[0].python", "./one.py"),
        ("spec.evaluation.data.chat.templateFile", "two.py"),
    ]
    assert [file for _, file in local_files(resolved(job, tmp_path).spec)] == [
        str(tmp_path / "two.py"),
        "/elsewhere/x.py",
        str(tmp_path / "one.py"),
        str(tmp_path / "two.py"),
    ]
    assert resolved(job, tmp_path).metadata == job.metadata
    (tmp_path / "one.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"spec\.reward\.parts\[0\]\.python: \./one\.py: there is no file /"):
        resolved(job, tmp_path)


def test_the_file_of_an_agent_is_one(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("")
    job = load_manifest(
        manifest(
            'data={path: a, applyChatTemplate: true, environment: {agent: {python: "./agent.py:play"}}}',
            "episodes={maxTurns: 4, maxTokens: 9000}",
        )
    )
    assert list(local_files(resolved(job, tmp_path).spec)) == [
        ("spec.data.environment.agent.python", str(tmp_path / "agent.py"))
    ]
