"""Values that cross process borders between driver, trainers and engines: plain dataclasses of numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from rljob_api.json_types import Json
from rljob_api.spec import RewardSpec

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.uint8]
ExpertArray = npt.NDArray[np.unsignedinteger]
"""[tokens, layers with experts, experts of a token]: numbers of experts."""


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A picture as the model's image processor cut it, and how people see it; equal where the patches are."""

    patches: ByteArray
    """[p, channels x frames x side x side], not normalised."""
    grid: tuple[int, int, int]
    """Patches along time, height and width; p together."""
    digest: str
    """SHA-256 of the patches and the grid, in hexadecimal digits."""
    size: tuple[int, int]
    """Width and height in pixels, before it was resized."""
    thumbnail: bytes = field(repr=False)
    """A small PNG of it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data source, rendered and tokenized."""

    uid: str
    """`source/row`, stable over runs."""
    source: str
    text: str
    token_ids: tuple[int, ...]
    label: str | None
    reward: RewardSpec
    metadata: Mapping[str, object] = field(default_factory=dict, hash=False)
    """The row's other columns, for reward functions."""
    row: Mapping[str, object] = field(default_factory=dict, hash=False, repr=False, compare=False)
    """All columns as the data have them, for reward functions of other frameworks."""
    label_key: str | None = None
    """Column of the label."""
    messages: Sequence[Mapping[str, object]] | None = field(default=None, hash=False, repr=False, compare=False)
    """The conversation that `text` was rendered from; None without a chat template."""
    environment: str | None = None
    """Place in the manifest of the source whose environment answers the policy; None: it answers once. With seeds, text
    and tokens are empty then: what the environment says first is the prompt. With tools they are the row's."""
    seed: int = 0
    """Seed of the environment's reset."""
    options: Mapping[str, object] = field(default_factory=dict, hash=False, repr=False, compare=False)
    """Options of the environment's reset."""
    pictures: tuple[Picture, ...] = field(default=(), repr=False)
    """Pictures in the order of their places in the tokens."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of an engine, and the transform that the trainer applies to its logits."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    forbidden: tuple[int, ...] = ()
    """Tokens that are never sampled: their probability is 0."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample to generate, or to go on with."""

    prompt_token_ids: tuple[int, ...]
    seed: int
    sampled_token_ids: tuple[int, ...] = ()
    """Tokens sampled of it before, wherever that was; the generated ones follow them."""
    group: int = 0
    """The prompt that it is a sample of; asked for where a generation is cut by groups."""
    max_tokens: int | None = None
    """Tokens at which it ends, what was sampled before included; None: the sampling's."""
    key: int | None = None
    """Names its response among those of a generation; None: its place among them, which is not known to a caller whose
    requests may overtake each other."""
    pictures: tuple[Picture, ...] = ()
    """Pictures of the prompt, in the order of their places in it."""

    def __reduce__(self) -> tuple[type[GenerationRequest], tuple[object, ...]]:
        """Pickle by the constructor: a dataclass with slots looks for its fields each time, hundreds in a rollout."""
        named = self.prompt_token_ids, self.seed, self.sampled_token_ids, self.group, self.max_tokens, self.key
        return GenerationRequest, (*named, self.pictures)

    def limit(self, max_tokens: int) -> int:
        """Tokens at which it ends, where the sampling has `max_tokens`."""
        return max_tokens if self.max_tokens is None else self.max_tokens


@dataclass(frozen=True, slots=True)
class Quota:
    """So many of some groups."""

    least: int
    among: frozenset[int]


