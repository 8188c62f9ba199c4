"""What a user may write under `spec` of an RLJob. Each field's docstring is its manual."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from rljob_api.base import ApiModel

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Mode(StrEnum):
    COLOCATED = "Colocated"
    DISAGGREGATED = "Disaggregated"
    ASYNC = "Async"


class Hub(StrEnum):
    HUGGING_FACE = "HuggingFace"
    MODEL_SCOPE = "ModelScope"


# --- model -------------------------------------------------------------------------------------


class TrainedTokenizer(ApiModel):
    """A small tokenizer trained at start-up on the job's own data (prompts and labels)."""

    vocab_size: PositiveInt = 512
    """Upper bound of the vocabulary, special tokens included."""
    kind: Annotated[str, Field(pattern="^(Word|BPE)$")] = "Word"
    """`Word`: one token for each whitespace-separated word of the data; `BPE`: byte-pair encoding."""


class RandomModel(ApiModel):
    """A model with random weights, for tests and demonstrations."""

    config: dict[str, Any]
    """Hugging Face config, with `model_type` (`qwen2`, `qwen3` or `qwen3_moe`); `vocab_size` defaults to the tokenizer's."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights."""
    tokenizer: TrainedTokenizer = TrainedTokenizer()
    """The tokenizer to train for it."""


class ModelSpec(ApiModel):
    """The policy's starting point: exactly one of `path` and `random`."""

    path: str | None = None
    """Checkpoint folder (config.json, safetensors, tokenizer) or hub id."""
    hub: Hub = Hub.HUGGING_FACE
    """Where a `path` that is not a local folder is fetched from."""
    revision: str | None = None
    """Branch, tag or commit on the hub; default: the hub's default branch."""
    random: RandomModel | None = None
    """Random weights instead of a checkpoint."""


# --- data and rewards --------------------------------------------------------------------------


class SyntheticData(ApiModel):
    """A generated data set whose right answer depends on the prompt."""

    task: Annotated[str, Field(pattern="^(RepeatLast|Copy|Reverse)$")] = "RepeatLast"
    """`RepeatLast`: repeat the prompt's last symbol; `Copy`: repeat the prompt; `Reverse`: the prompt backwards."""
    rows: PositiveInt = 4096
    """Number of distinct rows generated (fewer when the symbols allow no more)."""
    symbols: Annotated[int, Field(ge=2)] = 13
    """Alphabet size."""
    prompt_symbols: PositiveInt = 4
    """Symbols in a prompt."""
    answer_symbols: PositiveInt = 8
    """Symbols in the right answer."""
    seed: NonNegativeInt = 0
    """Seed of the generator."""


class RewardSpec(ApiModel):
    """How a response is scored: exactly one of `name` and `python`."""

    name: Annotated[str, Field(pattern="^(match|exact|regex|math)$")] | None = None
    """Built in: `match` (share of the label's tokens that are right, position by position), `exact`, `regex`, `math` (math-verify)."""
    python: str | None = None
    """`package.module:function`, sync or async; takes one sample, or a list when `batch` is true."""
    batch: bool = False
    """Call `python` once with all samples of a prompt group instead of once per sample."""
    args: dict[str, Any] = {}
    """Keyword arguments for the reward function (`regex` needs `pattern`)."""
    timeout_seconds: PositiveFloat = 30.0
    """Deadline for one call."""
    on_error: Annotated[str, Field(pattern="^(Fail|Score)$")] = "Fail"
    """`Fail`: an exception or time-out in a reward fails the step; `Score`: the sample gets `errorScore`."""
    error_score: float = 0.0
    """Score for a sample whose reward failed, with `onError: Score`."""


class DataSource(ApiModel):
    """One data set: exactly one of `path` and `synthetic`."""

    name: str | None = None
    """Name in metrics; default: the file's or folder's name."""
    path: str | None = None
    """`.jsonl` or `.parquet` file, Hugging Face dataset folder (`save_to_disk`), or hub id."""
    hub: Hub = Hub.HUGGING_FACE
    """Where a `path` that is not local is fetched from."""
    split: str = "train"
    """Split of a dataset folder or hub data set."""
    synthetic: SyntheticData | None = None
    """A generated data set instead of a file."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    label_key: str | None = "label"
    """Column with the reference answer; null when the reward needs none."""
    apply_chat_template: bool = False
    """Render the prompt through the tokenizer's chat template (a plain string becomes one user message)."""
    weight: PositiveFloat = 1.0
    """Share of prompts drawn from this source, relative to the other sources' weights."""
    reward: RewardSpec | None = None
    """Reward for this source; default: `spec.reward`."""


