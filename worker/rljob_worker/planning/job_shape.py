"""The ranks of a job and the largest piece of work that each is given."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rljob_api import derived
from rljob_api.spec import Precision, RLJobSpec
from rljob_worker.devices.kinds import kind_of
from rljob_worker.errors import UserError
from rljob_worker.models.facts import ModelFacts
from rljob_worker.models.trained import TrainedModel, check_trained_sizes
from rljob_worker.parallel_layout import ParallelLayout, check_nodes, check_sizes

ASSUMED_PROMPT_TOKENS = 1024
"""Length of the longest prompt where `data.maxPromptTokens` does not say it."""
_SPECIAL_TOKENS = 2
"""Around a synthetic prompt."""


@dataclass(frozen=True, slots=True)
class JobShape:
    """Parts of a job that its memory depends on."""

    kind: str
    """`npu`, `cuda` or `cpu`."""
    trainers: ParallelLayout
    per_node: int
    """Trainers of a node."""
    engine_tp: int
    """Tensor parallel size of an engine."""

    def stages_of_node(self, node: int) -> list[int]:
        """Pipeline stage of each rank on a node."""
        trainers = self.trainers
        return [replace(trainers, rank=rank).pp_rank for rank in trainers.nodes(self.per_node)[node]]

    def layers(self, model: ModelFacts, stage: int) -> range:
        """Layers of a stage: an even cut."""
        count = model.num_layers // self.trainers.pp
        return range(stage * count, (stage + 1) * count)


def job_shape(spec: RLJobSpec, model: TrainedModel) -> JobShape:
    """Shape of a job.

    Raises:
        UserError: parallel sizes that do not fit the devices or the model.
    """
    training = spec.training
    world = derived.trainers(spec)
    kind = kind_of(spec.resources.profile).name
    try:
        check_sizes(training, world)
        check_nodes(training, derived.trainers_per_node(spec), derived.trainer_nodes(spec))
    except ValueError as error:
        raise UserError(f"spec.{error}") from None
    check_trained_sizes(model, training)
    return JobShape(
        kind=kind,
        trainers=ParallelLayout.of_training(training, world),
        per_node=derived.trainers_per_node(spec),
        engine_tp=spec.rollout.tensor_parallel,
    )


def itemsize(spec: RLJobSpec) -> int:
    """Bytes of a parameter or activation."""
    return 2 if spec.training.precision is Precision.BF16 else 4


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The largest micro-batch that a trainer may be given, in tokens."""

    tokens: int
    """Tokens of all its sequences."""
    responses: int
    """Positions that logits are computed at."""
    count: int
    """Micro-batches of that size in an update."""
    longest: int
    """Longest sequence."""
    assumed_prompt: bool
    """Whether the prompt's length is assumed."""

    def share(self, parts: int) -> MicroBatch:
        """The most of it that one of the ranks has which divide its tokens; any of these may be responses."""
        tokens = -(-self.tokens // parts)
        return replace(self, tokens=tokens, responses=min(tokens, self.responses))


def largest_micro_batch(spec: RLJobSpec, model: ModelFacts, job: JobShape) -> MicroBatch:
    """Worst case of `trainer.batches.plan_step`: all samples of an update as long as they may be.

    `maxTokensPerMicroBatch` bounds the tokens of a row; one longer sample is a row of its own. Logits are computed at
    response positions only, so short prompts are the worst.
    """
    prompt, assumed = prompt_tokens(spec)
    longest = min(derived.longest_sample(spec, prompt), model.max_position_embeddings)
    bound = spec.training.max_tokens_per_micro_batch
    samples = -(-(spec.training.global_batch_size or derived.samples_per_step(spec)) // job.trainers.samples)
    tokens = min(max(bound, longest), samples * longest)
    return MicroBatch(
        tokens=tokens,
        responses=min(tokens, samples * derived.longest_sampled(spec)),
        count=max(1, samples * longest // tokens),
        longest=longest,
        assumed_prompt=assumed,
    )


def prompt_tokens(spec: RLJobSpec) -> tuple[int, bool]:
    """Tokens of the longest prompt, and whether that is assumed; none where all data are environments, whose first
    observations are bounded as whole episodes are."""
    sources = [source for _, source in derived.data_sources(spec) if source.environment is None]
    if not sources:
        return 0, False
    if spec.data.max_prompt_tokens is not None:
        return spec.data.max_prompt_tokens, False
    symbols = [source.synthetic.prompt_symbols for source in sources if source.synthetic]
    if len(symbols) == len(sources):
        return max(symbols) + _SPECIAL_TOKENS, False
    return ASSUMED_PROMPT_TOKENS, True
