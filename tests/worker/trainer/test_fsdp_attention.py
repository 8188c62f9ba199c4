"""Attention over rows, held to transformers' own over one sample at a time: caps, sinks, windows, grouped queries."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.architectures import ARCHITECTURES, BASE
from torch import Tensor

from rljob_worker.errors import UserError
from rljob_worker.models.hf_model import PACKED, build_hf_model
from rljob_worker.trainer.fsdp import attention
from rljob_worker.trainer.fsdp.attention import packed_attention, register_packed_attention

LENGTHS = (40, 40, 9, 1, 23)
"""Some above the window of 16 tokens, some below."""
BOUNDS = list(accumulate(LENGTHS, initial=0))
SINKS = BASE | {
    "model_type": "gpt_oss", "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
WINDOWS = BASE | {"model_type": "mistral", "sliding_window": 16, "tie_word_embeddings": False}
CASES: dict[str, dict[str, Any]] = ARCHITECTURES | {"gpt_oss": SINKS, "mistral_windows": WINDOWS}


def real_model(config: dict[str, Any], attention: str) -> Any:
    model = build_hf_model(config, attention=attention)
    generator = torch.Generator().manual_seed(1)

    def drawn(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        noise = torch.empty(tensor.shape).normal_(std=0.1, generator=generator)
        return noise if tensor.dim() > 1 else 1 + noise

    done: dict[int, Tensor] = {}
    model._apply(lambda tensor: done.setdefault(id(tensor), drawn(tensor)))
    return model


def log_probs_and_gradients(
    model: Any, rows: list[Tensor], bounds: list[int] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    given = {} if bounds is None else {"row_bounds": bounds}
    places = [torch.cat([torch.arange(n) for n in LENGTHS])] if bounds else [torch.arange(len(row)) for row in rows]
    found = [
        model(input_ids=row[None], position_ids=place[None], use_cache=False, **given).logits[0].log_softmax(-1)
        for row, place in zip(rows, places, strict=True)
    ]
    whole = torch.cat(found)
    picked = whole.gather(1, (torch.arange(len(whole))[:, None] * 7) % 60)
    picked.sum().backward()
    return picked.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_its_samples_one_by_one(name: str) -> None:
    register_packed_attention()
    config = CASES[name]
    row = torch.randint(3, 60, (sum(LENGTHS),), generator=torch.Generator().manual_seed(2))
    packed = real_model(config, PACKED)
    assert packed.config._attn_implementation == PACKED
    want, gradients = log_probs_and_gradients(real_model(config, "eager"), list(row.split(LENGTHS)), None)
    got, packed_gradients = log_probs_and_gradients(packed, [row], BOUNDS)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    assert packed_gradients.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        scale = float(gradient.abs().max()) + 1e-3
        torch.testing.assert_close(packed_gradients[parameter], gradient, atol=2e-4 * scale, rtol=0, msg=parameter)


def test_no_tensor_of_all_pairs_is_kept() -> None:
    register_packed_attention()
    model = real_model(ARCHITECTURES["llama"], PACKED)
    total = sum(LENGTHS) * 4
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    ids = torch.randint(3, 60, (1, total))
    positions = torch.cat([torch.arange(n) for n in LENGTHS] * 4)[None]
    bounds = list(accumulate(LENGTHS * 4, initial=0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, position_ids=positions, use_cache=False, row_bounds=bounds)
    assert max(kept) < total * total


def test_what_its_layers_see_otherwise_is_left_to_transformers() -> None:
    """Chunks are a mask of transformers' alone; a model that does not pass on what it is given gets no bounds."""
    config = BASE | {"model_type": "llama4_text", "attention_chunk_size": 16, "num_local_experts": 2}
    model = build_hf_model(config | {"layer_types": ["chunked_attention", "full_attention"]}, attention=PACKED)
    assert getattr(model.config, "_attn_implementation") == "sdpa"  # noqa: B009


def test_a_mask_is_refused() -> None:
    query = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="without a mask or dropout"):
        packed_attention(torch.nn.Module(), query, query, query, torch.ones(4, 4), row_bounds=[0, 4])


def test_heads_that_ranks_do_not_divide_are_named() -> None:
    """Layers of a model may have other numbers of heads than its config says."""
    query, group = torch.randn(1, 6, 4, 8), SimpleNamespace(size=lambda: 4, rank=lambda: 0)
    with pytest.raises(UserError, match="contextParallel: 4 does not divide the 6 heads"):
        packed_attention(
            torch.nn.Module(), query, query, query, None, row_bounds=[0, 16], context_group=cast("Any", group)
        )


@pytest.mark.parametrize(
    "how", [{}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"softcap": 3.0, "sliding_window": 3}]
)
def test_ranks_that_divide_a_row_compute_their_share_of_its_heads(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchanges are left out: each rank is given all tokens, and gives back its heads."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, heads, 12, 8, generator=generator) for heads in (4, 2, 2))
    module, bounds = torch.nn.Module(), [0, 5, 6, 12]
    whole, _ = packed_attention(module, query, key, value, None, row_bounds=bounds, **how)
    parts = []
    for rank in range(2):
        group: Any = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        monkeypatch.setattr(attention, "to_heads", lambda shares, group: [s.chunk(2, 1)[group.rank()] for s in shares])
        monkeypatch.setattr(attention, "to_tokens", lambda heads, group: heads)
        part, _ = packed_attention(module, query, key, value, None, row_bounds=bounds, context_group=group, **how)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 2), whole)
