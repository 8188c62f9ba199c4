"""Places of models in a manifest: folders of this machine, and what may be another machine's or a hub's."""

from __future__ import annotations

from pathlib import Path

from rljob_api import derived
from rljob_api.spec import JudgeSpec, RLJobSpec
from rljob_worker.errors import UserError
from rljob_worker.host.paths import home_expanded, what_is_at

MODEL_FOLDER = "a folder with config.json, *.safetensors and tokenizer files, or the id of a hub (owner/name)"
TEACHER_PATH = "spec.algorithm.distill.teacher.path"
CRITIC_PATH = "spec.critic.model.path"


def judge_path(spec: RLJobSpec, judge: JudgeSpec) -> str:
    """Field of the path of a judge's model."""
    return f"spec.judges[{spec.judges.index(judge)}].model.path"


def paths_beside(spec: RLJobSpec) -> list[tuple[str, str]]:
    """Field and path of each model that is trained or asked beside the policy: a teacher, a critic of its own start."""
    critic, distill = derived.critic(spec), spec.algorithm.distill
    paths = [] if distill is None else [(TEACHER_PATH, distill.teacher.path)]
    return paths if critic is None or critic.model is None else [*paths, (CRITIC_PATH, critic.model.path)]


def folder_here(path: str, field: str) -> Path | None:
    """The folder of a model on this machine; None where nothing of that path is here.

    Raises:
        UserError: the path, of the manifest's `field`, leads to something else than a folder, or cannot be followed.
    """
    try:
        folder = home_expanded(path)
        kind = what_is_at(folder)
    except OSError as error:
        raise UserError(f"{field}: {path}: {error.strerror}; {MODEL_FOLDER} is needed") from None
    if kind in ("folder", "nothing"):
        return folder if kind == "folder" else None
    wrong = "file" if kind == "file" else "pipe or device"
    raise UserError(f"{field}: {folder} is a {wrong}: {MODEL_FOLDER} is needed")


def folder_or_elsewhere(path: str, field: str) -> Path | None:
    """The same; UserError also for a path that says itself that it is of this machine (`./model`), and is not here."""
    folder = folder_here(path, field)
    if folder is None and path.startswith(("./", "../")):
        raise UserError(f"{field}: {path} does not exist; {MODEL_FOLDER} is needed")
    return folder
