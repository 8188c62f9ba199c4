"""Log-probabilities of sampled tokens under the distribution that the engine sampled from.

vLLM 0.23 with `logprobs_mode=processed_logprobs` reports the log-softmax of logits that went through
(vllm/v1/sample/sampler.py, `Sampler.forward` and `sample`): float32, division by the temperature, min-p, top-k, top-p.
Its CPU path filters with `apply_top_k_top_p_pytorch` (no Triton backend for CPU in the pinned wheels). The functions
here apply the same operations in the same order to the trainer's logits, on vocabulary-parallel shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rljob_api.spec.rollout import MIN_TEMPERATURE
from rljob_worker.types import SamplingParams

GREEDY_TEMPERATURE = 1e-5
"""Below it vLLM samples greedily and reports the plain log-softmax (vllm/sampling_params.py `_SAMPLING_EPS`)."""
CHUNK_ELEMENTS = {"cpu": 1 << 18}
"""Logits worked on at once, by device type: on CPU their float32 temporaries (1 MiB each) stay in the cache."""
DEFAULT_CHUNK_ELEMENTS = 1 << 23
"""Elsewhere: bounds each float32 temporary to 32 MiB."""
LOWEST_LOG_PROB = -1e4
"""Stands in for -inf where it is multiplied by a probability: exp of it is exactly 0 in float32."""


@dataclass(frozen=True, slots=True)
class LogitsTransform:
    """The engine's actual transform of its logits for one `SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    forbidden: tuple[int, ...] = ()
    """Tokens that are never sampled."""

    @classmethod
    def resolve(cls, sampling: SamplingParams, vocab_size: int) -> LogitsTransform:
        """Resolve settings as vLLM does: greedy sampling has no filters, and a `top_k` of the whole vocabulary is
        none."""
        if sampling.temperature < 0:
            raise ValueError(f"sampling.temperature: {sampling.temperature} is negative; it must be 0 or more")
        if not 0 < sampling.top_p <= 1:
            raise ValueError(f"sampling.top_p: {sampling.top_p} is outside (0, 1]")
        if not 0 <= sampling.min_p <= 1:
            raise ValueError(f"sampling.min_p: {sampling.min_p} is outside [0, 1]")
        if sampling.top_k < -1:
            raise ValueError(f"sampling.top_k: {sampling.top_k} is negative; 0 keeps all tokens")
        if sampling.temperature < GREEDY_TEMPERATURE:
            return cls(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, forbidden=sampling.forbidden)
        top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else 0
        temperature = max(sampling.temperature, MIN_TEMPERATURE)
        return cls(temperature, top_k, sampling.top_p, sampling.min_p, sampling.forbidden)

    @property
    def filters(self) -> bool:
        """Whether any token may be excluded."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or bool(self.forbidden)


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Part of the vocabulary that this rank's logits cover; padding at the vocabulary's end is not part of it."""

    start: int
    """First token id of the shard."""
    valid: int
    """Real tokens in the shard; the columns after them are padding."""
    vocab_size: int
    """Real tokens in all shards."""
    group: dist.ProcessGroup | None
    """Ranks that hold the other shards, in vocabulary order; None when this one is all."""

    @classmethod
    def of(cls, width: int, vocab_size: int, group: dist.ProcessGroup | None) -> VocabShard:
        """The shard of `width` columns that this rank of `group` holds."""
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if width * size < vocab_size:
            raise ValueError(f"logits cover {width * size} tokens ({size} x {width}), the vocabulary has {vocab_size}")
        start = rank * width
        valid = min(max(vocab_size - start, 0), width)
        return cls(start, valid, vocab_size, group if size > 1 else None)

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduces `values` in place over the shards."""
        if self.group is not None:
            dist.all_reduce(values, op=op, group=self.group)
        return values

    def gather_rows(self, rows: Tensor) -> Tensor:
        """[n, width] of each rank -> [n, vocab_size] on all of them."""
        if self.group is None:
            return rows[:, : self.vocab_size]
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, rows.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)[:, : self.vocab_size]

    def local_labels(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each label in this shard, and whether the shard holds it."""
        column = labels - self.start
        owned = (column >= 0) & (column < self.valid)
        return torch.where(owned, column, 0), owned