@dataclass(frozen=True, slots=True)
class Cut:
    """When a generation ends although some responses still grow: when each quota's groups are complete."""

    quotas: tuple[Quota, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """One generated response, or its beginning."""

    token_ids: IntArray
    """[n], the end token included where it was generated; without what was sampled before."""
    log_probs: FloatArray
    """[n], of the distribution that was sampled from (after temperature, top-k, top-p, min-p)."""
    finish_reason: str
    """`stop` or `length`; empty where it may go on."""
    stop_text: str | None = None
    """The stop string that ended it, if any."""
    experts: ExpertArray | None = None
    """Experts of all tokens but the last, those of the prompt included; None where the engine does not report them."""

    def __reduce__(self) -> tuple[Callable[..., Generation], tuple[object, ...]]:
        """Pickle by the bytes of the arrays: a rollout has hundreds, and an array takes as long as all else."""
        ids, log_probs = np.asarray(self.token_ids, np.int64), np.asarray(self.log_probs, np.float32)
        return _generation, (ids.tobytes(), log_probs.tobytes(), self.finish_reason, self.stop_text, self.experts)


def _generation(
    token_ids: bytes, log_probs: bytes, finish_reason: str, stop_text: str | None, experts: ExpertArray | None
) -> Generation:
    """A generation whose arrays cannot be written, as any that came through Ray."""
    ids, values = np.frombuffer(token_ids, np.int64), np.frombuffer(log_probs, np.float32)
    return Generation(ids, values, finish_reason, stop_text, experts)


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The score of one response."""

    score: float
    parts: dict[str, float] = field(default_factory=dict)
    """Values that a reward function reported beside the score, or each part's own score by its name."""
    error: str | None = None
    """Why the reward failed, with `onError: Score`; the score is then `errorScore`."""
    absent: bool = False
    """Whether it is of a part that gave the response no score: it adds nothing, and is not recorded."""
    notes: dict[str, str] = field(default_factory=dict)
    """Answers of judges, by the names of their parts."""


@dataclass(frozen=True, slots=True)
class BatchPictures:
    """The pictures of N streams of T tokens, each of the K distinct ones once, and where all tokens are."""

    patches: ByteArray
    """[P, D], of all of them one after the other, not normalised."""
    grids: IntArray
    """[K, 3], patches along time, height and width."""
    counts: IntArray
    """[N], pictures of each stream."""
    numbers: IntArray
    """[sum of counts], which of the K they are, stream by stream."""
    positions: IntArray
    """[3, T], of each token in its stream: time, row and column."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TrainBatch:
    """The streams of a step, one after the other: N streams of T tokens, n of which the policy sampled.

    Flat, so that what travels to the trainers is six or seven arrays, however many streams there are.
    """

    tokens: IntArray
    """[T]."""
    lengths: IntArray
    """[N], tokens of each stream."""
    sampled: BoolArray
    """[T]: which tokens the policy sampled; only those are trained on. The first of a stream never is."""
    rollout_log_probs: FloatArray
    """[n], the engine's."""
    advantages: FloatArray
    """[n]; of no meaning beside `rewards`."""
    versions: IntArray
    """[n], the weights that sampled each token."""
    experts: ExpertArray | None = None
    """[T - N, ...]: those that the engine sent each token but the last of its stream to; None: the trainer's own."""
    rewards: FloatArray | None = None
    """[N], of each stream, for a critic to make advantages of; None: the advantages are known."""
    pictures: BatchPictures | None = None
    """None where no stream has any."""
    samples: IntArray | None = None
    """[N], number of the sample of each stream: 0, and the same as or one more than that before; None: a stream each.
    """

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of_responses(
        cls,
        tokens: Sequence[IntArray],
        prompt_lengths: IntArray,
        rollout_log_probs: Sequence[FloatArray],
        advantages: FloatArray,
        version: int = 0,
        pictures: BatchPictures | None = None,
    ) -> TrainBatch:
        """Streams of a prompt and one response each.

        Args:
            tokens: N arrays [prompt + response].
            prompt_lengths: [N].
            rollout_log_probs: N arrays [response].
            advantages: [N].
            version: of the weights that sampled them.
            pictures: of the streams.
        """
        lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
        responses = lengths - prompt_lengths
        flags = [np.arange(length) >= prompt for length, prompt in zip(lengths, prompt_lengths)]
        return cls(
            tokens=np.concatenate([np.empty(0, np.int64), *tokens]).astype(np.int64),
            lengths=lengths,
            sampled=np.concatenate([np.empty(0, np.bool_), *flags]),
            rollout_log_probs=np.concatenate([np.empty(0, np.float32), *rollout_log_probs]),
            advantages=np.repeat(advantages, responses).astype(np.float32),
            versions=np.full(int(responses.sum()), version, dtype=np.int64),
            pictures=pictures,
        )


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Log-probabilities of all sampled tokens of some samples of a batch, one sample after the other."""

    samples: IntArray
    """[b], numbers in the batch."""
    counts: IntArray
    """[b], tokens of each."""
    values: FloatArray
    """[sum of counts], nats."""

    def by_sample(self) -> dict[int, FloatArray]:
        """Number of the sample -> its own."""
        parts = np.split(self.values, np.cumsum(self.counts)[:-1])
        return dict(zip(self.samples.tolist(), parts, strict=True)) if len(self.samples) else {}


@dataclass(slots=True)
class StepMetrics:
    """Report of a trainer on one step; scalars are already reduced over all ranks."""

    metrics: dict[str, float] = field(default_factory=dict)
    applied: bool = True
    """False when a non-finite loss or gradient stopped the update."""
    detail: Mapping[str, Json] = field(default_factory=dict)
    log_probs: TokenLogProbs | None = None
    """The trainer's before the step's updates, of the samples that were asked for and this rank was dealt; None: none,
    or another rank reports them."""
    imbalance: float | None = None
    """Work of the step that all ranks wait for, in that of the mean rank, by its plan; None: one has all samples."""


class EngineReport(TypedDict):
    """Report of an engine on a weight sync; `seconds` in all, and of those its parts."""

    version: int
    bytes: int
    tensors: int
    buckets: int
    verified: bool
    mode: str
    seconds: float
    begin_seconds: float
    wait_seconds: float
    """For trainers."""
    land_seconds: float
    """Copies with their checksums."""
    repack_seconds: float
    """Seconds in which vLLM packs."""
    finish_seconds: float
    rpc_seconds: float
    """The way to the workers."""


class TrainerReport(TypedDict):
    """Report of a trainer on a weight sync; `seconds` in all, and of those its parts where it sends something."""

    version: int
    bytes: int
    tensors: int
    pieces: int
    staging_bytes: int
    """Bytes of the slots that it owns."""
    seconds: float
    read_seconds: NotRequired[float]
    fill_seconds: NotRequired[float]
    """Copying and checksums."""
    spread_seconds: NotRequired[float]
    """Exchange with the host's other trainers."""
    wait_seconds: NotRequired[float]
    network_seconds: NotRequired[float]
    """For engines and other trainers."""
    lora_change: NotRequired[float]
    """Sum of |scale B A| over what it merged, with adapters."""
    lora_lost: NotRequired[float]
    """Sum of what rounding left out of it."""
