"""Everything that a job reads before its first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rljob_worker.data.dataset import PromptSource
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.models.facts import ModelFacts
from rljob_worker.models.pictures import PictureFacts
from rljob_worker.rewards.group_filter import GroupFilter
from rljob_worker.rewards.label_check import LabelCheck
from rljob_worker.rewards.model_judge import ModelJudge
from rljob_worker.rewards.runner import RewardRunner
from rljob_worker.rollouts.world import World
from rljob_worker.types import Prompt


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that is read and checked before a process is started."""

    tokenizer: PreTrainedTokenizerBase
    model_folder: Path
    model: ModelFacts
    prompts: PromptSource
    rewards: RewardRunner
    labels: LabelCheck
    evaluation_prompts: list[Prompt]
    group_filter: GroupFilter | None = None
    """Asks `rollout.oversampling.function`, where the job has one; to be closed at the end."""
    hosts: Sequence[EnvironmentHosts] = ()
    """Hosts of environments; to be started, and closed at the end."""
    critic_folder: Path | None = None
    """The critic's starting point; None: `model_folder`, or there is no critic."""
    pictures: PictureFacts | None = None
    """The way that the model takes the data's pictures; None: there are none."""
    teacher_folder: Path | None = None
    """The teacher's checkpoint; None: there is none."""
    judge: ModelJudge | None = None
    """The judge whose model the job runs; None: there is none."""
    worlds: Mapping[str, World] = field(default_factory=dict)
    """Environments, by place in the manifest of their source."""