class DataSpec(DataSource):
    """The prompts: one data set written in place, or several under `sources`."""

    sources: list[DataSource] = []
    """Several data sets, mixed by `weight`; excludes `path` and `synthetic` beside it."""
    shuffle: bool = True
    """Shuffle each epoch with the job's seed."""
    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are reported and skipped; default: model length less `rollout.maxResponseTokens`."""


class EvaluationSpec(ApiModel):
    """Scoring on held-out data, as a phase of its own."""

    data: DataSource
    """The held-out data set."""
    every_steps: PositiveInt = 50
    """Evaluate after every N steps."""
    at_start: bool = False
    """Evaluate once before training too."""
    max_prompts: PositiveInt | None = None
    """Use only the first N prompts."""
    samples_per_prompt: PositiveInt = 1
    """Responses for each prompt."""
    pass_at: list[PositiveInt] = [1]
    """k values for pass@k (unbiased estimator, arXiv 2107.03374); each at most `samplesPerPrompt`."""
    pass_threshold: float = 1.0
    """A response passes when its reward is at least this."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass."""
    max_response_tokens: PositiveInt | None = None
    """Default: `rollout.maxResponseTokens`."""


# --- algorithm ---------------------------------------------------------------------------------


class KlEstimator(StrEnum):
    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    LOW_VAR = "low_var"


class LossAggregation(StrEnum):
    TOKEN_MEAN = "TokenMean"
    SEQUENCE_MEAN = "SequenceMean"
    CONSTANT_LENGTH = "ConstantLength"


class KlSpec(ApiModel):
    """Distance to the reference policy (the starting checkpoint)."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the KL term in the loss; 0 leaves it out (DAPO, arXiv 2503.14476)."""
    estimator: KlEstimator = KlEstimator.LOW_VAR
    """`k1`, `k2`, `k3` of Schulman's note; `low_var` is k3 clamped to [-10, 10] (slime's default form)."""
    monitor: bool = False
    """Compute and report the KL even where the coefficient is 0 (costs a forward pass)."""


class TisSpec(ApiModel):
    """Truncated importance sampling between the engine's and the trainer's probabilities."""

    enabled: bool = True
    """Correct the loss by the ratio of trainer to engine probability."""
    low: NonNegativeFloat = 0.0
    """Lower bound of the ratio (slime: 0)."""
    high: PositiveFloat = 2.0
    """Upper bound of the ratio (slime and verl: 2.0)."""


class AlgorithmSpec(ApiModel):
    """The policy-gradient algorithm."""

    name: Annotated[str, Field(pattern="^(grpo|dr_grpo|dapo|gspo|cispo|reinforce_pp|rloo|ppo)$")] = "grpo"
    """Registered algorithm; this version builds `grpo`."""
    clip_low: Fraction = 0.2
    """Ratio is clipped below at 1 - clipLow (PPO, arXiv 1707.06347)."""
    clip_high: PositiveFloat = 0.28
    """Ratio is clipped above at 1 + clipHigh (clip-higher of DAPO, arXiv 2503.14476)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Dual-clip bound c for negative advantages (arXiv 1912.09729); null switches it off (slime's default)."""
    normalize_by_std: bool = True
    """Divide group advantages by the unbiased (n-1) standard deviation plus 1e-6 (GRPO, arXiv 2402.03300); false: Dr. GRPO."""
    aggregation: LossAggregation = LossAggregation.TOKEN_MEAN
    """How token losses become one number: `TokenMean` (DAPO), `SequenceMean` (GRPO), `ConstantLength` (Dr. GRPO)."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    kl: KlSpec = KlSpec()
    """Distance to the reference policy."""
    tis: TisSpec = TisSpec()
    """Train-inference mismatch correction."""


# --- rollout -----------------------------------------------------------------------------------


class RolloutSpec(ApiModel):
    """Generation by vLLM."""

    prompts_per_step: PositiveInt
    """Prompts drawn each step."""
    samples_per_prompt: PositiveInt
    """Responses for each prompt (the group)."""
    max_response_tokens: PositiveInt
    """Longer responses are cut and counted as truncated."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer applies the same one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass."""
    top_k: NonNegativeInt = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: Fraction = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    stop: list[str] = []
    """Strings that end a response (the string is kept out of it)."""
    stop_token_ids: list[NonNegativeInt] = []
    """Token ids that end a response, beside the tokenizer's end token."""
    ignore_eos: bool = False
    """Generate `maxResponseTokens` regardless of the end token."""
    tensor_parallel: PositiveInt = 1
    """Devices of one engine; the job's devices divided by it are the engines."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of device memory the engine may use while awake (npu, cuda)."""
    kv_cache_bytes: PositiveInt | None = None
    """KV cache of one engine in bytes; on CPU default 1 GiB (whole GiB there)."""
    max_num_seqs: PositiveInt | None = None
    """Sequences that an engine runs at once; default: all of its share of a step, at most 1024."""
    max_batched_tokens: PositiveInt | None = None
    """Tokens an engine takes in one scheduler step; default: vLLM's."""
    graph_mode: bool = False
    """Graph capture / compilation instead of eager execution."""
    prefix_caching: bool = True
    """Reuse the KV cache of shared prompt prefixes within a step."""
    engine_args: dict[str, Any] = {}
    """Further vLLM engine arguments, passed as they are; names that RLJob sets itself are refused."""


