"""slime's command line, which vime and Relax have too, with `--vllm-` where slime has `--sglang-`.

The names are those of `slime/utils/arguments.py` and of Megatron's `arguments.py`, as of August 2026.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence

from rljob_worker.launchers.draft import (
    Draft,
    Rule,
    Setting,
    Settings,
    apply,
    count_rows_whole,
    drop_unused_critic,
    later,
    listed,
    memory,
    nowhere,
    number,
    one_of,
    schedule,
    switch,
    take,
    text,
    to,
    whole,
)
from rljob_worker.launchers.shell import Command, Word
from rljob_worker.launchers.variables import apply_variables

_ALGORITHMS = {"ppo": "ppo", "grpo": "grpo", "gspo": "gspo", "cispo": "cispo", "reinforce_plus_plus": "reinforce_pp",
               "reinforce_plus_plus_baseline": "reinforce_pp_baseline"}  # fmt: skip
_REWARDS = {"math": "math", "deepscaler": "math", "dapo": "math", "gsm8k": "gsm8k"}
_KL = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "low_var"}
_TRACKERS = {"--use-wandb": "wandb", "--use-clearml": "clearml", "--use-swanlab": "swanlab", "--use-mlflow": "mlflow"}
_CLUSTER = "KubeRay or `rljob run` starts Ray"
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
    "--tool-key": nowhere("no tools yet"),
    "--apply-chat-template": to("data.applyChatTemplate", switch),
    "--apply-chat-template-kwargs": to("data.chat.templateArgs", lambda value: _mapping(value)),
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
    "--partial-rollout": to("rollout.partial", lambda value: {}),
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
    "--group-rm": to("reward.batch", switch),
    "--reward-key": nowhere("a score is a number"),
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
    **dict.fromkeys(_TRACKERS, later),
    "--use-tensorboard": to("records.tensorboard", switch),
    **dict.fromkeys(("--wandb-project", "--wandb-team", "--wandb-group", "--wandb-mode"), later),
    "--wandb-key": lambda draft, setting: draft.leave(
        Setting(setting.name, "(its value is left out)"), "a secret: environment.secrets"
    ),
    "--save-debug-rollout-data": nowhere("records.trajectoriesEverySteps, on by default"),
    "--use-fault-tolerance": nowhere("always: failurePolicy"),
    **dict.fromkeys(
        ("--rollout-function-path", "--custom-generate-function-path"), nowhere("one response to a prompt: no tools")
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


def _mapping(value: object) -> dict[str, object]:
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
    _evaluate(draft, last)
    _record(draft, last)
    _runtime(draft, command.words[:start], last.get("--train-env-vars"))


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
    if nodes and text(nodes.value) == "1":
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
    if draft.get("mode") == "Colocated":
        # With devices apart tokens of older weights are trained on, and RLJob corrects for them.
        draft.assume("algorithm.tis.enabled", False)
    take(draft, last.get("--use-tis"), "algorithm.tis.enabled", lambda _: True)
    if mask := last.get("--use-opsm"):
        draft.put(mask, "algorithm.offPolicyMask.delta", 1e-4)
        take(draft, last.get("--opsm-delta"), "algorithm.offPolicyMask.delta", number)
    if last.get("--dynamic-sampling-filter-path"):
        _oversample(draft, last)
    elif setting := last.get("--over-sampling-batch-size"):
        draft.leave(setting, "without a filter no prompt is sampled beyond the step's")


def _oversample(draft: Draft, last: Settings) -> None:
    setting = last["--dynamic-sampling-filter-path"]
    if "check_reward_nonzero_std" not in text(setting.value):
        draft.leave(setting, "a function of yours: rollout.oversampling.function")
        return
    if draft.get("mode") != "Colocated":
        draft.leave(setting, "rollout.oversampling is built for mode Colocated alone")
        return
    draft.put(setting, "rollout.oversampling.filter", "ZeroVariance")
    prompts = draft.get("rollout.promptsPerStep")
    if isinstance(prompts, int):
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
    for flag, name in _TRACKERS.items():
        if setting := last.get(flag):
            trackers.append({"name": name})
            draft.note(setting, "records.trackers")
    for option, key in (("--wandb-project", "project"), ("--wandb-team", "workspace"), ("--wandb-group", "run")):
        if setting := last.get(option):
            if trackers and trackers[0]["name"] == "wandb" and not setting.unknown:
                trackers[0][key] = text(setting.value)
                draft.note(setting, f"records.trackers[].{key}")
            else:
                draft.leave(setting, f"records.trackers[].{key}")
    if trackers:
        draft.assume("records.trackers", trackers)


def _runtime(draft: Draft, words: Sequence[Word], of_trainers: Setting | None) -> None:
    """Take over what stands before the script's name: `ray job submit` and its environment."""
    if of_trainers:
        _variables(draft, of_trainers, "environment.trainer", _mapping)
    for setting in settings_of(words, set()):
        if setting.name == "--runtime-env-json":
            _variables(draft, setting, "environment.variables", lambda value: _mapping(value).get("env_vars", {}))
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
