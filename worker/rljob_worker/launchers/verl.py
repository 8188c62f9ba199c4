"""verl's settings: overrides of `python3 -m verl.trainer.main_ppo`, or a configuration file.

The names are those of the configuration `ppo_megatron_trainer` (and, for FSDP, `ppo_trainer`), as of August 2026.
"""

from __future__ import annotations

from collections.abc import Sequence

from rljob_worker.launchers.adapters import put_adapters
from rljob_worker.launchers.draft import (
    TRACKERS,
    Draft,
    Rule,
    Setting,
    Settings,
    account_for_all,
    apply,
    count_rows_whole,
    drop_unused_critic,
    later,
    listed,
    nowhere,
    number,
    one_of,
    schedule,
    switch,
    take,
    text,
    to,
    value_of,
    whole,
)
from rljob_worker.launchers.shell import Command

_ALGORITHMS = {"gae": "ppo", "grpo": "grpo", "gspo": "gspo", "rloo": "rloo", "reinforce_plus_plus": "reinforce_pp",
               "reinforce_plus_plus_baseline": "reinforce_pp_baseline"}  # fmt: skip
_BACKENDS = {"megatron": "Megatron", "fsdp": "FSDP", "fsdp2": "FSDP"}
_LOSSES = {"vanilla": "", "gspo": "gspo", "sapo": "sapo", "cispo": "cispo"}
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "low_var", "k3": "low_var"}
_PLACE = "follows from spec.mode and the planner"
_MICRO = "by tokens: training.maxTokensPerMicroBatch"
_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.actor.megatron"

