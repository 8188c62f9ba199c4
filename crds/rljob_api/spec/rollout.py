"""`spec.rollout`: generation by vLLM."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import (
    ApiModel,
    Fraction,
    FreeForm,
    GroupSize,
    Name,
    NonNegativeInt,
    SampleCount,
    TokenCount,
)
from rljob_api.spec.episodes import PYTHON_OBJECT

MIN_TEMPERATURE = 0.01
"""vLLM raises smaller positive temperatures to this (vllm/sampling_params.py `_MAX_TEMP`)."""
RESERVED_ENGINE_ARGS = {
    "data_parallel_size": "resources.devicesPerNode and rollout.tensorParallel",
    "disable_log_stats": "leave it out: the step records hold what it would log",
    "distributed_executor_backend": "leave it out: RLJob starts the engine's processes",
    "dtype": "training.precision",
    "enable_prefix_caching": "rollout.prefixCaching",
    "enable_sleep_mode": "leave it out: it is always on where the device can sleep",
    "enforce_eager": "rollout.graphMode",
    "gpu_memory_utilization": "rollout.memoryFraction",
    "kv_cache_memory_bytes": "rollout.kvCacheBytes",
    "load_format": "leave it out: weights come from the trainer",
    "logprobs_mode": "leave it out: the loss needs the processed ones",
    "max_num_batched_tokens": "rollout.maxBatchedTokens",
    "max_num_seqs": "rollout.maxNumSeqs",
    "model": "model.path",
    "pipeline_parallel_size": "leave it out: an engine is one tensor-parallel group",
    "revision": "model.revision",
    "seed": "seed",
    "skip_tokenizer_init": "leave it out: prompts come as tokens",
    "speculative_config": "rollout.speculative",
    "enable_return_routed_experts": "rollout.routerReplay",
    "tensor_parallel_size": "rollout.tensorParallel",
    "tokenizer": "model.path",
    "trust_remote_code": "leave it out: code in a model's folder is not run",
    "weight_transfer_config": "weightSync",
    "worker_extension_cls": "leave it out: weight sync needs it",
}
"""vLLM arguments that RLJob sets itself -> the field of the spec to use instead."""


class RolloutAssignment(StrEnum):
    """Ways to divide a step's prompts over engines."""

    FIXED = "Fixed"
    WHEN_FREE = "WhenFree"


class GroupFilter(StrEnum):
    """Groups that are not trained on."""

    ZERO_VARIANCE = "ZeroVariance"


class OversamplingSpec(ApiModel):
    """Sample further prompts until enough groups pass: `filter`, `function` or both (dynamic sampling of DAPO, arXiv
    2503.14476)."""

    filter: GroupFilter | None = None
    """`ZeroVariance`: leave out groups whose rewards are all equal; they have no gradient."""
    function: Annotated[str, Field(pattern=PYTHON_OBJECT, max_length=1024)] | None = None
    """Python function that says True for a group to train on, False for one to leave out: as `reward.python` a file and
    its function or `package.module:function`. It is given, by name, `rewards`, `prompt`, `label` and the row's other
    columns, and runs within the bounds of `spec.reward`."""
    factor: Annotated[float, Field(ge=1, le=16)] = 1.0
    """Prompts drawn in a round for each group that is still missing: more than 1 saves rounds and wastes samples. The
    prompts of groups beyond `promptsPerStep` are sampled again in the next step."""
    limit: Annotated[int, Field(ge=1, le=1000, json_schema_extra={"format": "int32"})] = 8
    """The job fails when a step has drawn `limit` times `promptsPerStep` prompts and too few groups passed."""


class DraftMethod(StrEnum):
    """Method that guesses the next tokens."""

    NGRAM = "NGram"


class SpeculativeSpec(ApiModel):
    """Guess several tokens and compute them in one step. What is sampled does not change: a guess counts where it is
    the token that its place would have got without it."""

    method: DraftMethod = DraftMethod.NGRAM
    """`NGram`: what followed the last time that the newest tokens stood in the prompt or response."""
    draft_tokens: Annotated[int, Field(ge=1, le=32, json_schema_extra={"format": "int32"})] = 4
    """Most tokens of a guess. Each that is wrong costs what a token costs."""
    min_match: Annotated[int, Field(ge=1, le=32, json_schema_extra={"format": "int32"})] = 2
    """Fewest tokens that must have stood there before."""
    max_match: Annotated[int, Field(ge=1, le=32, json_schema_extra={"format": "int32"})] = 4
    """Most tokens that are looked for; the place of the longest match is guessed from."""


class PartialSpec(ApiModel):
    """End a step's generation when enough groups are complete; the others go on in the next step."""

    factor: Annotated[float, Field(gt=1, le=16)] = 2.0
    """Groups that grow at once, for each one that a step trains on; at most `staleness.max` + 1."""


class StalenessOrder(StrEnum):
    """Orders in which groups are trained on."""

    IN_ORDER = "InOrder"
    READY_FIRST = "ReadyFirst"


class StalenessLimit(StrEnum):
    """Treatment of a group that would be too old in the next step and is not complete."""

    WAIT = "Wait"
    MASK = "Mask"
    DISCARD = "Discard"


