"""The output layer in blocks of rows against the whole product with `response_log_probs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rljob_worker.algorithms import output_layer as module
from rljob_worker.algorithms import response_log_probs
from rljob_worker.algorithms.output_layer import Blocks, Wanted, output_log_probs
from rljob_worker.types import SamplingParams

ROWS, HIDDEN, VOCAB, PADDED = 37, 24, 90, 96
SAMPLINGS = [SamplingParams(1, temperature=0.7), SamplingParams(1, top_k=7), SamplingParams(1, top_p=0.8, min_p=0.01)]


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 rows are kept, and the others come by 8."""
    monkeypatch.setattr(module, "KEPT_BYTES", {"cpu": 10 * 4 * PADDED})
    monkeypatch.setattr(module, "BLOCK_BYTES", {"cpu": 8 * 4 * PADDED})


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype)
    weight = (torch.randn(PADDED, HIDDEN, generator=generator) * 0.3).to(dtype)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    return hidden, weight, labels, torch.randn(2, ROWS, generator=generator)


def results(how: Any, hidden: Tensor, weight: Tensor, factors: Tensor) -> list[Tensor]:
    """Log-probabilities, entropies and both gradients of a weighted sum of them."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs, entropy = how(hidden, weight)
    loss = (factors[0] * log_probs).sum() + (factors[1] * entropy).sum()
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [log_probs.detach(), entropy.detach(), hidden.grad, weight.grad]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_blocks_give_what_the_whole_product_gives(sampling: SamplingParams, entropy_grad: bool) -> None:
    hidden, weight, labels, factors = inputs()
    assert len(Blocks.of(4 * PADDED, "cpu").slices(ROWS)) == 5
    wanted = Wanted(sampling, VOCAB, entropy_grad=entropy_grad)

    def whole(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return response_log_probs(hidden @ weight.t(), labels, sampling, None, VOCAB, entropy_grad=entropy_grad)

    ours = results(lambda h, w: output_log_probs(h, w, labels, wanted, None), hidden, weight, factors)
    for found, expected in zip(ours, results(whole, hidden, weight, factors), strict=True):
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-6


def test_one_block_is_the_whole_product_to_the_bit() -> None:
    hidden, weight, labels, factors = inputs()
    sampling = SAMPLINGS[0]

    def whole(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return response_log_probs(hidden @ weight.t(), labels, sampling, None, VOCAB)

    wanted = Wanted(sampling, VOCAB)
    ours = results(lambda h, w: output_log_probs(h, w, labels, wanted, None), hidden, weight, factors)
    for found, expected in zip(ours, results(whole, hidden, weight, factors), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.usefixtures("blocks")
def test_a_weight_in_bf16_has_its_gradient_rounded_once() -> None:
    hidden, weight, labels, factors = inputs(torch.bfloat16)
    wanted = Wanted(SAMPLINGS[0], VOCAB)
    found = results(lambda h, w: output_log_probs(h, w, labels, wanted, None), hidden, weight, factors)[3]
    exact = results(lambda h, w: output_log_probs(h, w, labels, wanted, None), hidden.float(), weight.float(), factors)[
        3
    ]
    assert found.dtype == torch.bfloat16
    assert float((found.float() - exact).abs().max() / exact.abs().max()) < 1e-2


@pytest.mark.usefixtures("blocks")
def test_a_second_backward_pass_is_refused_and_a_frozen_weight_gets_nothing() -> None:
    hidden, weight, labels, _ = inputs()
    wanted = Wanted(SAMPLINGS[0], VOCAB, entropy=False)
    hidden.requires_grad_()
    log_probs, entropy = output_log_probs(hidden, weight, labels, wanted, None)
    assert not entropy.any()
    log_probs.sum().backward(retain_graph=True)
    assert weight.grad is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


def test_rows_and_labels_must_fit() -> None:
    hidden, weight, labels, _ = inputs()
    with pytest.raises(ValueError, match="36 of them do not fit 37 rows"):
        output_log_probs(hidden, weight, labels[1:], Wanted(SAMPLINGS[0], VOCAB), None)


@pytest.mark.parametrize(("rows", "expected"), [(0, [(0, 0)]), (10, [(0, 10)]), (11, [(0, 10), (10, 11)])])
def test_the_first_rows_are_kept(rows: int, expected: list[tuple[int, int]]) -> None:
    assert [(part.start, part.stop) for part in Blocks(10, 8).slices(rows)] == expected


def test_what_is_there_at_once_is_bounded() -> None:
    assert [Blocks(10, 8).at_once(rows) for rows in (4, 10, 13, 18, 1000)] == [4, 10, 13, 18, 18]


def ranks_of_a_vocabulary(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    module.KEPT_BYTES["cpu"], module.BLOCK_BYTES["cpu"] = 10 * 2 * PADDED, 8 * 2 * PADDED
    hidden, weight, labels, factors = inputs()
    half = weight.chunk(2)[rank]
    group = dist.group.WORLD
    wanted = Wanted(SAMPLINGS[2], VOCAB, entropy_grad=True)
    found = results(lambda h, w: output_log_probs(h, w, labels, wanted, group), hidden, half, factors)
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


def test_ranks_that_share_the_vocabulary_agree_with_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(ranks_of_a_vocabulary, (str(tmp_path),), nprocs=2)
    hidden, weight, labels, factors = inputs()
    wanted = Wanted(SAMPLINGS[2], VOCAB, entropy_grad=True)
    alone = results(lambda h, w: output_log_probs(h, w, labels, wanted, None), hidden, weight, factors)
    halves = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    together = [*halves[0][:3], torch.cat([half[3] for half in halves])]
    for found, other, expected in zip(together, [*halves[1][:3], together[3]], alone, strict=True):
        assert torch.equal(found, other)
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-6
