"""The settings of ROLL's configurations, as of 2026-08-19, and the field that each becomes."""

from __future__ import annotations

from rljob_worker.launchers.draft import (
    Draft,
    Rule,
    Setting,
    later,
    nowhere,
    number,
    one_of,
    schedule,
    switch,
    text,
    to,
    whole,
)

_ALGORITHMS = {"gae": "ppo", "grpo": "grpo", "reinforce": "reinforce"}
_FOLDERS = "the run folder follows from the job's name"
TURNS = "episodes with an environment (docs/agents.md)"
_MODEL = "the checkpoint's config.json says it"

LORA = ("lora_rank", "lora_alpha", "lora_target")
_SCOPES = one_of({"group": "Group", "batch": "Batch"}, "group or batch")
_MEGATRON = "actor_train.strategy_args.strategy_config."
_PARALLEL: dict[str, Rule] = {
    "tensor_model_parallel_size": to("training.tensorParallel", whole),
    "pipeline_model_parallel_size": to("training.pipelineParallel", whole),
    "expert_model_parallel_size": to("training.expertParallel", whole),
    "context_parallel_size": to("training.contextParallel", whole),
    "recompute_granularity": to(
        "training.recompute", one_of({"full": "Full", "selective": "Selective"}, "full or selective")
    ),
    "use_distributed_optimizer": nowhere("always"),
    "sequence_parallel": nowhere("training.tensorParallel splits dense models without it"),
    "virtual_pipeline_model_parallel_size": nowhere("a stage's layers are neighbours"),
    "bf16": nowhere("training.precision"),
    "use_sequence_packing": nowhere("by tokens: training.maxTokensPerMicroBatch"),
    **dict.fromkeys(("recompute_method", "recompute_num_layers", "recompute_modules", "moe_layer_recompute"),
                    nowhere("training.recompute")),
    **dict.fromkeys(
        ("overlap_grad_reduce", "overlap_param_gather", "bias_activation_fusion", "apply_rope_fusion",
         "moe_grouped_gemm", "moe_token_dispatcher_type", "moe_shared_expert_overlap"),
        nowhere("there is one way"),
    ),
}  # fmt: skip
"""Options of the strategy megatron_train."""
RULES: dict[str, Rule] = {
    "exp_name": lambda draft, setting: _name(draft, setting),
    "seed": to("seed", whole),
    **dict.fromkeys(("logging_dir", "output_dir"), nowhere(_FOLDERS)),
    "render_save_dir": nowhere(TURNS),
    "checkpoint_config.type": nowhere("a folder"),
    "checkpoint_config.output_dir": to("checkpoint.path", text),
    "num_gpus_per_node": later,
    "max_steps": to("steps", whole),
    "save_steps": to("checkpoint.everySteps", whole),
    "logging_steps": nowhere("every step has a record"),
    "eval_steps": later,
    "resume_from_checkpoint": nowhere("a restart continues from the newest checkpoint"),
    "rollout_batch_size": to("rollout.promptsPerStep", whole),
    "val_batch_size": later,
    "prompt_length": to("data.maxPromptTokens", whole),
    "response_length": to("rollout.maxResponseTokens", whole),
    "sequence_length": nowhere("data.maxPromptTokens and rollout.maxResponseTokens"),
    "num_return_sequences_in_group": to("rollout.samplesPerPrompt", whole),
    "advantage_clip": to("algorithm.advantageClip", number),
    "ppo_epochs": nowhere("always 1"),
    "reward_clip": to("algorithm.rewards.clip", number),
    "norm_mean_type": to("algorithm.rewards.center", _SCOPES),
    "norm_std_type": to("algorithm.rewards.scale", _SCOPES),
    **dict.fromkeys(("pg_clip", "pg_clip_low", "pg_clip_high", "use_pg_clip_range", "dual_clip_loss"), later),
    **dict.fromkeys(("use_kl_loss", "kl_loss_coef"), later),
    "add_token_level_kl": lambda draft, setting: draft.leave(
        setting, "no KL in the reward; algorithm.kl is in the loss" if switch(setting.value) else "none"
    ),
    **dict.fromkeys(
        (
            "max_len_mask",
            "error_max_len_clip",
            "length_loss_weight",
            "difficulty_mask",
            "difficulty_loss_weight",
            "difficulty_low_threshold",
            "difficulty_high_threshold",
        ),
        nowhere("no sample is weighted; rollout.oversampling leaves groups out, reward parts punish length"),
    ),
    "is_num_return_sequences_expand": nowhere("a prompt's samples are requests of their own always"),
    "async_generation_ratio": nowhere("mode: Async, rollout.staleness.max"),
    "global_template": nowhere("the tokenizer's own chat template"),
    "offload_nccl": nowhere("memorySaver and hccl: groups are released while trainers sleep"),
    **dict.fromkeys(("track_with", "tracker_kwargs"), later),
    "adv_estimator": to("algorithm.name", one_of(_ALGORITHMS, "no such algorithm here; docs/algorithms.md")),
    "gamma": to("algorithm.gae.gamma", number),
    "lambd": to("algorithm.gae.lambda", number),
    "value_clip": to("critic.valueClip", number),
    "critic_warmup": to("critic.warmupSteps", whole),
    "critic.training_args.learning_rate": to("critic.optimizer.lr", number),
    "init_kl_coef": to("algorithm.kl.coefficient", number),
    "whiten_advantages": to("algorithm.whitenAdvantages", switch),
    "entropy_loss_coef": to("algorithm.entropyCoefficient", number),
    "max_grad_norm": to("training.optimizer.clipGrad", number),
    "pretrain": to("model.path", text),
    "reward_pretrain": nowhere("rules need no model"),
    "actor_train.model_args.disable_gradient_checkpointing": to(
        "training.recompute", lambda value: "None" if switch(value) else "Full"
    ),
    "actor_train.model_args.dtype": to("training.precision", one_of({"bf16": "bf16", "fp32": "fp32"}, "bf16 or fp32")),
    "actor_train.model_args.attn_implementation": nowhere("there is one way"),
    "actor_train.model_args.model_type": nowhere(_MODEL),
    **dict.fromkeys((f"actor_train.model_args.{name}" for name in LORA), later),
    **dict.fromkeys((f"actor_infer.model_args.{name}" for name in LORA), nowhere("the trainer's, merged")),
    "actor_train.training_args.learning_rate": to("training.optimizer.lr", number),
    "actor_train.training_args.weight_decay": to("training.optimizer.weightDecay", number),
    "actor_train.training_args.warmup_steps": to("training.optimizer.warmupSteps", whole),
    "actor_train.training_args.lr_scheduler_type": to("training.optimizer.schedule", schedule),
    "actor_train.training_args.per_device_train_batch_size": later,
    "actor_train.training_args.gradient_accumulation_steps": later,
    "actor_train.data_args.template": nowhere("the tokenizer's own chat template"),
    "actor_train.data_args.file_name": later,
    "actor_train.data_args.dataset_dir": later,
    "actor_train.data_args.messages": later,
    "actor_train.data_args.interleave_probs": nowhere("data.sources[].weight"),
    "actor_train.strategy_args.strategy_name": later,
    "actor_train.strategy_args.strategy_config": later,
    **{f"{_MEGATRON}{name}": rule for name, rule in _PARALLEL.items()},
    "actor_train.device_mapping": later,
    "actor_train.infer_batch_size": nowhere("by tokens: training.maxTokensPerMicroBatch"),
    "actor_infer.model_args.dtype": nowhere("the trainer's"),
    "actor_infer.model_args.disable_gradient_checkpointing": nowhere("engines keep no activations"),
    "actor_infer.generating_args.max_new_tokens": later,
    "actor_infer.generating_args.top_p": to("rollout.topP", number),
    "actor_infer.generating_args.top_k": to("rollout.topK", lambda value: max(0, whole(value))),
    "actor_infer.generating_args.num_beams": nowhere("sampling has no beams"),
    "actor_infer.generating_args.temperature": to("rollout.temperature", number),
    "actor_infer.generating_args.num_return_sequences": later,
    "actor_infer.data_args.template": nowhere("the tokenizer's own chat template"),
    "actor_infer.strategy_args.strategy_name": nowhere("always vLLM"),
    "actor_infer.strategy_args.strategy_config.gpu_memory_utilization": to("rollout.memoryFraction", number),
    "actor_infer.strategy_args.strategy_config.block_size": nowhere("left to vLLM, which has another one for NPUs"),
    "actor_infer.strategy_args.strategy_config.load_format": nowhere("weights come from the trainer"),
    "actor_infer.strategy_args.strategy_config.max_model_len": to("rollout.engineArgs.max_model_len", whole),
    "actor_infer.strategy_args.strategy_config.tensor_parallel_size": to("rollout.tensorParallel", whole),
    "actor_infer.device_mapping": later,
    "actor_infer.infer_batch_size": nowhere("rollout.maxNumSeqs"),
    "reward_normalization.grouping": nowhere("algorithm.rewards; GRPO's advantages are that already"),
    "reward_normalization.method": nowhere("algorithm.rewards; GRPO's advantages are that already"),
}


def _name(draft: Draft, setting: Setting) -> None:
    draft.name = text(setting.value)
    draft.leave(setting, "metadata.name")