class StalenessSpec(ApiModel):
    """Bound on the age of tokens that are trained on."""

    max: Annotated[int, Field(ge=0, le=15, json_schema_extra={"format": "int32"})] = 1
    """Updates between the weights that sampled a token and those that are trained. A hard bound: a step waits for
    groups that would exceed it, and nothing is thrown away, unless `onLimit` says otherwise. With mode
    `Disaggregated`, 1: engines generate for the next step while trainers learn; 0: they take turns, to the bits of
    `Colocated`. With mode `Async`, any: engines are as many steps ahead at most."""
    order: StalenessOrder = StalenessOrder.IN_ORDER
    """Mode `Async`: which groups a step trains on. `InOrder`: those of the data's next prompts, whichever were complete
    first. `ReadyFirst`: those that are complete, the oldest first, and those that would be too old in the next step."""
    in_flight: SampleCount | None = None
    """Mode `Async`: groups that are begun and not yet trained on, at most; from `promptsPerStep` on. Default: as many
    as `max` allows, (`max` + 1) x `promptsPerStep`. Fewer keep tokens younger and need less KV cache; engines may
    wait."""
    on_limit: StalenessLimit = StalenessLimit.WAIT
    """Mode `Async` with `ReadyFirst`: what happens to groups that reach `max` before they are complete. `Wait`: the
    step waits for them. `Mask`: they go on, and their tokens that are too old are left out of the loss. `Discard`:
    their tokens are dropped, and their prompts sampled again under new weights and with the same noise; the second time
    steps wait for them, so that none is dropped for its length."""


class TailSpec(ApiModel):
    """End a step's generation when enough groups are complete; the longest get a step of their own later."""

    defer_longest: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the groups that a step begins and does not wait for; at most 0.5. With 0.2 a step begins
    `promptsPerStep` / 0.8 groups, and about each fifth step is one of deferred groups. Their tokens are dropped and
    sampled again then, under new weights and with the same noise; their prompts are not dropped."""


class RolloutSpec(ApiModel):
    """Generation by vLLM."""

    prompts_per_step: SampleCount
    """Prompts trained on each step; without `oversampling` as many are drawn."""
    samples_per_prompt: SampleCount
    """Responses for each prompt (the group)."""
    max_response_tokens: TokenCount
    """Longer responses are cut and counted as truncated."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Sampling temperature; the trainer applies the same one."""
    top_p: Annotated[Fraction, Field(gt=0)] = 1.0
    """Nucleus mass."""
    top_k: NonNegativeInt = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: Fraction = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    stop: Annotated[list[Name], Field(max_length=32)] = []
    """Strings that end a response (the string is kept out of it)."""
    stop_token_ids: Annotated[list[NonNegativeInt], Field(max_length=256)] = []
    """Token ids that end a response, beside the tokenizer's end token."""
    ignore_eos: bool = False
    """Generate `maxResponseTokens` regardless of the end token."""
    tensor_parallel: GroupSize = 1
    """Devices of one engine; the job's devices divided by it are the engines."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of device memory the engine may use while awake (npu, cuda)."""
    kv_cache_bytes: Annotated[int, Field(ge=2**20, le=2**44, json_schema_extra={"format": "int64"})] | None = None
    """KV cache on each device of an engine, in bytes; default: 1 GiB on `cpu`, else what `memoryFraction` leaves."""
    oversampling: OversamplingSpec | None = None
    """Sample further prompts in the place of groups that a filter leaves out; null: train on every group."""
    partial: PartialSpec | None = None
    """Let long responses grow over several steps; null: each step waits for its longest response."""
    staleness: StalenessSpec | None = None
    """The bound of `partial` and of modes `Disaggregated` and `Async`; default: 1."""
    speculative: SpeculativeSpec | None = None
    """Speculative decoding; null: a token a step."""
    router_replay: bool = False
    """Mixtures of experts: the trainer sends each token to the experts that the engine sent it to (R3,
    arXiv 2510.11370), so that rounding in a router no longer makes the two differ."""
    tail: TailSpec | None = None
    """Gather long responses in steps of their own; null: each step waits for its longest response."""
    max_num_seqs: SampleCount | None = None
    """Sequences that an engine runs at once; default: all of its share of a step, at most 1024."""
    assignment: RolloutAssignment = RolloutAssignment.FIXED
    """Assignment of prompts to engines. `Fixed`: each has its share from the beginning, so that the same job gives
    the same bits. `WhenFree`: where `maxNumSeqs` is too small for a share, an engine takes the next prompt when it
    has finished one, first those with the longest responses the last time; a response's neighbours, and with them
    its rounding, then depend on which engine was faster."""
    max_batched_tokens: TokenCount | None = None
    """Tokens an engine takes in one scheduler step; default: vLLM's."""
    graph_mode: bool = False
    """On NPUs and GPUs replay captured graphs of decoding steps; on CPU compile the model."""
    prefix_caching: bool = True
    """Reuse the KV cache of shared prompt prefixes within a step."""
    engine_args: Annotated[
        FreeForm,
        Field(
            json_schema_extra={
                "properties": {name: {"x-kubernetes-int-or-string": True} for name in RESERVED_ENGINE_ARGS}
            }
        ),
    ] = {}
    """Further vLLM engine arguments, passed as they are; names that RLJob sets itself are refused."""
