"""slime's command line, which vime and Relax have too, with `--vllm-` where slime has `--sglang-`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from math import ceil

from rljob_worker.launchers.draft import (
    Draft,
    Setting,
    Settings,
    account_for_all,
    apply,
    count_rows_whole,
    drop_unused_critic,
    listed,
    number,
    take,
    text,
    value_of,
    whole,
)
from rljob_worker.launchers.shell import Command, Word
from rljob_worker.launchers.slime_rules import RULES, TRACKING, mapping
from rljob_worker.launchers.variables import apply_variables

_FACTOR = 2
"""Default of `rollout.partial.factor`; more needs a higher `rollout.staleness.max`."""
_APART = "partial rollout is built for mode Colocated alone"
_CLUSTER = "KubeRay or `rljob run` starts Ray"


def is_command(command: Command) -> bool:
    """Whether a command starts slime, vime or Relax."""
    return any(word.text.rsplit("/", 1)[-1] in ("train.py", "train_async.py") for word in command.words)


def settings_of(words: Sequence[Word], conditional: set[str]) -> Iterator[Setting]:
    """The flags of a command, each with the values that follow it."""
    begun: list[Word] = []
    for word in [*words, Word("--")]:
        if word.text.startswith("--"):
            if begun:
                yield _setting(begun, conditional)
            name, equals, value = word.text.partition("=")
            begun = [Word(name, (), word.used), Word(value, word.unknown, word.used)] if equals else [word]
        elif begun:
            begun.append(word)


def _setting(words: Sequence[Word], conditional: set[str]) -> Setting:
    used = frozenset[str]().union(*(word.used for word in words))
    unknown = tuple(text for word in words for text in word.unknown)
    values = [word.text for word in words[1:]]
    return Setting(words[0].text, values, unknown, tuple(sorted(used & conditional)))


def apply_command(draft: Draft, command: Command, conditional: set[str], framework: str) -> None:
    """Put a command's flags into the draft."""
    words = [word.text for word in command.words]
    start = next(at for at, word in enumerate(words) if word.rsplit("/", 1)[-1] in ("train.py", "train_async.py"))
    found = list(settings_of(command.words[start + 1 :], conditional))
    last = {setting.name: setting for setting in found}
    apply(draft, last.values(), RULES, f"unknown to `rljob import {framework}`")
    count_rows_whole(draft)
    drop_unused_critic(draft)
    _place(draft, last, words[start].endswith("train_async.py"))
    _learn(draft, last)
    _score(draft, last)
    _evaluate(draft, last)
    _record(draft, last)
    _runtime(draft, command.words[:start], last.get("--train-env-vars"))
    account_for_all(draft, last.values())


def _place(draft: Draft, last: Settings, script_is_async: bool) -> None:
    nodes, devices = last.get("--actor-num-nodes"), last.get("--actor-num-gpus-per-node")
    rollout = last.get("--rollout-num-gpus")
    if colocated := last.get("--colocate"):
        draft.put(colocated, "mode", "Colocated")
        take(draft, nodes, "resources.nodes", whole)
        take(draft, devices, "resources.devicesPerNode", whole)
        if rollout:
            draft.leave(rollout, "colocated engines use all devices of the job")
        return
    draft.assume("mode", "Async" if script_is_async else "Disaggregated")
    take(draft, last.get("--fully-async"), "mode", lambda _: "Async")
    if nodes and nodes.value == ["1"]:
        draft.leave(nodes, "1 is the default")
    else:
        take(draft, nodes, "resources.trainer.nodes", whole)
    take(draft, devices, "resources.trainer.devicesPerNode", whole)
    take(draft, rollout, "resources.rollout.devicesPerNode", whole)
    take(draft, last.get("--max-staleness"), "rollout.staleness.max", whole)


def _learn(draft: Draft, last: Settings) -> None:
    draft.assume("algorithm.aggregation", "SequenceMean")
    take(draft, last.get("--calculate-per-token-loss"), "algorithm.aggregation", lambda _: "TokenMean")
    coefficient = last.get("--kl-loss-coef")
    if used := last.get("--use-kl-loss"):
        draft.note(used, "algorithm.kl.coefficient")
        take(draft, coefficient, "algorithm.kl.coefficient", number)
        if draft.get("algorithm.kl.coefficient") in (0, None):
            draft.assume("algorithm.kl.monitor", True)
    elif coefficient:
        draft.leave(coefficient, "--use-kl-loss is not given")
    _grow(draft, last)
    if draft.get("mode") == "Colocated" and draft.get("rollout.partial") is None:
        # Otherwise tokens of older weights are trained on, and RLJob corrects for them.
        draft.assume("algorithm.tis.enabled", False)
    take(draft, last.get("--use-tis"), "algorithm.tis.enabled", lambda _: True)
    if mask := last.get("--use-opsm"):
        draft.put(mask, "algorithm.offPolicyMask.delta", 1e-4)
        take(draft, last.get("--opsm-delta"), "algorithm.offPolicyMask.delta", number)
    if last.get("--dynamic-sampling-filter-path"):
        _oversample(draft, last)
    elif (setting := last.get("--over-sampling-batch-size")) and draft.get("rollout.partial") is None:
        draft.leave(setting, "without a filter no prompt is sampled beyond the step's")