_LORA = ("lora_rank", "lora_alpha", "target_modules")
RULES: dict[str, Rule] = {
    "trainer.nnodes": to("resources.nodes", whole),
    "trainer.n_gpus_per_node": to("resources.devicesPerNode", whole),
    "trainer.device": later,
    "trainer.total_training_steps": to("steps", whole),
    "trainer.total_epochs": nowhere("spec.steps is rows x epochs / prompts of a step"),
    "trainer.test_freq": later,
    "trainer.val_before_train": later,
    "trainer.save_freq": later,
    "trainer.default_local_dir": to("checkpoint.path", text),
    "trainer.max_actor_ckpt_to_keep": to("checkpoint.keep", whole),
    "trainer.resume_mode": nowhere("a restart continues from the newest checkpoint"),
    "trainer.critic_warmup": to("critic.warmupSteps", whole),
    "trainer.logger": later,
    "trainer.project_name": later,
    "trainer.experiment_name": later,
    "trainer.rollout_data_dir": nowhere("records.trajectoriesEverySteps, on by default"),
    "actor_rollout_ref.model.path": to("model.path", text),
    "actor_rollout_ref.model.trust_remote_code": nowhere("no code of a model folder is run"),
    "actor_rollout_ref.model.use_remove_padding": nowhere("there is one way"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": to(
        "training.recompute", lambda value: "Full" if switch(value) else "None"
    ),
    **dict.fromkeys((f"actor_rollout_ref.model.{name}" for name in _LORA), later),
    "actor_rollout_ref.model.exclude_modules": nowhere("training.lora.targets names what is adapted"),
    "actor_rollout_ref.hybrid_engine": nowhere("spec.mode Colocated, the default"),
    "data.train_files": later,
    "data.val_files": later,
    "data.prompt_key": to("data.promptKey", text),
    "data.reward_fn_key": later,
    "data.train_batch_size": to("rollout.promptsPerStep", whole),
    "data.max_prompt_length": to("data.maxPromptTokens", whole),
    "data.max_response_length": to("rollout.maxResponseTokens", whole),
    "data.filter_overlong_prompts": nowhere("longer prompts are skipped and counted"),
    "data.truncation": nowhere("longer prompts are skipped and counted"),
    "data.shuffle": to("data.shuffle", switch),
    "data.seed": to("seed", whole),
    "data.apply_chat_template_kwargs": to("data.chat.templateArgs", lambda value: value),
    "data.return_raw_chat": nowhere("messages stay messages"),
    "data.image_key": nowhere("data.imageKey, where rows have pictures; verl names a column for rows without them too"),
    "data.video_key": nowhere("no videos"),
    f"{_A}.data_loader_seed": to("seed", whole),
    f"{_M}.dtype": to("training.precision", one_of({"bfloat16": "bf16", "float32": "fp32"}, "bfloat16 or float32")),
    f"{_M}.sequence_parallel": nowhere("not built"),
    f"{_M}.override_transformer_config.recompute_granularity": to(
        "training.recompute", one_of({"full": "Full", "selective": "Selective"}, "full or selective")
    ),
    "actor_rollout_ref.model.custom_chat_template": nowhere("data.chat.templateFile"),
    **dict.fromkeys((f"{_R}.multi_turn", f"{_R}.agent"), nowhere("episodes: docs/agents.md")),
    f"{_R}.over_sample_rate": nowhere("rollout.oversampling, with a filter"),
    f"{_A}.strategy": to("training.backend", one_of(_BACKENDS, "fsdp, fsdp2 or megatron")),
    f"{_A}.ppo_mini_batch_size": later,
    f"{_A}.ppo_epochs": lambda draft, setting: draft.leave(
        setting, "always 1" if str(setting.value) == "1" else "always 1: several updates a step, each on other samples"
    ),
    f"{_A}.ppo_micro_batch_size": nowhere(_MICRO),
    f"{_A}.ppo_micro_batch_size_per_gpu": nowhere(_MICRO),
    f"{_A}.use_dynamic_bsz": nowhere("always"),
    f"{_A}.ppo_max_token_len_per_gpu": to("training.maxTokensPerMicroBatch", whole),
    f"{_A}.clip_ratio": later,
    f"{_A}.clip_ratio_low": later,
    f"{_A}.clip_ratio_high": later,
    f"{_A}.clip_ratio_c": to("algorithm.dualClip", number),
    f"{_A}.loss_agg_mode": to(
        "algorithm.aggregation",
        one_of({"token-mean": "TokenMean", "seq-mean-token-mean": "SequenceMean"}, "token-mean or seq-mean-token-mean"),
    ),
    f"{_A}.policy_loss.loss_mode": later,
    f"{_A}.entropy_coeff": to("algorithm.entropyCoefficient", number),
    f"{_A}.use_kl_loss": later,
    f"{_A}.kl_loss_coef": later,
    f"{_A}.kl_loss_type": to("algorithm.kl.estimator", one_of(_KL, "kl, mse or low_var_kl")),
    f"{_A}.optim.lr": to("training.optimizer.lr", number),
    f"{_A}.optim.min_lr": to("training.optimizer.minLr", number),
    f"{_A}.optim.lr_decay_style": to("training.optimizer.schedule", schedule),
    f"{_A}.optim.lr_warmup_steps": to("training.optimizer.warmupSteps", lambda value: max(0, whole(value))),
    f"{_A}.optim.lr_decay_steps": to("training.optimizer.decaySteps", whole),
    f"{_A}.optim.weight_decay": to("training.optimizer.weightDecay", number),
    f"{_A}.optim.clip_grad": to("training.optimizer.clipGrad", number),
    f"{_A}.grad_clip": to("training.optimizer.clipGrad", number),
    f"{_M}.tensor_model_parallel_size": to("training.tensorParallel", whole),
    f"{_M}.pipeline_model_parallel_size": to("training.pipelineParallel", whole),
    f"{_M}.expert_model_parallel_size": to("training.expertParallel", whole),
    f"{_M}.context_parallel_size": to("training.contextParallel", whole),
    f"{_M}.optimizer_offload": later,
    f"{_A}.fsdp_config.optimizer_offload": later,
    f"{_A}.ulysses_sequence_parallel_size": later,
    f"{_A}.fsdp_config.fsdp_size": later,
    f"{_A}.fsdp_config.reshard_after_forward": later,
    **dict.fromkeys(
        (f"{_M}.param_offload", f"{_M}.grad_offload", f"{_A}.fsdp_config.param_offload"),
        nowhere("all trainer memory leaves the device while it sleeps"),
    ),
    f"{_R}.name": nowhere("always vLLM"),
    f"{_R}.mode": nowhere("there is one way"),
    f"{_R}.n": to("rollout.samplesPerPrompt", whole),
    f"{_R}.temperature": to("rollout.temperature", number),
    f"{_R}.top_p": to("rollout.topP", number),
    f"{_R}.top_k": to("rollout.topK", lambda value: max(0, whole(value))),
    f"{_R}.tensor_model_parallel_size": to("rollout.tensorParallel", whole),
    f"{_R}.gpu_memory_utilization": to("rollout.memoryFraction", number),
    f"{_R}.enforce_eager": to("rollout.graphMode", lambda value: not switch(value)),
    f"{_R}.free_cache_engine": nowhere(_PLACE),
    f"{_R}.max_num_seqs": to("rollout.maxNumSeqs", whole),
    f"{_R}.max_num_batched_tokens": to("rollout.maxBatchedTokens", whole),
    f"{_R}.enable_prefix_caching": to("rollout.prefixCaching", switch),
    f"{_R}.enable_chunked_prefill": nowhere("vLLM's default"),
    f"{_R}.ignore_eos": to("rollout.ignoreEos", switch),
    f"{_R}.calculate_log_probs": nowhere("always"),
    f"{_R}.update_weights_bucket_megabytes": to("weightSync.bucketBytes", lambda value: whole(value) * 2**20),
    f"{_R}.val_kwargs.n": to("evaluation.samplesPerPrompt", whole),
    f"{_R}.val_kwargs.temperature": to("evaluation.temperature", number),
    f"{_R}.val_kwargs.top_p": to("evaluation.topP", number),
    f"{_R}.val_kwargs.do_sample": nowhere("evaluation.temperature 0 is greedy"),
    f"{_R}.multi_turn.enable": lambda draft, setting: draft.leave(
        setting, "one response to a prompt" if not switch(setting.value) else "episodes: docs/agents.md"
    ),
    "algorithm.adv_estimator": to(
        "algorithm.name", one_of(_ALGORITHMS, "no such algorithm here; docs/algorithms.md")
    ),
    "algorithm.gamma": to("algorithm.gae.gamma", number),
    "algorithm.lam": to("algorithm.gae.lambda", number),
    "critic.model.path": to("critic.model.path", text),
    "critic.model.tokenizer_path": nowhere("the policy's tokenizer"),
    "critic.strategy": nowhere("training.backend, as the policy"),
    "critic.optim.lr": to("critic.optimizer.lr", number),
    "critic.optim.lr_warmup_steps": to("critic.optimizer.warmupSteps", whole),
    "critic.optim.weight_decay": to("critic.optimizer.weightDecay", number),
    "critic.cliprange_value": to("critic.valueClip", number),
    "critic.grad_clip": to("critic.optimizer.clipGrad", number),
    "critic.ppo_epochs": nowhere("always 1"),
    "critic.ppo_mini_batch_size": nowhere("critic.updatesPerStep: data.train_batch_size / ppo_mini_batch_size"),
    "critic.ppo_micro_batch_size_per_gpu": nowhere(_MICRO),
    "algorithm.norm_adv_by_std_in_grpo": to("algorithm.normalizeByStd", switch),
    "algorithm.use_kl_in_reward": lambda draft, setting: draft.leave(
        setting, "none" if not switch(setting.value) else "no KL in the reward; algorithm.kl is in the loss"
    ),
    "algorithm.rollout_correction.rollout_is": later,
    "algorithm.rollout_correction.rollout_is_threshold": to("algorithm.tis.high", number),
    "custom_reward_function.path": later,
    "custom_reward_function.name": later,
    "reward_model.enable": lambda draft, setting: draft.leave(
        setting, "none" if not switch(setting.value) else "a judge is called by an async function: reward.python"
    ),
    "reward_model.sandbox_fusion.url": nowhere("an async function that asks it: reward.python"),
}  # fmt: skip


