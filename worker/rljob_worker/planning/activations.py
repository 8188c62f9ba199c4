"""Memory that a trainer keeps from a forward pass until the backward pass, and that it needs for a moment."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rljob_api.spec import Precision, Recompute, RLJobSpec
from rljob_worker.algorithms.logits import CHUNK_ELEMENTS, DEFAULT_CHUNK_ELEMENTS
from rljob_worker.algorithms.output_layer import Blocks
from rljob_worker.models.config import ModelConfig, sequence_parallel
from rljob_worker.models.facts import ModelFacts
from rljob_worker.planning.job_shape import JobShape, MicroBatch, itemsize

_FP32 = 4
_LOSS_TEMPORARIES = 4
"""fp32 temporaries of a chunk of logits that live at once in `algorithms.logits`."""
_CHUNK_ELEMENTS = 1773
"""Kept for each token and head by the gated delta rule in torch's operators, whose chunks are 64 positions wide: the
triangular system of a chunk is solved row by row, and each row keeps what is above it (64 x 64 / 3); 7 x 64 more."""
_NPU_STATISTICS = 64
"""Bytes a token and head of npu_fusion_attention: softmax maximum and sum, [B, N, S, 8] float32 each."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes that one layer keeps for each token."""

    attention: int
    """Norms and attention."""
    mlp: int
    """Dropped by the `Selective` recomputation."""
    input: int
    """Kept by the `Full` recomputation."""

    def kept(self, recompute: Recompute) -> int:
        """Under one kind of recomputation."""
        if recompute is Recompute.FULL:
            return self.input
        return self.attention + (0 if recompute is Recompute.SELECTIVE else self.mlp)

    @property
    def whole(self) -> int:
        """Without recomputation."""
        return self.attention + self.mlp


def layer_bytes(model: ModelConfig, layer: int, job: JobShape, precision: Precision) -> LayerBytes:
    """Saved tensors of one transformer layer, by the method of Korthikanti et al. (arXiv 2205.05198, section 4).

    Their count, sbh (10 + 24 / t + 5 a s / (h t)) bytes, is for GPT with dropout, GELU and stored attention scores; the
    same walk through this model (RMSNorm, grouped queries, SwiGLU, no dropout, scores never stored) gives, in elements
    a token with h hidden, q and k the widths of all query and key heads, f the MLP's width, t tensor-parallel ranks and
    sequence parallelism where mixtures of experts are cut over them (what is marked * is then divided by t too):

    - two norms: input and output, h each * (on CPU torch's composite norm also keeps the normalised input, in fp32);
    - attention: the fused projection (q + 2 k) / t, which the norms of q and k and the values are views of, q's copy
      q / t, rotated q and k (q + k) / t, the output q / t, and what q and k are rotated by, 4 times a head's rotated
      width: cosines and sines of each token's place in its own sequence;
    - MLP: 3 f / t. Its input is the second norm's output.
    - Experts: c = experts a token times their width instead of f; the chosen tokens are kept once more * (twice when
      they come from other ranks: those of the ranks that an expert is cut over are gathered), and the weighted
      activations beside the plain ones.

    Full recomputation keeps each layer's input *. On CPU the counts are those of Megatron's local layers with torch's
    fused attention in fp32, and are checked against the saved tensors of a real layer.
    """
    size = 2 if precision is Precision.BF16 else 4
    if model.is_linear(layer):
        attention = _linear_attention_bytes(model, job, size)
        return LayerBytes(attention, size * _mlp_elements(model, layer, job), size * model.hidden_size)
    hidden = model.hidden_size // _position_shares(model, job)
    queries = model.num_heads * model.head_dim // job.trainers.tp
    keys = model.num_query_groups * model.head_dim // job.trainers.tp
    heads = model.num_heads // job.trainers.tp
    normed = int(model.qk_norm)
    if job.kind != "cpu":
        statistics = (_NPU_STATISTICS if job.kind == "npu" else _FP32) * heads
        attention = size * (4 * hidden + (3 + normed) * queries + 3 * keys) + statistics
    elif precision is Precision.BF16:
        attention = _FP32 * (4 * hidden + 2 * (1 + normed) * (queries + keys)) + size * (2 * hidden + queries)
    else:
        attention = size * (6 * hidden + (2 + 3 * normed) * (queries + keys))
    attention += size * 4 * round(model.head_dim * model.rotary_fraction)
    if model.output_gate:
        # The gate and, in fp32, its sigmoid; what it multiplies is kept where that is no copy.
        attention += queries * (size + _FP32 + (size if precision is Precision.FP32 else 0))
    return LayerBytes(attention, size * _mlp_elements(model, layer, job), size * hidden)


