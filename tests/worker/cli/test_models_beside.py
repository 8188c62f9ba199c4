"""Paths of a teacher, a critic's start and a judge's model are looked at as that of the policy is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api import RLJob, RLJobSpec
from rljob_worker.cli.model_folder import check_folders_beside
from rljob_worker.data.hub import folder_beside
from rljob_worker.driver.preflight import apply_environment
from rljob_worker.errors import UserError
from rljob_worker.models.judge_model import check_judge_folder
from rljob_worker.models.places import folder_here
from rljob_worker.planning.critic import critic_of
from rljob_worker.planning.judge import judge_memory
from rljob_worker.planning.teacher import teacher_of

EXAMPLES = Path(__file__).parents[3] / "examples"
NO_MODEL: Any = None


def teacher(path: str) -> RLJobSpec:
    job = yaml.safe_load((EXAMPLES / "distill.yaml").read_text())
    job["spec"]["algorithm"]["distill"]["teacher"]["path"] = path
    return RLJob.model_validate(job).spec


def critic(path: str) -> RLJobSpec:
    job = yaml.safe_load((EXAMPLES / "ppo.yaml").read_text())
    job["spec"].setdefault("critic", {})["model"] = {"path": path}
    return RLJob.model_validate(job).spec


def judge(path: str) -> RLJobSpec:
    job = yaml.safe_load((EXAMPLES / "judge-model.yaml").read_text())
    job["spec"]["judges"][0]["model"]["path"] = path
    return RLJob.model_validate(job).spec


KINDS: dict[str, tuple[Callable[[str], RLJobSpec], Callable[[RLJobSpec], object], Callable[[RLJobSpec], object]]] = {
    "spec.algorithm.distill.teacher.path": (teacher, check_folders_beside, lambda spec: teacher_of(spec, NO_MODEL)),
    "spec.critic.model.path": (critic, check_folders_beside, lambda spec: critic_of(spec, NO_MODEL)),
    "spec.judges[0].model.path": (judge, check_judge_folder, lambda spec: judge_memory(spec, None, 0)),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/config.json").write_text('{"model_type": ')
    return tmp_path


@pytest.mark.parametrize("field", KINDS)
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("~no-such-user/model", "there is no such user, or the user has no home folder; a folder with config.json"),
        (f"{'x' * 300}/model", "File name too long; a folder with"),
        ("./file", "file is a file: a folder with"),
        ("/dev/null", "is a pipe or device: a folder with"),
        ("./absent", "./absent does not exist; a folder with"),
        ("./empty", "of empty: empty/config.json: no such file"),
        ("./torn", "torn/config.json: not valid JSON: the file is cut off"),
        ("./bare", "of bare: bare: no weights"),
    ],
)
def test_what_is_no_model_is_refused_by_its_field(here: Path, field: str, path: str, said: str) -> None:
    make, check, _ = KINDS[field]
    with pytest.raises(UserError) as caught:
        check(make(path))
    assert str(caught.value).startswith(f"{field}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("field", KINDS)
@pytest.mark.parametrize("path", ["someone/teacher", "/models/of-the-cluster"])
def test_what_may_be_elsewhere_is_left_to_the_job(here: Path, field: str, path: str) -> None:
    make, check, plan = KINDS[field]
    check(make(path))
    assert plan(make(path)) is not None if field != "spec.critic.model.path" else folder_here(path, field) is None


@pytest.mark.parametrize("field", KINDS)
def test_a_plan_names_a_home_that_nobody_has(field: str) -> None:
    make, _, plan = KINDS[field]
    with pytest.raises(UserError, match="~no-such-user/model: there is no such user"):
        plan(make("~no-such-user/model"))


def test_a_file_is_not_asked_of_a_hub(here: Path) -> None:
    with pytest.raises(UserError, match=r"^spec.x: file is a file: a folder with config.json"):
        folder_beside("file", teacher("a/b").model.hub, "spec.x")


def test_a_python_path_of_a_home_that_nobody_has_is_named() -> None:
    job = yaml.safe_load((EXAMPLES / "quickstart.yaml").read_text())
    job["spec"]["environment"] = {"pythonPath": ["/code", "~no-such-user/code"]}
    with pytest.raises(
        UserError, match=r"^spec.environment.pythonPath\[1\]: ~no-such-user/code: there is no such user"
    ):
        apply_environment(RLJob.model_validate(job).spec)