def is_command(command: Command) -> bool:
    """Whether a command starts verl."""
    return any(word.text.startswith("verl.trainer.") or "verl/trainer/" in word.text for word in command.words)


def apply_settings(draft: Draft, settings: Sequence[Setting]) -> None:
    """Put verl's settings into the draft."""
    last = {setting.name: setting for setting in settings}
    counting = [setting for setting in last.values() if _counts(setting)]
    apply(draft, counting, RULES, "unknown to `rljob import verl`")
    _data(draft, last)
    drop_unused_critic(draft)
    _learn(draft, last)
    count_rows_whole(draft)
    draft.default(
        algorithm__clipLow=0.2, algorithm__clipHigh=0.2, algorithm__dualClip=3.0, algorithm__aggregation="TokenMean",
        training__optimizer__weightDecay=0.01, training__optimizer__beta2=0.999,
        data__maxPromptTokens=512, rollout__promptsPerStep=1024, rollout__samplesPerPrompt=1,
        rollout__maxResponseTokens=512,
    )  # fmt: skip
    _batch(draft, last)
    _record(draft, last)
    account_for_all(draft, counting)


def _counts(setting: Setting) -> bool:
    """Whether a setting says anything: log-probabilities have the trainer's own batches, null is no value."""
    return setting.value is not None and ".ref." not in setting.name and "log_prob_" not in setting.name


