"""Everything that a job reads, checked before any process is started."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api import RLJobSpec, derived
from rljob_api.beyond import beyond_the_job
from rljob_api.blocks import path_text
from rljob_api.rules.model_config import parallel_findings
from rljob_api.spec import ModelSpec, TrainingBackend
from rljob_worker.checkpoints.reader import checkpoint_root
from rljob_worker.data.dataset import PromptSource, load_evaluation_prompts
from rljob_worker.data.hub import snapshot
from rljob_worker.data.pictures import check_tokens
from rljob_worker.data.reward_rows import unused_parts
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.devices.kinds import device_kind
from rljob_worker.driver.preflight import check_engine_arguments, check_room
from rljob_worker.engine.arguments import longest_prompt, max_model_length, room_for_prompts
from rljob_worker.engine.platforms import engine_platform
from rljob_worker.errors import UserError
from rljob_worker.models.facts import PICTURE_MODELS, ModelFacts, read_hf_config
from rljob_worker.models.hf_check import check_hf_weights, checkpoint_bytes
from rljob_worker.models.json_files import check_json_files
from rljob_worker.models.pictures import PictureFacts
from rljob_worker.models.random_model import make_random_model
from rljob_worker.models.trained import TrainedModel, check_trained_sizes, trained_model
from rljob_worker.rewards.group_filter import group_filter_of
from rljob_worker.rewards.label_check import LabelCheck
from rljob_worker.rewards.model_judge import model_judge
from rljob_worker.rewards.row_check import check_tests
from rljob_worker.rewards.runner import RewardRunner
from rljob_worker.rewards.scorers import Scorers
from rljob_worker.rollouts.inputs import Inputs
from rljob_worker.rollouts.worlds import JobEnvironments
from rljob_worker.trainer.critic_folder import critic_start
from rljob_worker.trainer.teacher_folder import teacher_folder
from rljob_worker.waiting import waiting_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("rljob.data")

MODEL_FOLDER = "model"
"""In the run folder: config and tokenizer of the model, and a random model's weights."""
_MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def read_inputs(spec: RLJobSpec, folder: Path, *, saves: bool = True) -> Inputs:
    """Model, tokenizer, data, environments and rewards, each checked.

    A random model and its tokenizer are made in the run folder.

    Args:
        spec: the job.
        folder: its run folder.
        saves: whether there will be checkpoints, which need room.
    """
    private = [folder, checkpoint_root(folder, spec.checkpoint.path)]
    with waiting_for("the environments of spec.data and spec.evaluation to be tried"):
        environments = JobEnvironments(spec, private)
    own = folder / MODEL_FOLDER
    if spec.model.path is not None and (here := Path(spec.model.path).expanduser()).is_dir():
        check_json_files(here)
    with waiting_for("the tokenizer of spec.model"):
        prepare_tokenizer(spec, own, environments.spoken() if spec.model.random is not None else ())
    model_folder = _model_folder(spec.model, own)
    model = _checked_model(spec, model_folder)
    size = checkpoint_bytes(model, spec.training.precision, spec.training.lora)
    tokenizer = load_tokenizer(own)
    check_engine_arguments(list(spec.rollout.engine_args))
    if spec.model.random is None:
        _check_weights(model_folder, model, tokenizer)
    length = max_model_length(spec, model)
    beside, of_critic = critic_start(spec, tokenizer, model_folder, length)
    taught_by = teacher_folder(spec, tokenizer, model, length)
    judge = model_judge(spec)
    if saves:
        check_room(spec, folder, size + of_critic)
    limit = longest_prompt(spec, model)
    evaluation_limit = _longest_evaluated(spec, limit, length)
    pictures = _pictures(spec, model, model_folder, tokenizer)
    with waiting_for("the rows of spec.data and spec.evaluation to be read"):
        tools = environments.tools()
        prompts = PromptSource(spec, tokenizer, max_prompt_tokens=limit, tools=tools)
        scored = prompts.scored()
        evaluation_prompts = load_evaluation_prompts(
            spec, tokenizer, max_prompt_tokens=evaluation_limit, scored=scored, tools=tools
        )
    routed = {one.loaded.field: one.routed for one in scored if one.routed is not None}
    for sentence in [*unused_parts(routed.values()), *beyond_the_job(spec)]:
        logger.warning("%s", sentence)
    check_tests(scored)
    with waiting_for("spec.reward to be imported and tried"):
        rewards = RewardRunner(
            Scorers(spec, tokenizer, columns=prompts.columns(), routed=routed, private=private, judge=judge)
        )
        group_filter = group_filter_of(spec, rewards, prompts.columns())
    with waiting_for("turns of spec.data and spec.evaluation to be tried with the model's tokenizer"):
        first = {one.environment: one for one in reversed(evaluation_prompts) if one.environment is not None}
        worlds = environments.worlds(tokenizer, model_folder, {**first, **prompts.first()})
    return Inputs(
        tokenizer=tokenizer,
        model_folder=model_folder,
        model=model,
        prompts=prompts,
        rewards=rewards,
        labels=LabelCheck(scored),
        evaluation_prompts=evaluation_prompts,
        group_filter=group_filter,
        hosts=environments.hosts,
        critic_folder=beside,
        teacher_folder=taught_by,
        judge=judge,
        worlds=worlds,
        pictures=pictures,
    )


