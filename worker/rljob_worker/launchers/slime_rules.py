"""The flags of slime, vime and Relax, and the field that each becomes.

The names are those of `slime/utils/arguments.py` and of Megatron's `arguments.py`, as of August 2026.
"""

from __future__ import annotations

import json

from rljob_worker.launchers.draft import (
    Draft,
    Rule,
    Setting,
    later,
    listed,
    memory,
    nowhere,
    number,
    one_of,
    schedule,
    switch,
    text,
    to,
    whole,
)

_ALGORITHMS = {"ppo": "ppo", "grpo": "grpo", "gspo": "gspo", "cispo": "cispo", "reinforce_plus_plus": "reinforce_pp",
               "reinforce_plus_plus_baseline": "reinforce_pp_baseline"}  # fmt: skip
_REWARDS = {"math": "math", "deepscaler": "math", "dapo": "math", "gsm8k": "gsm8k"}
_KL = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "low_var"}
TRACKING = {"--use-wandb": "wandb", "--use-clearml": "clearml", "--use-swanlab": "swanlab", "--use-mlflow": "mlflow"}
_ARCHITECTURE = "the checkpoint's config.json says it"
_DATA_ROW = "all columns of a row go to the reward function"

RULES: dict[str, Rule] = {
    "--train-backend": to("training.backend", one_of({"megatron": "Megatron"}, "only Megatron")),
    "--actor-num-nodes": later,
    "--actor-num-gpus-per-node": later,
    "--num-gpus-per-node": nowhere("resources.devicesPerNode follows from --actor-num-gpus-per-node"),
    "--rollout-num-gpus": later,
    "--colocate": later,
    "--fully-async": later,
    "--max-staleness": later,
    "--num-iters-per-train-update": nowhere("each update is handed over"),
    **dict.fromkeys(
        ("--offload", "--offload-train", "--offload-rollout", "--no-offload-train", "--no-offload-rollout"),
        nowhere("follows from spec.mode"),
    ),
    "--train-memory-margin-bytes": to("memorySaver.trainMemoryMargin", memory),
    "--rollout-num-gpus-per-engine": to("rollout.tensorParallel", whole),
    "--tensor-model-parallel-size": to("training.tensorParallel", whole),
    "--pipeline-model-parallel-size": to("training.pipelineParallel", whole),
    "--expert-model-parallel-size": to("training.expertParallel", whole),
    "--expert-tensor-parallel-size": nowhere("experts are not split by tensor parallelism"),
    "--context-parallel-size": to("training.contextParallel", whole),
    "--sequence-parallel": nowhere("training.tensorParallel splits dense models without it"),
    "--optimizer-cpu-offload": to("training.optimizer.hostOffload", switch),
    "--vllm-gpu-memory-utilization": to("rollout.memoryFraction", number),
    "--sglang-mem-fraction-static": to("rollout.memoryFraction", number, "SGLang counts other memory than vLLM"),
    "--vllm-enforce-eager": to("rollout.graphMode", lambda value: not switch(value)),
    "--vllm-max-num-seqs": to("rollout.maxNumSeqs", whole),
    "--sglang-max-running-requests": to("rollout.maxNumSeqs", whole),
    "--vllm-max-num-batched-tokens": to("rollout.maxBatchedTokens", whole),
    "--sglang-chunked-prefill-size": to("rollout.maxBatchedTokens", whole),
    "--update-weight-buffer-size": to("weightSync.bucketBytes", whole),
    "--train-env-vars": later,
    "--hf-checkpoint": to("model.path", text),
    "--ref-load": nowhere("the reference policy is the starting point"),
    "--megatron-to-hf-mode": nowhere("the Hugging Face folder is read as it is"),
    "--prompt-data": to("data.path", text),
    "--input-key": to("data.promptKey", text),
    "--label-key": to("data.labelKey", text),
    "--metadata-key": nowhere(_DATA_ROW),
    "--multimodal-keys": nowhere("data.imageKey, where rows have pictures; no videos"),
    "--tool-key": nowhere("episodes with tools: docs/agents.md"),
    "--apply-chat-template": to("data.applyChatTemplate", switch),
    "--apply-chat-template-kwargs": to("data.chat.templateArgs", lambda value: mapping(value)),
    "--rollout-shuffle": to("data.shuffle", switch),
    "--seed": to("seed", whole),
    "--rollout-seed": to("seed", whole),
    "--rollout-max-prompt-len": to("data.maxPromptTokens", whole),
    "--rollout-max-context-len": nowhere("data.maxPromptTokens and rollout.maxResponseTokens"),
    "--num-rollout": to("steps", whole),
    "--num-epoch": nowhere("spec.steps is rows x epochs / prompts of a step"),
    "--rollout-batch-size": to("rollout.promptsPerStep", whole),
    "--n-samples-per-prompt": to("rollout.samplesPerPrompt", whole),
    "--rollout-max-response-len": to("rollout.maxResponseTokens", whole),
    "--rollout-temperature": to("rollout.temperature", number),
    "--rollout-top-p": to("rollout.topP", number),
    "--rollout-top-k": to("rollout.topK", lambda value: max(0, whole(value))),
    "--rollout-stop": to("rollout.stop", listed),
    "--rollout-stop-token-ids": to("rollout.stopTokenIds", lambda value: [whole(item) for item in listed(value)]),
    "--over-sampling-batch-size": later,
    "--dynamic-sampling-filter-path": later,
    "--partial-rollout": later,
    "--balance-data": nowhere("samples are dealt by length always"),
    "--advantage-estimator": to("algorithm.name", one_of(_ALGORITHMS, "no such algorithm here; docs/algorithms.md")),
    "--gamma": to("algorithm.gae.gamma", number),
    "--lambd": to("algorithm.gae.lambda", number),
    "--value-clip": to("critic.valueClip", number),
    "--critic-lr": to("critic.optimizer.lr", number),
    "--critic-load": to("critic.model.path", text),
    "--num-critic-only-steps": to("critic.warmupSteps", whole),
    "--eps-clip": to("algorithm.clipLow", number),
    "--eps-clip-high": to("algorithm.clipHigh", number),
    "--eps-clip-c": to("algorithm.dualClip", number),
    "--disable-grpo-std-normalization": to("algorithm.normalizeByStd", lambda value: not switch(value)),
    "--normalize-advantages": to("algorithm.whitenAdvantages", switch),
    "--calculate-per-token-loss": later,
    "--use-kl-loss": later,
    "--kl-loss-coef": later,
    "--kl-loss-type": to("algorithm.kl.estimator", one_of(_KL, "k1, k2, k3 or low_var_kl")),
    "--use-unbiased-kl": to("algorithm.kl.unbiased", switch),
    "--kl-coef": lambda draft, setting: draft.leave(
        setting, "none" if number(setting.value) == 0 else "no KL in the reward; algorithm.kl is in the loss"
    ),
    "--entropy-coef": to("algorithm.entropyCoefficient", number),
    "--use-tis": later,
    "--tis-clip": to("algorithm.tis.high", number),
    "--tis-clip-low": to("algorithm.tis.low", number),
    "--use-opsm": later,
    "--opsm-delta": later,
    "--get-mismatch-metrics": nowhere("always recorded"),
    "--use-rollout-routing-replay": to("rollout.routerReplay", switch),
    "--global-batch-size": to("training.globalBatchSize", whole),
    "--num-steps-per-rollout": nowhere("samples of a step / training.globalBatchSize"),
    "--micro-batch-size": nowhere("by tokens: training.maxTokensPerMicroBatch"),
    "--use-dynamic-batch-size": nowhere("always"),
    "--max-tokens-per-gpu": to("training.maxTokensPerMicroBatch", whole),
    "--recompute-granularity": to(
        "training.recompute", one_of({"full": "Full", "selective": "Selective"}, "full or selective")
    ),
    "--recompute-method": nowhere("training.recompute"),
    "--recompute-num-layers": nowhere("training.recompute"),
    "--bf16": to("training.precision", lambda value: "bf16" if switch(value) else "fp32"),
    "--optimizer": lambda draft, setting: draft.leave(
        setting, "the optimizer" if text(setting.value) == "adam" else "Adam is the only optimizer"
    ),
    "--lr": to("training.optimizer.lr", number),
    "--min-lr": to("training.optimizer.minLr", number),
    "--lr-decay-style": to("training.optimizer.schedule", schedule),
    "--lr-warmup-iters": to("training.optimizer.warmupSteps", whole),
    "--lr-decay-iters": to("training.optimizer.decaySteps", whole),
    "--weight-decay": to("training.optimizer.weightDecay", number),
    "--adam-beta1": to("training.optimizer.beta1", number),
    "--adam-beta2": to("training.optimizer.beta2", number),
    "--adam-eps": to("training.optimizer.eps", number),
    "--clip-grad": to("training.optimizer.clipGrad", number),
    "--only-train-params-name-list": nowhere("all parameters are trained"),
    "--freeze-params-name-list": nowhere("all parameters are trained"),
    "--rm-type": to("reward.name", one_of(_REWARDS, "not built in: reward.python")),
    "--custom-rm-path": lambda draft, setting: _function(draft, setting),
    "--group-rm": nowhere("a function whose parameters are args, samples is given a group"),
    "--reward-key": later,
    "--rm-url": nowhere("an async function that asks it: reward.python"),
    "--eval-prompt-data": later,
    "--eval-interval": to("evaluation.everySteps", whole),
    "--skip-eval-before-train": to("evaluation.atStart", lambda value: not switch(value)),
    "--n-samples-per-eval-prompt": to("evaluation.samplesPerPrompt", whole),
    "--eval-temperature": to("evaluation.temperature", number),
    "--eval-top-p": to("evaluation.topP", number),
    "--eval-max-response-len": to("evaluation.maxResponseTokens", whole),
    "--log-passrate": later,
    "--save": to("checkpoint.path", text),
    "--save-interval": to("checkpoint.everySteps", whole),
    "--save-hf": nowhere("`rljob export` writes a Hugging Face folder"),
    "--load": nowhere("a restart continues from the newest checkpoint"),
    **dict.fromkeys(TRACKING, later),
    "--use-tensorboard": to("records.tensorboard", switch),
    **dict.fromkeys(("--wandb-project", "--wandb-team", "--wandb-group", "--wandb-mode"), later),
    "--wandb-key": lambda draft, setting: draft.leave(
        Setting(setting.name, "(its value is left out)"), "a secret: environment.secrets"
    ),
    "--save-debug-rollout-data": nowhere("records.trajectoriesEverySteps, on by default"),
    "--use-fault-tolerance": nowhere("always: failurePolicy"),
    **dict.fromkeys(
        ("--rollout-function-path", "--custom-generate-function-path"),
        nowhere("episodes with an environment or tools: docs/agents.md"),
    ),
    **dict.fromkeys(
        (
            "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups",
            "--group-query-attention", "--kv-channels", "--vocab-size", "--swiglu", "--disable-bias-linear",
            "--use-rotary-position-embeddings", "--rotary-base", "--normalization", "--norm-epsilon", "--qk-layernorm",
            "--untie-embeddings-and-output-weights", "--add-qkv-bias", "--num-experts", "--moe-router-topk",
            "--moe-ffn-hidden-size", "--make-vocab-size-divisible-by", "--rotary-percent", "--max-position-embeddings",
        ),
        nowhere(_ARCHITECTURE),
    ),
    **dict.fromkeys(
        ("--attention-dropout", "--hidden-dropout", "--attention-backend", "--attention-softmax-in-fp32",
         "--accumulate-allreduce-grads-in-fp32", "--no-gradient-accumulation-fusion", "--use-flash-attn",
         "--use-distributed-optimizer"),
        nowhere("there is one way: no dropout, fused attention, gradients in fp32"),
    ),
}  # fmt: skip


def mapping(value: object) -> dict[str, object]:
    """A JSON object; ValueError where it is none."""
    try:
        found = json.loads(text(value))
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("is no JSON object")
    return found


def _function(draft: Draft, setting: Setting) -> None:
    module, _, name = text(setting.value).rpartition(".")
    if not module or not name.isidentifier():
        raise ValueError("is no package.module.function")
    draft.put(setting, "reward.python", f"{module}:{name}", "called as slime calls it")
    draft.assume("reward.signature", "Slime")
