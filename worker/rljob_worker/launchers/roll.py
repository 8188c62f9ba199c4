"""ROLL's configurations: the YAML of a pipeline (RLVR or agentic), as its Ascend guide of 2026-04-27 has them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rljob_worker.launchers.adapters import put_adapters
from rljob_worker.launchers.draft import (
    TRACKERS,
    Draft,
    Rule,
    Setting,
    Settings,
    account_for_all,
    apply,
    drop_unused_critic,
    later,
    listed,
    nowhere,
    number,
    switch,
    take,
    value_of,
    whole,
)
from rljob_worker.launchers.roll_rules import LORA, RULES, TURNS
from rljob_worker.launchers.variables import apply_variables

_RANGE = re.compile(r"\s*list\(range\((\d+)\s*,\s*(\d+)\)\)\s*")

_REFERENCE = nowhere("the trainers hold the reference policy")
_HYDRA = nowhere("the manifest is the configuration")


def is_configuration(document: object) -> bool:
    """Whether a configuration is ROLL's."""
    return isinstance(document, dict) and "actor_train" in document


def apply_settings(draft: Draft, settings: Sequence[Setting]) -> None:
    """Put ROLL's settings into the draft."""
    last = {_without_strategy(setting.name): setting for setting in settings}
    variables = [
        Setting(name.removeprefix("system_envs."), str(setting.value), setting.unknown)
        for name, setting in last.items()
        if name.startswith("system_envs.")
    ]
    others = [
        Setting(name, setting.value, () if name.endswith("strategy_config") else setting.unknown)
        for name, setting in last.items()
        if not name.startswith("system_envs.") and setting.value is not None
    ]
    apply(draft, others, {setting.name: _rule(setting.name) for setting in others}, "")
    found = {setting.name: setting for setting in others}
    drop_unused_critic(draft)
    _place(draft, found)
    _data(draft, found)
    _batch(draft, found)
    _learn(draft, found)
    _record(draft, found)
    apply_variables(draft, variables)
    account_for_all(draft, others)


def _without_strategy(name: str) -> str:
    """A name as the rules have it: `device_mapping` stands beside `strategy_args` or within it."""
    return name.replace(".strategy_args.device_mapping", ".device_mapping").replace(
        ".strategy_args.infer_batch_size", ".infer_batch_size"
    )


def _rule(name: str) -> Rule:
    if rule := RULES.get(name):
        return rule
    if name.startswith("reference."):
        return _REFERENCE
    if name.split(".")[0] in ("defaults", "hydra"):
        return _HYDRA
    if name.startswith(("rewards.", "actor_train.data_args.domain_interleave_probs.", "tracker_kwargs.")):
        return later
    if name.startswith("validation."):
        return nowhere("evaluation: name the held-out data first")
    if re.match(r"(train_env_manager|val_env_manager|custom_envs|max_tokens_per_step)\b", name):
        return nowhere(TURNS)
    return nowhere("unknown to `rljob import roll`")


def devices_of(value: object) -> range:
    """The devices of `list(range(A,B))`, or of a list in order."""
    found = _RANGE.fullmatch(str(value))
    if found:
        return range(int(found[1]), int(found[2]))
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        return range(min(value), max(value) + 1)
    raise ValueError("is no list(range(A,B))")