# --- training ----------------------------------------------------------------------------------


class TrainingBackend(StrEnum):
    MEGATRON = "Megatron"
    FSDP = "FSDP"


class Precision(StrEnum):
    BF16 = "bf16"
    FP32 = "fp32"


class LrSchedule(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class OptimizerSpec(ApiModel):
    """Adam with decoupled weight decay, in Megatron's distributed optimizer."""

    lr: PositiveFloat = 1.0e-6
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    schedule: LrSchedule = LrSchedule.CONSTANT
    """Shape after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer updates over which the rate rises linearly from 0."""
    decay_steps: PositiveInt | None = None
    """Optimizer updates until `minLr` is reached; default: all of the job's."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; not applied to norms and biases."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Adam's first moment decay."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    """Adam's second moment decay (slime's 0.98)."""
    eps: PositiveFloat = 1.0e-8
    """Adam's epsilon."""
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm is clipped to this; 0 switches clipping off."""
    host_offload: bool = False
    """Keep optimizer state in host memory between updates."""


class Recompute(StrEnum):
    NONE = "None"
    FULL = "Full"
    SELECTIVE = "Selective"


class TrainingSpec(ApiModel):
    """Training by Megatron-core. Data parallel size is devices / (tensor x pipeline parallel size)."""

    backend: TrainingBackend = TrainingBackend.MEGATRON
    """Training library; this version builds `Megatron`."""
    tensor_parallel: PositiveInt = 1
    """Tensor parallel size."""
    pipeline_parallel: PositiveInt = 1
    """Pipeline parallel size."""
    expert_parallel: PositiveInt = 1
    """Expert parallel size (mixture-of-experts models)."""
    precision: Precision = Precision.BF16
    """`bf16` with fp32 master weights and gradients, or `fp32` throughout."""
    global_batch_size: PositiveInt | None = None
    """Samples in one optimizer update; must divide promptsPerStep x samplesPerPrompt; default: all of them (one update a step)."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Padded tokens in one micro-batch; samples are sorted and grouped by length under this bound."""
    recompute: Recompute = Recompute.NONE
    """Activation recomputation."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Optimizer and schedule."""


# --- weight sync, memory, network --------------------------------------------------------------


class WeightSyncMode(StrEnum):
    AUTO = "Auto"
    DIRECT = "Direct"
    LOAD = "Load"


class WeightSyncSpec(ApiModel):
    """Handing new weights from trainer to engine."""

    mode: WeightSyncMode = WeightSyncMode.AUTO
    """`Load`: named tensors through vLLM's layerwise reload; `Direct`: in-place copies (npu, cuda); `Auto` picks."""
    bucket_bytes: Annotated[int, Field(ge=4096)] = 268435456
    """Size of one of the two staging slots in bytes; raised to the largest indivisible group of tensors when smaller."""
    probe_every_steps: NonNegativeInt = 10
    """Compare engine and trainer log-probabilities of fixed prompts every N steps; 0 switches it off."""
    probe_tolerance: PositiveFloat | None = None
    """Largest mean absolute difference the probe accepts; default 1e-3 in fp32, 0.1 in bf16."""


class MemorySaverMode(StrEnum):
    PRELOAD = "preload"
    TORCH = "torch"
    OFF = "off"


Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$")]


class MemorySaverSpec(ApiModel):
    """Giving the trainer's device memory back while it sleeps."""

    mode: MemorySaverMode = MemorySaverMode.PRELOAD
    """Hook of torch_memory_saver (npu, cuda). The cpu device has an arena of its own, used unless `off`."""
    train_memory_margin: Quantity = "2Gi"
    """Free device memory that must remain when the trainer wakes."""


class HcclSpec(ApiModel):
    """Huawei collective communication."""

    connect_timeout_seconds: PositiveInt = 7200
    """HCCL_CONNECT_TIMEOUT."""
    exec_timeout_seconds: PositiveInt | None = None
    """HCCL_EXEC_TIMEOUT; default: HCCL's."""
    deterministic: bool = True
    """HCCL_DETERMINISTIC."""
    buffer_size_mb: PositiveInt | None = None
    """HCCL_BUFFSIZE in MiB for each communicator; default: HCCL's 200."""