def kept_tokens(logits: Tensor, labels: Tensor, transform: LogitsTransform) -> Tensor:
    """Tokens that survive min-p, top-k and top-p, as in vLLM 0.23, plus the sampled token itself.

    Order and ties are those of vllm/v1/sample: `MinPLogitsProcessor.apply` (a token is dropped when its probability is
    below min_p times the largest), then `apply_top_k_top_p_pytorch`: top-k keeps every token equal to the k-th largest;
    top-p drops the ascending prefix whose cumulative probability is at most 1 - top_p, never the largest token. Where
    the prefix ends inside a run of equal logits, as many of the run are kept as vLLM keeps, the label first among them:
    the sort is not stable, and which of the equal tokens survive in the engine is known by what it sampled.

    Args:
        logits: [n, vocab_size] float32, after the temperature. Overwritten.
        labels: [n] int64, the sampled tokens.
        transform: the filters.

    Returns:
        [n, vocab_size] bool.
    """
    if transform.min_p > 0:
        probs = torch.softmax(logits, dim=-1)
        logits.masked_fill_(probs < probs.amax(dim=-1, keepdim=True).mul_(transform.min_p), -torch.inf)
    label_column = labels.unsqueeze(-1)
    if transform.top_p >= 1:
        # By what is dropped, not by what is kept: comparisons with NaN are false, and a NaN must stay to be seen.
        keep = logits != -torch.inf
        if transform.top_k > 0:
            keep &= ~(logits < logits.topk(transform.top_k, dim=-1).values[:, -1:])
        return keep.scatter_(1, label_column, True)

    ascending, order = logits.sort(dim=-1)
    if transform.top_k > 0:
        ascending.masked_fill_(ascending < ascending[:, -transform.top_k].unsqueeze(-1), -torch.inf)
    # In float32 because vLLM's top_p is a float32 tensor.
    bound = float(np.float32(1) - np.float32(transform.top_p))
    keep_sorted = torch.softmax(ascending, dim=-1).cumsum(dim=-1) > bound
    keep_sorted[:, -1] = True
    keep = torch.zeros_like(keep_sorted).scatter_(1, order, keep_sorted)
    first_kept = keep_sorted.int().argmax(dim=-1, keepdim=True)
    label_ties_with_first = logits.gather(1, label_column) == ascending.gather(1, first_kept)
    take_its_place = label_ties_with_first & ~keep.gather(1, label_column)
    keep.scatter_(1, order.gather(1, first_kept), ~take_its_place)
    return keep.scatter_(1, label_column, True)


def _divide(logits: Tensor, temperature: float) -> Tensor:
    # By a tensor, as vLLM does: CUDA turns the division by a number into a multiplication by its reciprocal.
    return logits / logits.new_full((), temperature)


def scaled_logits(logits: Tensor, temperature: float, shard: VocabShard, keep: Tensor | None) -> Tensor:
    """The shard's real columns in float32, divided by the temperature, excluded tokens at -inf; may alias `logits`."""
    scaled = logits[:, : shard.valid].float()
    if temperature != 1.0:
        scaled = _divide(scaled, temperature)
    if keep is not None:
        scaled = scaled.masked_fill(~keep, -torch.inf)
    return scaled