def _place(draft: Draft, last: Settings) -> None:
    a_node = last.get("num_gpus_per_node")
    mappings = {name: last.get(f"{name}.device_mapping") for name in ("actor_train", "actor_infer")}
    try:
        of_a_node = whole(a_node.value) if a_node else 8
        places = {name: devices_of(setting.value) for name, setting in mappings.items() if setting}
    except ValueError as error:
        for setting in [setting for setting in (a_node, *mappings.values()) if setting]:
            draft.leave(setting, f"{setting.name} {error}; spec.resources")
        return
    train, infer = places.get("actor_train"), places.get("actor_infer")
    if a_node:
        draft.note(a_node, "resources")
    if not train or not infer or set(train) & set(infer):
        last_device = max([max(devices) for devices in places.values() if devices], default=of_a_node - 1)
        nodes = -(-(last_device + 1) // of_a_node)
        draft.assume("mode", "Colocated")
        draft.assume("resources.nodes", nodes)
        draft.assume("resources.devicesPerNode", min(of_a_node, last_device + 1))
        for setting in [setting for setting in mappings.values() if setting]:
            draft.note(setting, "mode", "they share devices")
        return
    draft.assume("mode", "Disaggregated")
    for name, role, devices in (("actor_train", "trainer", train), ("actor_infer", "rollout", infer)):
        nodes = len(devices) // of_a_node
        draft.assume(
            f"resources.{role}",
            {"nodes": nodes, "devicesPerNode": of_a_node} if nodes else {"devicesPerNode": len(devices)},
        )
        if mapping := mappings[name]:
            draft.note(mapping, f"resources.{role}")


_FUNCTIONS: Mapping[str, dict[str, object]] = {"math_rule": {"name": "math"}}
"""Built-in rewards by the names that ROLL's examples give theirs."""


def _data(draft: Draft, last: Settings) -> None:
    files, folder = last.get("actor_train.data_args.file_name"), last.get("actor_train.data_args.dataset_dir")
    key = last.get("actor_train.data_args.messages")
    common: dict[str, object] = {"promptKey": str(key.value)} if key else {}
    common |= {"labelKey": "ground_truth", "applyChatTemplate": True}
    names = [name.split(".")[3] for name in last if name.startswith("actor_train.data_args.domain_interleave_probs.")]
    paths = [_path(str(file), str(folder.value) if folder else "") for file in (listed(files.value) if files else ())]
    rewards = {name.split(".")[1] for name in last if name.startswith("rewards.")}
    for setting in [found for found in (folder, key) if found]:
        draft.note(setting, "data")
    _reward(draft, last, sorted(rewards), one_file=len(paths) == 1)
    if len(paths) == 1 and files:
        draft.put(files, "data", {"path": paths[0], **common, **_known(draft, "data")})
    elif files and len(paths) == len(names):
        weights = [last[f"actor_train.data_args.domain_interleave_probs.{name}"].value for name in names]
        sources = [
            {
                "name": name,
                "path": path,
                **common,
                "weight": weight,
                **({"reward": {"name": "math"}} if name == "math_rule" and not draft.get("reward") else {}),
            }
            for name, path, weight in zip(names, paths, weights, strict=True)
        ]
        draft.put(files, "data", {"sources": sources, **_known(draft, "data")})
    elif files:
        draft.leave(files, "as many files as domains were expected: data.sources")
    for name in names:
        draft.note(last[f"actor_train.data_args.domain_interleave_probs.{name}"], "data.sources[].weight")
    for name in sorted(rewards):
        said = Setting(f"rewards.{name}", "")
        tags = last.get(f"rewards.{name}.tag_included")
        if name in _FUNCTIONS:
            draft.note(said, "reward.parts[].name" if draft.get("reward.by") else "reward.name")
        else:
            draft.leave(said, "reward.python: a function that scores it")
        if tags and draft.get("reward.by"):
            draft.note(tags, "reward.parts[].rows", "values of the column tag")
        elif tags:
            draft.leave(tags, "one source a domain, each with its reward; or reward.by: tag, and parts with rows")


def _reward(draft: Draft, last: Settings, names: list[str], *, one_file: bool) -> None:
    """ROLL sends a row to the reward whose `tag_included` has the row's tag; without tags one reward scores all."""
    tags = {name: setting for name in names if (setting := last.get(f"rewards.{name}.tag_included"))}
    if names == ["math_rule"] and one_file:
        draft.assume("reward", dict(_FUNCTIONS["math_rule"]))
    elif len(names) > 1 and len(tags) == len(names):
        parts = [
            _FUNCTIONS.get(name, {"recordAs": name}) | {"rows": [str(tag) for tag in listed(setting.value)]}
            for name, setting in tags.items()
        ]
        draft.assume("reward", {"by": "tag", "parts": parts})


def _known(draft: Draft, path: str) -> dict[str, object]:
    found = draft.get(path)
    return dict(found) if isinstance(found, dict) else {}


def _path(file: str, folder: str) -> str:
    return file if file.startswith("/") or not folder.startswith("/") else f"{folder}/{file.removeprefix('data/')}"


def _strategy(draft: Draft, last: Settings) -> None:
    """FSDP is what divides weights too: FSDP2 and DeepSpeed's ZeRO-3."""
    name = last.get("actor_train.strategy_args.strategy_name")
    config = last.get("actor_train.strategy_args.strategy_config")
    rows = "fsdp" in str(name and name.value) or "zero3" in str(config and config.value)
    if name and rows:
        draft.put(name, "training.backend", "FSDP")
    elif name:
        draft.leave(name, "training.backend Megatron")
    if config and "offload" in str(config.value):
        draft.put(Setting(config.name, config.value), "training.optimizer.hostOffload", True)
    elif config:
        draft.leave(config, "training.backend FSDP" if rows else "Megatron's distributed optimizer is ZeRO-1 of it")


def _batch(draft: Draft, last: Settings) -> None:
    each = last.get("actor_train.training_args.per_device_train_batch_size")
    steps = last.get("actor_train.training_args.gradient_accumulation_steps")
    mapping = last.get("actor_train.device_mapping")
    if each and steps and mapping:
        try:
            size = whole(each.value) * whole(steps.value) * len(devices_of(mapping.value))
        except ValueError as error:
            draft.leave(steps, f"{error}; training.globalBatchSize")
        else:
            draft.put(steps, "training.globalBatchSize", size, "samples a device x accumulation x devices")
            draft.note(each, "training.globalBatchSize")
    _strategy(draft, last)
    put_adapters(draft, *(last.get(f"actor_train.model_args.{name}") for name in LORA))
    if draft.get("rollout.samplesPerPrompt") is None:
        groups = last.get("train_env_manager.group_size") or last.get(
            "actor_infer.generating_args.num_return_sequences"
        )
        take(draft, groups, "rollout.samplesPerPrompt", whole)
    if draft.get("rollout.maxResponseTokens") is None:
        take(draft, last.get("actor_infer.generating_args.max_new_tokens"), "rollout.maxResponseTokens", whole)
    for name in ("eval_steps", "val_batch_size"):
        if setting := last.get(name):
            draft.leave(setting, "evaluation: name the held-out data first")


def _learn(draft: Draft, last: Settings) -> None:
    """The clip of the ratio, `1 + 2 pg_clip` as the bound of the dual clip, and the KL term, whose estimate is k3."""
    clip, ranged, dual = (last.get(name) for name in ("pg_clip", "use_pg_clip_range", "dual_clip_loss"))
    apart = value_of(draft, ranged, switch, False)
    for name, path in (("pg_clip_low", "algorithm.clipLow"), ("pg_clip_high", "algorithm.clipHigh")):
        take(draft, last.get(name) if apart else clip, path, number)
        if not apart and (own := last.get(name)):
            draft.leave(own, "use_pg_clip_range is not true")
    if ranged:
        draft.leave(ranged, "algorithm.clipLow and algorithm.clipHigh")
    if dual:
        if value_of(draft, dual, switch, False):
            bound = round(1 + 2 * value_of(draft, clip, number, 0.2), 6)
            draft.put(dual, "algorithm.dualClip", bound, "1 + 2 pg_clip")
        else:
            draft.leave(dual, "none, as by default")
    used, coefficient = last.get("use_kl_loss"), last.get("kl_loss_coef")
    if used and value_of(draft, used, switch, False):
        draft.note(used, "algorithm.kl.coefficient")
        draft.assume("algorithm.kl.estimator", "k3")
        take(draft, coefficient, "algorithm.kl.coefficient", number)
    else:
        for setting in [one for one in (used, coefficient) if one]:
            draft.leave(setting, "use_kl_loss is not true")


def _record(draft: Draft, last: Settings) -> None:
    tracker = last.get("track_with")
    project = last.get("tracker_kwargs.project")
    if tracker and not tracker.unknown and str(tracker.value) in TRACKERS:
        found = {"name": str(tracker.value)}
        if project and not project.unknown:
            found["project"] = str(project.value)
            draft.note(project, "records.trackers[].project")
        draft.put(tracker, "records.trackers", [found])
    elif tracker:
        draft.leave(tracker, "TensorBoard is always there")
    for name, setting in last.items():
        if name.startswith("tracker_kwargs") and setting not in (project,):
            draft.leave(Setting(name, "(its value is left out)"), "records.trackers; keys: environment.secrets")