# --- life cycle --------------------------------------------------------------------------------


class CheckpointSpec(ApiModel):
    """What a restart continues from."""

    path: str | None = None
    """Folder for checkpoints; default: `checkpoints` in the run folder."""
    every_steps: PositiveInt = 20
    """Save after every N steps; the last step is always saved."""
    keep: PositiveInt = 3
    """Newest checkpoints that are kept."""
    grace_seconds: PositiveFloat = 30.0
    """Time a stop request leaves for saving."""


class FailurePolicy(ApiModel):
    """What the operator does when an attempt fails."""

    max_restarts: NonNegativeInt = 3
    """Restarts before the job fails."""
    backoff_seconds: PositiveFloat = 10.0
    """Wait before the first restart; doubles each time, at most 10 minutes."""


class TimeoutsSpec(ApiModel):
    """Deadlines in seconds. Past one, all processes' stacks are written and the job fails with the phase's name."""

    start_seconds: PositiveFloat = 1800.0
    """From start to all processes ready."""
    phase_seconds: PositiveFloat = 3600.0
    """Any phase without an entry in `phases`."""
    phases: dict[str, PositiveFloat] = {}
    """Per phase, by its name in the step record."""


class RecordsSpec(ApiModel):
    """What is written about each step beside `steps.jsonl`."""

    trajectories_every_steps: NonNegativeInt = 1
    """Write trajectories of every Nth step; 0 writes none."""
    trajectories_per_step: PositiveInt | None = None
    """At most this many samples a step (whole groups first); default: all."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    http_port: Annotated[int, Field(ge=0, le=65535)] | None = 0
    """Port of the driver's HTTP endpoint; 0 picks a free one (written to `http.json` in the run folder), null serves none."""
    http_host: str = "127.0.0.1"
    """Address that the endpoint listens on."""
    linger_seconds: NonNegativeFloat = 0.0
    """How long the driver waits at the end for the last step record to be read over HTTP."""


# --- resources ---------------------------------------------------------------------------------


class Profile(StrEnum):
    ASCEND_A2 = "ascend-a2"
    ASCEND_A3 = "ascend-a3"
    ASCEND_950 = "ascend-950"
    CCE = "cce"
    HAMI = "hami"
    CUDA = "cuda"
    CPU = "cpu"


class ResourcesSpec(ApiModel):
    """The hardware."""

    profile: Profile = Profile.ASCEND_A2
    """Hardware profile: resource names, mounts and environment follow from it."""
    nodes: PositiveInt = 1
    """Worker nodes."""
    devices_per_node: PositiveInt = 8
    """Devices on each node; on `cpu` the number of trainer processes."""
    threads_per_device: PositiveInt | None = None
    """CPU threads for each process; on `cpu` default: cores divided by devices."""


class RLJobSpec(ApiModel):
    """One reinforcement-learning post-training job."""

    steps: PositiveInt
    """Training steps."""
    seed: NonNegativeInt = 1234
    """Seed of everything random: data order, sampling, dropout."""
    mode: Mode = Mode.COLOCATED
    """Placement of training and generation; this version builds `Colocated`."""
    image: str | None = None
    """Worker image."""
    model: ModelSpec
    """The policy's starting point."""
    data: DataSpec
    """The prompts."""
    reward: RewardSpec | None = None
    """How responses are scored; needed unless every data source has its own."""
    evaluation: EvaluationSpec | None = None
    """Scoring on held-out data."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """The algorithm."""
    rollout: RolloutSpec
    """Generation."""
    training: TrainingSpec = TrainingSpec()
    """Training."""
    weight_sync: WeightSyncSpec = WeightSyncSpec()
    """Weight hand-over."""
    resources: ResourcesSpec = ResourcesSpec()
    """Hardware."""
    memory_saver: MemorySaverSpec = MemorySaverSpec()
    """Memory saver."""
    hccl: HcclSpec = HcclSpec()
    """Collective communication."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints."""
    failure_policy: FailurePolicy = FailurePolicy()
    """Restarts."""
    timeouts: TimeoutsSpec = TimeoutsSpec()
    """Deadlines."""
    records: RecordsSpec = RecordsSpec()
    """Records."""
    suspend: bool = False
    """Save the last completed step and give the devices back."""
    active_deadline_seconds: PositiveInt | None = None
    """The job fails when it has been running for longer."""
    ttl_seconds_after_finished: NonNegativeInt | None = None
    """A finished job is deleted this long after its end."""
