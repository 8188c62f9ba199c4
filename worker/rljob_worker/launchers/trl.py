"""TRL's GRPO: the keywords of `GRPOConfig` and `GRPOTrainer` in a script, YAML, or flags of `trl grpo`.

A script is read as a syntax tree and never imported. The names are those of TRL 1.16.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping, Sequence

from rljob_api.how_many import how_many
from rljob_worker.errors import UserError
from rljob_worker.launchers.adapters import put_adapters
from rljob_worker.launchers.draft import (
    TRACKERS,
    Draft,
    Rule,
    Setting,
    Settings,
    account_for_all,
    apply,
    later,
    listed,
    nowhere,
    number,
    one_of,
    switch,
    take,
    text,
    to,
    value_of,
    whole,
)
from rljob_worker.launchers.shell import Command

_LOSSES = {"grpo": "grpo", "dapo": "grpo", "bnpo": "grpo", "dr_grpo": "dr_grpo", "cispo": "cispo", "sapo": "sapo"}
_AGGREGATIONS = {"grpo": "SequenceMean", "dapo": "TokenMean", "bnpo": "TokenMean"}
_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "constant_with_warmup": "constant"}
_REWARDS = {"accuracy_reward": "math"}
_MICRO = "by tokens: training.maxTokensPerMicroBatch"
_VLLM = "always vLLM, started by the job"

_STEPS = 4
"""Names and subscripts that are followed from a trainer to the data that it is given."""
_LORA = ("lora_r", "lora_alpha", "lora_target_modules")
RULES: dict[str, Rule] = {
    **dict.fromkeys(("model", "model_name_or_path"), to("model.path", text)),
    "model_revision": to("model.revision", text),
    "trust_remote_code": nowhere("no code of a model folder is run"),
    **dict.fromkeys(("train_dataset", "eval_dataset"), later),
    "dataset_name": to("data.path", text),
    "dataset_config": to("data.subset", text),
    "dataset_train_split": to("data.split", text),
    "reward_funcs": later,
    "reward_weights": nowhere("reward.parts[].weight"),
    "max_steps": to("steps", whole),
    "num_train_epochs": nowhere("spec.steps is rows x epochs / prompts of a step"),
    "seed": to("seed", whole),
    "shuffle_dataset": to("data.shuffle", switch),
    "num_generations": to("rollout.samplesPerPrompt", whole),
    "max_completion_length": to("rollout.maxResponseTokens", whole),
    "max_prompt_length": to("data.maxPromptTokens", whole),
    "temperature": to("rollout.temperature", number),
    "top_p": to("rollout.topP", number),
    "top_k": to("rollout.topK", lambda value: max(0, whole(value))),
    "min_p": to("rollout.minP", number),
    "chat_template_kwargs": to("data.chat.templateArgs", lambda value: value),
    "use_vllm": nowhere(_VLLM),
    "vllm_mode": later,
    **dict.fromkeys(
        ("vllm_server_host", "vllm_server_port", "vllm_server_base_url", "vllm_server_timeout", "vllm_group_port",
         "vllm_model_impl"),
        nowhere(_VLLM),
    ),
    "vllm_gpu_memory_utilization": to("rollout.memoryFraction", number),
    "vllm_tensor_parallel_size": to("rollout.tensorParallel", whole),
    "vllm_max_model_length": to("rollout.engineArgs.max_model_len", whole),
    "vllm_enable_sleep_mode": nowhere("colocated engines always sleep while the trainer works"),
    "beta": to("algorithm.kl.coefficient", number),
    "num_iterations": lambda draft, setting: draft.leave(
        setting, "always 1" if str(setting.value) == "1" else "always 1: several updates a step, each on other samples"
    ),
    "epsilon": later,
    "epsilon_high": later,
    "delta": nowhere("algorithm.dualClip bounds negative advantages alone"),
    "loss_type": to("algorithm.name", one_of(_LOSSES, "no such loss here; docs/algorithms.md")),
    "importance_sampling_level": later,
    "scale_rewards": lambda draft, setting: _scale(draft, setting),
    "mask_truncated_completions": nowhere("truncated responses are trained on and counted"),
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
                     "generation_batch_size"), later),
    "per_device_eval_batch_size": nowhere(_MICRO),
    "learning_rate": to("training.optimizer.lr", number),
    "lr_scheduler_type": to("training.optimizer.schedule", one_of(_SCHEDULES, "constant, linear or cosine")),
    "warmup_steps": to("training.optimizer.warmupSteps", whole),
    "warmup_ratio": nowhere("training.optimizer.warmupSteps, in updates"),
    "weight_decay": to("training.optimizer.weightDecay", number),
    "adam_beta1": to("training.optimizer.beta1", number),
    "adam_beta2": to("training.optimizer.beta2", number),
    "adam_epsilon": to("training.optimizer.eps", number),
    "max_grad_norm": to("training.optimizer.clipGrad", number),
    "bf16": to("training.precision", lambda value: "bf16" if switch(value) else "fp32"),
    "gradient_checkpointing": to("training.recompute", lambda value: "Full" if switch(value) else "None"),
    "logging_steps": nowhere("every step has a record"),
    "log_completions": nowhere("records.trajectoriesEverySteps, on by default"),
    "output_dir": to("checkpoint.path", text),
    "save_steps": to("checkpoint.everySteps", whole),
    "save_total_limit": to("checkpoint.keep", whole),
    "save_strategy": nowhere("checkpoint.everySteps"),
    "eval_steps": nowhere("evaluation: name the held-out data first"),
    "eval_strategy": nowhere("evaluation: name the held-out data first"),
    "report_to": later,
    "run_name": nowhere("records.trackers[].run"),
    **dict.fromkeys(("use_peft", *_LORA), later),
    "peft_config": nowhere("training.lora: rank, alpha and targets of the LoraConfig"),
    "attn_implementation": nowhere("there is one way"),
    "dtype": nowhere("training.precision"),
    "remove_unused_columns": nowhere("all columns of a row go to the reward function"),
}  # fmt: skip


def _scale(draft: Draft, setting: Setting) -> None:
    said = str(setting.value).lower()
    if said in ("true", "group", "false", "none"):
        draft.put(setting, "algorithm.normalizeByStd", said in ("true", "group"))
    else:
        draft.leave(setting, "algorithm.rewards scales by the group or the batch")


def is_command(command: Command) -> bool:
    """Whether a command starts TRL."""
    words = [word.text for word in command.words]
    return words[:2] == ["trl", "grpo"] or any(word.rsplit("/", 1)[-1].startswith("grpo") for word in words)


def settings_of_script(source: str) -> Iterator[Setting]:
    """The keywords with which a script makes its `GRPOConfig` and `GRPOTrainer`.

    Raises:
        UserError: it is no Python, or makes neither.
    """
    try:
        with warnings.catch_warnings():
            # The parser's, of the script's own style.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"is no Python: {error}") from None
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) in ("GRPOConfig", "GRPOTrainer")
    ]
    if not calls:
        raise UserError("makes neither a GRPOConfig nor a GRPOTrainer")
    constants, assigned = _constants(tree), _assigned(tree)
    for call in calls:
        for keyword in call.keywords:
            if keyword.arg == "train_dataset" and (named := _loaded(keyword.value, assigned)):
                yield from named
            elif keyword.arg not in (None, "args", "processing_class", "callbacks"):
                yield _keyword(str(keyword.arg), keyword.value, constants)


def _called(node: ast.Call) -> str:
    function = node.func
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """The last expression that each name of the module is assigned."""
    return {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    }


def _loaded(value: ast.expr, assigned: Mapping[str, ast.expr]) -> list[Setting]:
    """The names in `load_dataset(NAME, CONFIG, split=SPLIT)`, as flags of `trl grpo`; nothing for anything else."""
    split: list[Setting] = []
    for _ in range(_STEPS):
        if isinstance(value, ast.Name) and value.id in assigned:
            value = assigned[value.id]
        elif isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant) and not split:
            split = [Setting("dataset_train_split", str(value.slice.value))]
            value = value.value
    if not isinstance(value, ast.Call) or _called(value) != "load_dataset":
        return []
    try:
        given = [ast.literal_eval(argument) for argument in value.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in value.keywords}
    except (ValueError, TypeError, MemoryError, RecursionError):
        return []
    named |= dict(zip(("path", "name"), given, strict=False))
    if len(given) > 2 or not named.keys() <= {"path", "name", "split", "data_files"}:
        return []
    if named.get("path") in ("json", "parquet"):
        # A file has one split.
        named, split = {"path": named.get("data_files")}, []
    elif "data_files" in named:
        return []
    places = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
    found = [Setting(places[key], said) for key, said in named.items() if key in places]
    return [*found, *split] if all(isinstance(one.value, str) for one in found) and "path" in named else []


def _constants(tree: ast.Module) -> dict[str, object]:
    found: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except (ValueError, TypeError, MemoryError, RecursionError):
                found.pop(node.targets[0].id, None)
    return found


def _keyword(name: str, value: ast.expr, constants: dict[str, object]) -> Setting:
    if isinstance(value, ast.Name) and value.id in constants:
        return Setting(name, constants[value.id])
    try:
        return Setting(name, ast.literal_eval(value))
    except (ValueError, TypeError, MemoryError, RecursionError):
        written = ast.unparse(value)
        # Functions are named, not computed.
        return Setting(name, written, () if name in ("reward_funcs", "train_dataset", "eval_dataset") else (written,))


def apply_settings(draft: Draft, settings: Sequence[Setting], devices: int | None) -> None:
    """Put TRL's settings into the draft.

    Args:
        devices: processes of the training; TRL's batch sizes are for each of them.
    """
    last = {setting.name: setting for setting in settings if setting.value is not None}
    apply(draft, last.values(), RULES, "unknown to `rljob import trl`")
    draft.assume("data.applyChatTemplate", True)
    take(
        draft,
        last.get("vllm_mode"),
        "mode",
        one_of({"colocate": "Colocated", "server": "Disaggregated"}, "no such mode"),
    )
    low = last.get("epsilon")
    take(draft, low, "algorithm.clipLow", number)
    take(draft, last.get("epsilon_high") or low, "algorithm.clipHigh", number)
    if (level := last.get("importance_sampling_level")) and str(level.value) == "sequence":
        draft.put(level, "algorithm.name", "gspo")
    elif level:
        draft.leave(level, "the ratio of algorithm.name")
    loss = str(last["loss_type"].value) if "loss_type" in last else "dapo"
    draft.default(
        algorithm__name="grpo", algorithm__aggregation=_AGGREGATIONS.get(loss),
        algorithm__clipLow=0.2, algorithm__clipHigh=0.2, rollout__samplesPerPrompt=8,
        rollout__maxResponseTokens=256, training__optimizer__schedule="linear", training__optimizer__beta2=0.999,
    )  # fmt: skip
    _adapters(draft, last)
    _batch(draft, last, devices)
    _data(draft, last)
    _record(draft, last)
    account_for_all(draft, last.values())


def _adapters(draft: Draft, last: Settings) -> None:
    used = last.get("use_peft")
    rank, *others = (last.get(name) for name in _LORA)
    if used and value_of(draft, used, switch, False):
        draft.note(used, "training.lora")
        put_adapters(draft, rank or Setting("lora_r", 16), *others)
        return
    for setting in (used, rank, *others):
        if setting:
            draft.leave(setting, "use_peft is not true: all parameters are trained")


def _batch(draft: Draft, last: Settings, devices: int | None) -> None:
    sizes = [
        last.get(name)
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    ]
    whole_batch = last.get("generation_batch_size")
    samples = draft.get("rollout.samplesPerPrompt")
    said = [setting for setting in (*sizes, whole_batch) if setting]
    if devices is None:
        for setting in said:
            draft.leave(setting, "for each process: give --devices N; rollout.promptsPerStep, training.globalBatchSize")
        return
    assert isinstance(samples, int)
    try:
        each, accumulated = (
            whole(setting.value) if setting else default for setting, default in zip(sizes[:2], (8, 1), strict=True)
        )
        steps = whole(sizes[2].value) if sizes[2] else accumulated
        generated = whole(whole_batch.value) if whole_batch else each * devices * steps
    except ValueError as error:
        for setting in said:
            draft.leave(setting, str(error))
        return
    draft.assume("rollout.promptsPerStep", max(1, generated // samples))
    draft.assume("training.globalBatchSize", each * devices * accumulated)
    for setting in said:
        draft.note(
            setting,
            "rollout.promptsPerStep, training.globalBatchSize",
            f"with {how_many(devices, 'process', 'processes')}",
        )
    draft.assume("resources.devicesPerNode", devices)


def _data(draft: Draft, last: Settings) -> None:
    for name in ("train_dataset", "eval_dataset"):
        if setting := last.get(name):
            draft.leave(setting, "data.path" if name == "train_dataset" else "evaluation.data")
    setting = last.get("reward_funcs")
    if setting is None:
        return
    names = setting.value if isinstance(setting.value, list) else str(setting.value).strip("[]").split(",")
    named = [str(name).strip().strip("'\"") for name in names]
    if len(named) == 1 and named[0].rsplit(".", 1)[-1] in _REWARDS:
        draft.put(setting, "reward.name", _REWARDS[named[0].rsplit(".", 1)[-1]])
        draft.default(data__labelKey="solution")
    else:
        # Functions get all columns.
        draft.assume("data.labelKey", None)
        draft.leave(setting, "reward: {python: FILE.py:FUNCTION, signature: TRL}, in a file of its own")


def _record(draft: Draft, last: Settings) -> None:
    if setting := last.get("report_to"):
        trackers = [{"name": str(name)} for name in listed(setting.value) if str(name) in TRACKERS]
        if trackers:
            draft.put(setting, "records.trackers", trackers)
        else:
            draft.leave(setting, "TensorBoard is always there")
