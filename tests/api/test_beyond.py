"""Settings that a job of so few steps never comes to are said by their path, and refused nowhere."""

from __future__ import annotations

import re

import pytest
from manifests import manifest

from rljob_api.beyond import beyond_the_job
from rljob_api.validation import load_manifest

CRITIC = ["algorithm={name: ppo}", "critic={updatesPerStep: 4, optimizer: {lr: 1e-3, warmupSteps: 50}}"]
DISTILLED = ["training={backend: FSDP, tensorParallel: 1}"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["training.optimizer={warmupSteps: 11}"], "training.optimizer.warmupSteps: 11 is more than the job's 10 upd"),
        (["training.optimizer={warmupSteps: 40, lr: 1e-3}"], "ends at 0.00025 and never comes to 0.001"),
        (["training.optimizer={schedule: linear, decaySteps: 11}"], "training.optimizer.decaySteps: 11 is more than"),
        (CRITIC, "critic.optimizer.warmupSteps: 50 is more than the job's 40 updates"),
        (["records={trajectoriesEverySteps: 11}"], "records.trajectoriesEverySteps: 11 .* no trajectory is kept"),
        (["weightSync={probeEverySteps: 11}"], "weightSync.probeEverySteps: 11 is more than the job's 10 steps"),
        (["records={trackers: [{name: wandb, project: a, samples: 1, samplesEverySteps: 12}]}"], r"trackers\[0\]\.s"),
        (["earlyStop={metric: rollout/raw_reward, patience: 10}"], "earlyStop.patience: 10 is more values than the jo"),
        (["earlyStop={metric: rollout/raw_reward, patience: 6, afterStep: 5}"], "earlyStop.patience: 6 is more values"),
        (["records.profile={firstStep: 9, steps: 4}"], "profile.steps: 9 to 12 are asked for, and .* ends"),
        (["activeDeadlineSeconds=1"], "activeDeadlineSeconds: in 1 s hardly"),
        ([*DISTILLED, "algorithm={name: distill, distill: {teacher: {path: /models/Qwen3-4B}}}"], "teacher.path: is"),
    ],
)  # fmt: skip
def test_one_is_said(settings: list[str], said: str) -> None:
    (sentence,) = beyond_the_job(load_manifest(manifest(*settings, "steps=10")).spec)
    assert sentence.startswith("spec.")
    assert re.search(said, sentence)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["steps=1"],
        ["steps=10", "training.optimizer={warmupSteps: 10}"],
        ["steps=10", "training.optimizer={schedule: cosine, decaySteps: 10}"],
        [*CRITIC, "steps=13"],
        ["earlyStop={metric: rollout/raw_reward, patience: 9}", "steps=10"],
        ["earlyStop={metric: rollout/raw_reward}", "steps=3"],
        ["records.profile={firstStep: 9, steps: 2}", "steps=10"],
        [*DISTILLED, "algorithm={name: distill, distill: {teacher: {path: /t}}}"],
    ],
)
def test_what_the_job_comes_to_is_not_said(settings: list[str]) -> None:
    assert list(beyond_the_job(load_manifest(manifest(*settings)).spec)) == []