def _data(draft: Draft, last: Settings) -> None:
    draft.assume("data.applyChatTemplate", True)
    draft.assume("data.labelKey", "reward_model.ground_truth")
    if setting := last.get("data.train_files"):
        files = listed(setting.value)
        if len(files) == 1:
            take(draft, Setting(setting.name, files[0], setting.unknown), "data.path", text)
        else:
            keys = {key: draft.get(f"data.{key}") for key in ("promptKey", "labelKey", "applyChatTemplate")}
            common = {key: value for key, value in keys.items() if value is not None}
            paths = [str(file) for file in files]
            stems = [_stem(path) for path in paths]
            names = (
                stems if len(set(stems)) == len(stems) else [_stem("-".join(path.split("/")[-2:])) for path in paths]
            )
            sources = [{"name": name, "path": path, **common} for name, path in zip(names, paths, strict=True)]
            draft.put(setting, "data.sources", sources)
            for key in keys:
                block = draft.spec["data"]
                assert isinstance(block, dict)
                block.pop(key, None)
    every = last.get("trainer.test_freq")
    if (setting := last.get("data.val_files")) and not (every and str(every.value) in ("-1", "0")):
        files = listed(setting.value)
        sets = [
            {
                "name": _stem(str(file)),
                "path": str(file),
                "applyChatTemplate": True,
                "labelKey": "reward_model.ground_truth",
            }
            for file in files
        ]
        draft.put(setting, "evaluation.sets", sets)
        take(draft, every, "evaluation.everySteps", whole)
        take(draft, last.get("trainer.val_before_train"), "evaluation.atStart", switch)
    elif setting:
        draft.leave(setting, "trainer.test_freq switches evaluation off")
    if draft.get("evaluation.sets") is None:
        draft.drop("evaluation", "no held-out data is scored")


def _stem(path: str) -> str:
    return path.rsplit("/", 1)[-1].rsplit(".", 1)[0] or "set"


def _learn(draft: Draft, last: Settings) -> None:
    clip = last.get(f"{_A}.clip_ratio")
    for name, path in (("clip_ratio_low", "algorithm.clipLow"), ("clip_ratio_high", "algorithm.clipHigh")):
        take(draft, last.get(f"{_A}.{name}") or clip, path, number)
    used, coefficient = last.get(f"{_A}.use_kl_loss"), last.get(f"{_A}.kl_loss_coef")
    if used and value_of(draft, used, switch, False):
        draft.note(used, "algorithm.kl.coefficient")
        draft.assume("algorithm.kl.coefficient", 0.001)
        take(draft, coefficient, "algorithm.kl.coefficient", number)
    elif coefficient:
        draft.leave(coefficient, f"{_A}.use_kl_loss is not true")
    correction = last.get("algorithm.rollout_correction.rollout_is")
    draft.assume("algorithm.tis.enabled", False)
    if correction and correction.value is not None:
        levels = one_of({"token": "Token", "sequence": "Sequence"}, "token or sequence")
        take(draft, correction, "algorithm.tis.level", levels)
        draft.assume("algorithm.tis.enabled", True)
    if loss := last.get(f"{_A}.policy_loss.loss_mode"):
        if str(loss.value) == "vanilla":
            draft.leave(loss, "the loss of algorithm.name")
        else:
            take(draft, loss, "algorithm.name", one_of(_LOSSES, "no such loss here; docs/algorithms.md"))
    for offload in (last.get(f"{_M}.optimizer_offload"), last.get(f"{_A}.fsdp_config.optimizer_offload")):
        take(draft, offload, "training.optimizer.hostOffload", switch)
    _fsdp(draft, last)
    put_adapters(draft, *(last.get(f"actor_rollout_ref.model.{name}") for name in _LORA))
    if draft.get("training.lora.rank") is not None:
        draft.default(training__lora__alpha=16)
    _reward(draft, last)