def _model_folder(model: ModelSpec, own: Path) -> Path:
    """The folder with the starting weights: `own` with random ones, or a checkpoint whose config is copied there."""
    if model.random is None:
        folder = checkpoint_folder(model)
        check_json_files(folder)
        shutil.copyfile(folder / "config.json", own / "config.json")
        return folder
    if not (own / "config.json").is_file():
        make_random_model(model.random, own, own)
    return own


def _checked_model(spec: RLJobSpec, folder: Path) -> TrainedModel:
    """The model of a folder; UserError where trainers or engines cannot have it as the job says."""
    # Of a local folder and of random weights the command line has looked at it already.
    for finding in parallel_findings(read_hf_config(folder), spec):
        raise UserError(f"{path_text(('spec', *finding.path))}: {finding.wrong}; allowed: {finding.allowed}")
    model = trained_model(spec.training.backend, folder)
    check_trained_sizes(model, spec.training)
    if spec.rollout.router_replay and not any(model.moe_layers):
        raise UserError("spec.rollout.routerReplay: the model has no experts; leave it out")
    engine_platform(device_kind(spec.resources).name).check_model(spec, model)
    return model


def _check_weights(folder: Path, model: TrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """UserError where a checkpoint is not whole, or has a tokenizer of another model."""
    with waiting_for(f"the weights in {folder} to be looked at"):
        check_hf_weights(folder, model)
    if len(tokenizer) > model.vocab_size:
        raise UserError(
            f"spec.model.path: the tokenizer has {len(tokenizer)} tokens, the model's embedding {model.vocab_size} "
            "(vocab_size of its config.json): they are not of one model"
        )


def _longest_evaluated(spec: RLJobSpec, trained: int, length: int) -> int:
    """Tokens of an evaluation's longest prompt: as `trained`, or what answers of its own leave of `length`."""
    if spec.evaluation is None or spec.evaluation.max_response_tokens is None:
        return trained
    return room_for_prompts(length, "spec.evaluation.maxResponseTokens", spec.evaluation.max_response_tokens)


def _pictures(
    spec: RLJobSpec, model: ModelFacts, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> PictureFacts | None:
    """Read how the model takes the data's pictures; None: there are none, and no token has to be left out for them.

    Raises:
        UserError: the model takes no pictures, or tokenizer and config name another token for them.
    """
    field = next(derived.pictures(spec), None)
    if field is None:
        return None
    if spec.training.backend is not TrainingBackend.FSDP or model.model_type not in PICTURE_MODELS:
        raise UserError(
            f"spec.{field}: the data have pictures, and model_type {model.model_type!r} takes none; use a model of "
            f"{' or '.join(PICTURE_MODELS)}"
        )
    facts = PictureFacts.of_folder(folder)
    check_tokens(tokenizer, facts)
    return facts


def checkpoint_folder(model: ModelSpec) -> Path:
    """The folder of `model.path`, fetched from its hub where there is none here; UserError when that cannot be done."""
    assert model.path is not None
    local = Path(model.path).expanduser()
    if local.is_dir():
        return local
    return snapshot(model.path, model.hub, "spec.model", revision=model.revision, patterns=_MODEL_FILES)