def _score(draft: Draft, last: Settings) -> None:
    """slime asks no reward of its own where it is given a function, and takes a key of what that returns."""
    function, key = draft.get("reward.python"), last.get("--reward-key")
    if function is not None:
        draft.drop("reward.name", "--custom-rm-path is asked in its place")
        take(draft, key, "reward.args.reward_key", text)
    elif key:
        draft.leave(key, "a built-in reward is a number")


def _grow(draft: Draft, last: Settings) -> None:
    """Partial rollout: groups that a step began and did not train on go on in the next one."""
    setting, more = last.get("--partial-rollout"), last.get("--over-sampling-batch-size")
    if setting is None:
        return
    if draft.get("mode") != "Colocated":
        draft.leave(setting, "responses go on over the steps always" if draft.get("mode") == "Async" else _APART)
        return
    draft.put(setting, "rollout.partial", {}, "tokens of earlier weights are corrected: algorithm.tis")
    prompts = draft.get("rollout.promptsPerStep")
    if more and isinstance(prompts, int) and (count := value_of(draft, more, whole, 0)) > prompts:
        factor = count / prompts
        draft.put(more, "rollout.partial.factor", factor)
        if factor > _FACTOR:
            draft.assume("rollout.staleness.max", ceil(factor) - 1)
    elif more:
        draft.leave(more, f"rollout.partial.factor, {_FACTOR} as by default")


def _oversample(draft: Draft, last: Settings) -> None:
    setting = last["--dynamic-sampling-filter-path"]
    if "check_reward_nonzero_std" not in value_of(draft, setting, text, ""):
        draft.leave(setting, "a function of yours: rollout.oversampling.function")
        return
    if draft.get("mode") != "Colocated":
        draft.leave(setting, "rollout.oversampling is built for mode Colocated alone")
        return
    draft.put(setting, "rollout.oversampling.filter", "ZeroVariance")
    prompts = draft.get("rollout.promptsPerStep")
    if isinstance(prompts, int) and draft.get("rollout.partial") is None:
        more = last.get("--over-sampling-batch-size")
        take(draft, more, "rollout.oversampling.factor", lambda value: max(1.0, whole(value) / prompts))


def _evaluate(draft: Draft, last: Settings) -> None:
    setting = last.get("--eval-prompt-data")
    if setting:
        names = [str(value) for value in listed(setting.value)]
        pairs = list(zip(names[::2], names[1::2], strict=False))
        if len(names) % 2:
            draft.leave(setting, "is no list of NAME PATH pairs: evaluation.sets")
            return
        chat, keys = draft.get("data.applyChatTemplate"), ("promptKey", "labelKey")
        common = {key: value for key in keys if (value := draft.get(f"data.{key}")) is not None}
        sets = [
            {"name": name, "path": path, **common, **({"applyChatTemplate": True} if chat else {})}
            for name, path in pairs
        ]
        draft.put(setting, "evaluation.sets", sets)
    samples = draft.get("evaluation.samplesPerPrompt")
    if setting := last.get("--log-passrate"):
        draft.put(setting, "evaluation.passAt", [1, samples] if isinstance(samples, int) and samples > 1 else [1])
    if draft.get("evaluation.sets") is not None and draft.get("evaluation.temperature") is None:
        draft.assume("evaluation.temperature", draft.get("rollout.temperature") or 1.0)
    if "evaluation" in draft.spec and draft.get("evaluation.sets") is None:
        draft.drop("evaluation", "no held-out data is named")


def _record(draft: Draft, last: Settings) -> None:
    trackers: list[dict[str, str]] = []
    for flag, name in TRACKING.items():
        if setting := last.get(flag):
            trackers.append({"name": name})
            draft.note(setting, "records.trackers")
    for option, key in (("--wandb-project", "project"), ("--wandb-team", "workspace"), ("--wandb-group", "run")):
        if setting := last.get(option):
            if trackers and trackers[0]["name"] == "wandb" and (named := value_of(draft, setting, text, "")):
                trackers[0][key] = named
                draft.note(setting, f"records.trackers[].{key}")
            else:
                draft.leave(setting, f"records.trackers[].{key}")
    if trackers:
        draft.assume("records.trackers", trackers)


def _runtime(draft: Draft, words: Sequence[Word], of_trainers: Setting | None) -> None:
    """Take over what stands before the script's name: `ray job submit` and its environment."""
    if of_trainers:
        _variables(draft, of_trainers, "environment.trainer", mapping)
    for setting in settings_of(words, set()):
        if setting.name == "--runtime-env-json":
            _variables(draft, setting, "environment.variables", lambda value: mapping(value).get("env_vars", {}))
        elif setting.name != "--":
            draft.leave(setting, _CLUSTER)


def _variables(draft: Draft, setting: Setting, place: str, read: Callable[[object], object]) -> None:
    try:
        found = read(setting.value)
        if not isinstance(found, dict):
            raise ValueError("has no mapping of variables")
    except ValueError as error:
        draft.leave(setting, str(error))
        return
    said = [Setting(str(name), str(value), _expansions(str(value))) for name, value in found.items()]
    apply_variables(draft, said, place)


def _expansions(value: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\$\w+|\$\{[^}]*\}|\$\([^)]*\)", value))