def _reward(draft: Draft, last: Settings) -> None:
    """A function of the user's has the column in its arguments; verl's own choose by it."""
    key = last.get("data.reward_fn_key")
    file, function = last.get("custom_reward_function.path"), last.get("custom_reward_function.name")
    if file:
        name = value_of(draft, function, text, "compute_score")
        take(draft, file, "reward.python", lambda value: f"{text(value)}:{name}", "called as verl calls it")
        draft.assume("reward.signature", "Verl")
        if function:
            draft.note(function, "reward.python")
    if key and file:
        wanted = "the function gets the column data_source"
        draft.leave(key, wanted if str(key.value) == "data_source" else f"{wanted}, under that name alone")
    elif key:
        take(draft, key, "reward.by", text, "name its values in reward.parts[].rows")


def _fsdp(draft: Draft, last: Settings) -> None:
    size, again = (last.get(f"{_A}.fsdp_config.{name}") for name in ("fsdp_size", "reshard_after_forward"))
    context = last.get(f"{_A}.ulysses_sequence_parallel_size")
    if draft.get("training.backend") == "FSDP":
        take(draft, size, "training.fsdp.shardSize", _shards)
        take(draft, again, "training.fsdp.reshardAfterForward", switch)
        take(draft, context, "training.contextParallel", whole)
        return
    for setting in (size, again, context):
        if setting:
            draft.leave(setting, f"{_A}.strategy is not fsdp")


def _shards(value: object) -> int:
    found = whole(value)
    if found < 1:
        raise ValueError("all trainers divide one copy, as by default")
    return found


def _batch(draft: Draft, last: Settings) -> None:
    setting = last.get(f"{_A}.ppo_mini_batch_size")
    samples = draft.get("rollout.samplesPerPrompt") or 1
    if setting and isinstance(samples, int):
        why = "verl counts prompts, this counts samples"
        take(draft, setting, "training.globalBatchSize", lambda value: whole(value) * samples, why)
    take(draft, last.get("trainer.save_freq"), "checkpoint.everySteps", _positive)
    if device := last.get("trainer.device"):
        profiles = {"npu": "ascend-a2", "cuda": "cuda", "cpu": "cpu"}
        take(draft, device, "resources.profile", one_of(profiles, "npu, cuda or cpu"))


def _positive(value: object) -> int:
    found = whole(value)
    if found < 1:
        raise ValueError("the last step is saved always")
    return found


def _record(draft: Draft, last: Settings) -> None:
    names = {"trainer.project_name": "project", "trainer.experiment_name": "run"}
    logger = last.get("trainer.logger")
    loggers = [str(name) for name in listed(logger.value)] if logger else []
    trackers = [{"name": name} for name in loggers if name in TRACKERS]
    for name, key in names.items():
        if setting := last.get(name):
            for tracker in trackers:
                tracker[key] = str(setting.value)
            if trackers:
                draft.note(setting, f"records.trackers[].{key}")
            else:
                draft.leave(setting, "no tracker takes it")
    if trackers and logger:
        draft.put(logger, "records.trackers", trackers)
    elif logger:
        draft.leave(logger, "the console and TensorBoard are always there")