def _linear_attention_bytes(model: ModelConfig, job: JobShape, size: int) -> int:
    """Bytes that two norms and `gated_delta_net` keep for each token: the same operators on each kind of device.

    Projections and the convolution in the parameters' dtype, all else in fp32; a head's state four times a chunk.
    """
    sizes = model.linear_attention
    assert sizes is not None
    ranks = job.trainers.tp
    keys, values, heads = sizes.key_width // ranks, sizes.value_width // ranks, sizes.value_heads // ranks
    copies = heads * sizes.key_head_dim
    states = 4 * heads * sizes.key_head_dim * sizes.value_head_dim // 64
    in_fp32 = 2 * keys + 28 * copies // 5 + 36 * values // 5 + _CHUNK_ELEMENTS * heads + states
    return _FP32 * (4 * model.hidden_size + in_fp32) + size * (2 * model.hidden_size + 4 * keys + 4 * values)


def _mlp_elements(model: ModelConfig, layer: int, job: JobShape) -> int:
    if not model.is_moe(layer):
        return 3 * model.ffn_hidden_size // job.trainers.tp
    shares, cut = _position_shares(model, job), job.trainers.expert_tp
    own = model.hidden_size // shares
    # An expert's input: of the rank's own positions, or gathered; then what it was gathered or received from.
    copies = own * cut + own * (cut > 1 or job.trainers.ep > 1)
    return model.experts_per_token * (copies + 4 * model.expert_ffn_hidden_size // max(cut, shares))


def _position_shares(model: ModelConfig, job: JobShape) -> int:
    """Ranks that divide the positions between the layers' matrices."""
    return job.trainers.tp if sequence_parallel(model, job.trainers.tp) else 1


@dataclass(frozen=True, slots=True)
class PassBytes:
    """Bytes at the peak of a pass over micro-batches on one rank."""

    activations: int
    logits: int
    work: int
    """Needed for a moment: a layer's gradients, a weight's gradient before it is added up, chunks of the loss."""
    gathered: int = 0
    """Whole weights of what computes, where ranks have rows of them."""
    gradients: int = 0
    """Gradients of all parameters, where they are there in the pass alone."""


def training_pass(
    spec: RLJobSpec, model: ModelConfig, job: JobShape, stage: int, batch: MicroBatch, largest: int
) -> PassBytes:
    """Forward and backward.

    Stage p of P holds min(micro-batches, P - p) micro-batches in Megatron's schedule without interleaving
    (Korthikanti et al., section 4.2.3; `megatron/training/theoretical_memory_utils.py`).

    Args:
        spec: the job.
        model: its model.
        job: what the job is made of.
        stage: pipeline stage of the rank.
        batch: the largest micro-batch, whole; context-parallel ranks divide it. What they exchange around attention is
            as large as what they had, and takes its place.
        largest: elements of the rank's largest parameter.
    """
    size, training, batch = itemsize(spec), spec.training, batch.share(job.trainers.cp)
    layers = [layer_bytes(model, layer, job, training.precision) for layer in job.layers(model, stage)]
    in_flight = min(batch.count, job.trainers.pp - stage)
    kept = sum(layer.kept(training.recompute) for layer in layers) * in_flight
    if training.recompute is not Recompute.NONE:
        # The layer that is being computed again.
        kept += max(layer.whole - layer.kept(training.recompute) for layer in layers)
    activations = batch.tokens * kept
    logits = 0
    if stage == job.trainers.pp - 1:
        tokens = 2 * batch.tokens // _position_shares(model, job) + batch.responses
        activations += tokens * model.hidden_size * size
        logits = logits_bytes(spec, model, job, batch)
    layer_gradients = batch.tokens * size * (2 * model.hidden_size + _widest(model, job))
    work = max(layer_gradients, largest * size, head_work(spec, model, job, batch) if logits else 0)
    return PassBytes(activations, logits, work)


def forward_pass(spec: RLJobSpec, model: ModelConfig, job: JobShape, stage: int, batch: MicroBatch) -> PassBytes:
    """Forward only: nothing is kept but the layer at work; then logits without their gradient."""
    size, batch = itemsize(spec), batch.share(job.trainers.cp)
    layer = max(layer_bytes(model, i, job, spec.training.precision).whole for i in job.layers(model, stage))
    if stage < job.trainers.pp - 1:
        return PassBytes(batch.tokens * layer, 0, 0)
    hidden = (batch.tokens + batch.responses) * model.hidden_size * size
    return PassBytes(
        max(batch.tokens * layer, hidden),
        logits_bytes(spec, model, job, batch),
        loss_chunks(model, job),
    )


def _widest(model: ModelConfig, job: JobShape) -> int:
    return max(_mlp_elements(model, layer, job) for layer in range(model.num_layers))


def logits_bytes(spec: RLJobSpec, model: ModelFacts, job: JobShape, batch: MicroBatch) -> int:
    """Vocabulary-parallel logits of response positions in the parameters' dtype, and the mask of kept tokens.

    As many as `algorithms.output_layer` has at once; their gradient is written where they are.
    """
    rows = _blocks(spec, model, job).at_once(batch.responses)
    return all_logits_bytes(spec, model, job, replace(batch, responses=rows), copies=1)


def all_logits_bytes(spec: RLJobSpec, model: ModelFacts, job: JobShape, batch: MicroBatch, *, copies: int) -> int:
    """Logits of all response positions and the mask; `copies` is 2 where their gradient is beside them."""
    columns, rollout = _columns(model, job), spec.rollout
    masked = rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0
    return batch.responses * columns * (copies * itemsize(spec) + masked)


def head_work(spec: RLJobSpec, model: ModelFacts, job: JobShape, batch: MicroBatch) -> int:
    """Backward pass of the output layer: chunks of the loss, or the weight's gradient.

    The latter is added up in fp32 where there are several blocks; in bf16 each one's product is beside it.
    """
    chunks, size = loss_chunks(model, job), itemsize(spec)
    if batch.responses <= _blocks(spec, model, job).kept:
        return chunks
    weight = _columns(model, job) * model.hidden_size
    return weight * _FP32 + max(chunks, weight * size if size < _FP32 else 0)


def _blocks(spec: RLJobSpec, model: ModelFacts, job: JobShape) -> Blocks:
    return Blocks.of(_columns(model, job) * itemsize(spec), job.kind)


def _columns(model: ModelFacts, job: JobShape) -> int:
    """Columns of the output layer's product on a rank: the vocabulary's, which ranks divide, or a critic's one."""
    if isinstance(model, ModelConfig) and model.value_head:
        return 1
    return -(-model.vocab_size // job.trainers.tp)


def loss_chunks(model: ModelFacts, job: JobShape) -> int:
    """fp32 temporaries of the loss: bounded chunks, at least one row."""
    chunk = max(CHUNK_ELEMENTS.get(job.kind, DEFAULT_CHUNK_ELEMENTS), _columns(model, job))
    return _LOSS_TEMPORARIES * chunk * _FP32