def row_chunks(logits: Tensor, width: int) -> list[slice]:
    """Slices of rows such that `width` columns are a bounded size; none where the shard holds padding only."""
    if width == 0:
        return []
    rows = logits.shape[0]
    step = max(1, CHUNK_ELEMENTS.get(logits.device.type, DEFAULT_CHUNK_ELEMENTS) // width)
    return [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def keep_mask(logits: Tensor, labels: Tensor, transform: LogitsTransform, shard: VocabShard) -> Tensor:
    """This shard's columns of `kept_tokens`, [n, valid] bool."""
    keep = torch.empty(logits.shape[0], shard.valid, dtype=torch.bool, device=logits.device)
    for rows in row_chunks(logits, shard.vocab_size):
        full = _divide(shard.gather_rows(logits[rows]).float(), transform.temperature)
        columns = slice(shard.start, shard.start + shard.valid)
        forbidden = list(transform.forbidden)
        # As the engine: before the filters.
        full[:, forbidden] = -torch.inf
        kept = kept_tokens(full, labels[rows].clamp(0, shard.vocab_size - 1), transform)
        kept[:, forbidden] = False
        keep[rows] = kept[:, columns]
    return keep


@dataclass(frozen=True, slots=True)
class RowSums:
    """Sums over each row of logits, all [n] float32: with z = logits / T restricted to the kept tokens,

    p = softmax(z), log p_label = z_label - logsumexp(z) and H = logsumexp(z) - sum_j p_j z_j.
    """

    log_probs: Tensor
    """log p_label."""
    entropy: Tensor
    maximum: Tensor
    """The largest z."""
    log_total: Tensor
    """Log of the sum of exp(z - maximum)."""

    @classmethod
    def joined(cls, parts: Sequence[RowSums]) -> RowSums:
        """Join the sums of blocks of rows that follow each other."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([part.log_probs for part in parts]),
            torch.cat([part.entropy for part in parts]),
            torch.cat([part.maximum for part in parts]),
            torch.cat([part.log_total for part in parts]),
        )

    def of(self, rows: slice) -> RowSums:
        """Some rows."""
        return RowSums(self.log_probs[rows], self.entropy[rows], self.maximum[rows], self.log_total[rows])


def row_sums(
    logits: Tensor, labels: Tensor, keep: Tensor | None, temperature: float, shard: VocabShard, *, entropy: bool
) -> RowSums:
    """Sum over logits [n, width]; zeros for the entropy where it is not wanted."""
    column, owned = shard.local_labels(labels)
    maximum, total, picked, weighted = logits.new_zeros(4, logits.shape[0], dtype=torch.float32).unbind()
    maximum.fill_(torch.finfo(torch.float32).min)
    for rows in row_chunks(logits, shard.valid):
        scaled = scaled_logits(logits[rows], temperature, shard, _rows(keep, rows))
        maximum[rows] = scaled.amax(dim=-1).clamp_(min=torch.finfo(torch.float32).min)
        picked[rows] = torch.where(owned[rows], scaled.gather(1, column[rows].unsqueeze(-1)).squeeze(-1), 0.0)
        shifted = scaled - maximum[rows].unsqueeze(-1)
        weights = shifted.exp()
        total[rows] = weights.sum(dim=-1)
        if entropy:
            weighted[rows] = torch.linalg.vecdot(weights, shifted.clamp_(min=LOWEST_LOG_PROB))
    # Each shard summed relative to its own maximum, so that one pass over the logits is enough.
    local_maximum = maximum.clone()
    shard.all_reduce(maximum, dist.ReduceOp.MAX)
    shift = local_maximum - maximum
    scale, shift = shift.exp(), shift.clamp(min=LOWEST_LOG_PROB)
    sums = torch.stack((scale * total, picked, scale * (weighted + shift * total)))
    total, picked, weighted = shard.all_reduce(sums, dist.ReduceOp.SUM).unbind()
    log_total = total.log()
    # A label outside the vocabulary is held by no shard: NaN instead of a plausible number.
    known = (labels >= 0) & (labels < shard.vocab_size)
    log_probs = torch.where(known, picked - maximum - log_total, torch.nan)
    row_entropy = log_total - weighted / total if entropy else torch.zeros_like(log_probs)
    return RowSums(log_probs, row_entropy, maximum, log_total)


def logits_gradient(
    logits: Tensor,
    labels: Tensor,
    keep: Tensor | None,
    sums: RowSums,
    grads: tuple[Tensor, Tensor],
    temperature: float,
    shard: VocabShard,
    *,
    entropy_grad: bool,
    into: Tensor,
    beside: Callable[[Tensor, slice], Tensor] | None = None,
) -> Tensor:
    """Gradient of the logits from those of log-probabilities and entropies, written into `into`, which may be they.

    d log p_label / d z_j = [j = label] - p_j; d H / d z_j = -p_j (log p_j + H).

    Args:
        logits: [n, width], of this shard; the other tensors belong to its rows.
        beside: from log-probabilities [m, valid] of some rows, and which rows they are: the gradient by z of what else
            is in the loss, which is added.
    """
    grad_log_probs, grad_entropy = grads[0] / temperature, grads[1] / temperature
    column, owned = shard.local_labels(labels)
    into[:, shard.valid :] = 0
    for rows in row_chunks(logits, shard.valid):
        scaled = scaled_logits(logits[rows], temperature, shard, _rows(keep, rows))
        # In this order: for large logits the sum of maximum and log_total would lose the latter's digits.
        log_probs = (scaled - sums.maximum[rows].unsqueeze(-1)).sub_(sums.log_total[rows].unsqueeze(-1))
        further = None if beside is None else beside(log_probs, rows)
        factor = -grad_log_probs[rows].unsqueeze(-1)
        if entropy_grad:
            probs = log_probs.exp()
            spread = log_probs.clamp_(min=LOWEST_LOG_PROB).add_(sums.entropy[rows].unsqueeze(-1))
            local = probs.mul_(spread.mul_(-grad_entropy[rows].unsqueeze(-1)).add_(factor))
        else:
            local = log_probs.exp_().mul_(factor)
        label_grad = torch.where(owned[rows], grad_log_probs[rows], 0.0).unsqueeze(-1)
        local.scatter_add_(1, column[rows].unsqueeze(-1), label_grad)
        if further is not None:
            local.add_(further, alpha=1 / temperature)
        into[rows, : shard.valid] = local
    return into


class _Context(Protocol):
    """State that `_TokenLogProbs` keeps between its passes."""

    temperature: float
    shard: VocabShard
    entropy_grad: bool

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


class _TokenLogProbs(torch.autograd.Function):
    """Log-probability of each row's label and entropy of each row, [n, width] -> [n], [n].

    Nothing of the size of the logits is saved beside the logits themselves: the softmax is computed again in backward.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        logits: Tensor,
        labels: Tensor,
        keep: Tensor | None,
        temperature: float,
        shard: VocabShard,
        entropy: bool,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        sums = row_sums(logits, labels, keep, temperature, shard, entropy=entropy)
        ctx.save_for_backward(logits, labels, keep, sums.maximum, sums.log_total, sums.log_probs, sums.entropy)
        ctx.temperature, ctx.shard, ctx.entropy_grad = temperature, shard, entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(sums.entropy)
        return sums.log_probs, sums.entropy

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        logits, labels, keep, maximum, log_total, log_probs, entropy = ctx.saved_tensors
        grad_logits = logits_gradient(
            logits,
            labels,
            keep,
            RowSums(log_probs, entropy, maximum, log_total),
            (grads[0], grads[1]),
            ctx.temperature,
            ctx.shard,
            entropy_grad=ctx.entropy_grad,
            into=torch.empty_like(logits),
        )
        return grad_logits, None, None, None, None, None, None


def _rows(mask: Tensor | None, rows: slice) -> Tensor | None:
    return None if mask is None else mask[rows]


def response_log_probs(
    logits_local: Tensor,
    labels: Tensor,
    sampling: SamplingParams,
    tp_group: dist.ProcessGroup | None,
    vocab_size: int,
    *,
    with_entropy: bool = True,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `labels` and entropies under the distribution that the engine samples from.

    Call it with the positions that matter only: its cost is proportional to them.

    Args:
        logits_local: [..., width] of any floating dtype, this rank's vocabulary shard; position i predicts `labels[i]`.
            The shards of all ranks are equally wide, padding at the vocabulary's end included.
        labels: [...] int64 token ids below `vocab_size`; others give NaN.
        sampling: temperature, top-k, top-p and min-p of the engine.
        tp_group: the ranks that hold the other shards, in vocabulary order; None when there are none.
        vocab_size: tokens without padding.
        with_entropy: compute the entropy; zeros otherwise.
        entropy_grad: make the entropy differentiable (needed where an entropy bonus is in the loss).

    Returns:
        (log_probs, entropy), both [...] float32, in nats, equal on all ranks of `tp_group`. Gradients reach this rank's
        shard; they are right when all ranks of `tp_group` differentiate the same loss.

    Raises:
        ValueError: shapes that do not fit, sampling parameters out of range, or fewer columns than tokens.
    """
    if logits_local.shape[:-1] != labels.shape:
        raise ValueError(f"labels: shape {tuple(labels.shape)} does not fit logits {tuple(logits_local.shape)}")
    if entropy_grad and not with_entropy:
        raise ValueError("entropy_grad: needs with_entropy")
    transform = LogitsTransform.resolve(sampling, vocab_size)
    shard = VocabShard.of(logits_local.shape[-1], vocab_size, tp_group)
    logits = logits_local.reshape(-1, logits_local.shape[-1])
    flat_labels = labels.reshape(-1)
    keep = None
    if transform.filters:
        with torch.no_grad():
            keep = keep_mask(logits, flat_labels, transform, shard)
    log_probs, entropy = _TokenLogProbs.apply(
        logits, flat_labels, keep, transform.temperature, shard, with_entropy, entropy_grad
    )
    return log_probs.view(labels.shape), entropy.view(labels.shape)
