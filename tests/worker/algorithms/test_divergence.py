"""Divergences from a teacher, held to loops in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rljob_api.spec import AlgorithmSpec
from rljob_worker.algorithms import LossInputs, policy_gradient_loss
from rljob_worker.algorithms import output_layer as module
from rljob_worker.algorithms.divergence import TeacherRows
from rljob_worker.algorithms.output_layer import Blocks, Wanted, output_log_probs, table_of_logits, token_table
from rljob_worker.types import SamplingParams

ROWS, HIDDEN, VOCAB, PADDED, TEACHER_PADDED = 29, 12, 61, 64, 70
COUNTS = [1, 5, 40, VOCAB]


def inputs(seed: int = 3) -> dict[str, Tensor]:
    """A policy's and a teacher's last hidden states and heads of different sizes, padding columns that would win."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    given = {"hidden": random(ROWS, HIDDEN), "weight": random(PADDED, HIDDEN) * 0.6, "factors": random(3, ROWS)}
    given |= {"teacher_hidden": random(ROWS, 20), "teacher_weight": random(TEACHER_PADDED, 20) * 0.6}
    given["labels"] = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    # A teacher that is sure: all but one token together have a probability of 1e-40.
    given["teacher_hidden"][:, 0], given["teacher_hidden"][0], given["teacher_weight"][7, 0] = 0.0, 0.0, 90.0
    given["teacher_hidden"][0, 0] = 1.0
    given["teacher_weight"][VOCAB:], given["weight"][VOCAB:] = 30.0, 30.0
    return given


def in_loops(given: dict[str, Tensor], k: int, temperature: float) -> dict[str, Any]:
    """D of each row, one token after the other, and autograd's gradients, all in float64."""
    hidden, weight = (given[name].double().requires_grad_() for name in ("hidden", "weight"))
    teacher = given["teacher_hidden"].double() @ given["teacher_weight"].double().T / temperature
    policy = hidden @ weight.T / temperature
    found = []
    for row in range(ROWS):
        log_q, log_p = teacher[row, :VOCAB].log_softmax(-1), policy[row, :VOCAB].log_softmax(-1)
        likely = sorted(range(VOCAB), key=lambda v: -float(log_q[v]))[:k]
        total = torch.zeros((), dtype=torch.float64)
        for token in likely:
            total = total + log_p[token].exp() * (log_p[token] - log_q[token])
        others = [token for token in range(VOCAB) if token not in likely]
        if others:
            of_p, of_q = log_p[others].logsumexp(0), log_q[others].logsumexp(0)
            total = total + of_p.exp() * (of_p - of_q)
        found.append(total)
    divergence = torch.stack(found)
    chosen = given["labels"][:, None]
    log_probs = policy[:, :VOCAB].log_softmax(-1).gather(1, chosen)[:, 0]
    p = policy[:, :VOCAB].log_softmax(-1)
    entropy = -(p.exp() * p).sum(-1)
    factors = given["factors"].double()
    (factors[0] * divergence + factors[1] * log_probs + factors[2] * entropy).sum().backward()
    whole = (p.exp() * (p - teacher[:, :VOCAB].log_softmax(-1))).sum(-1)
    of_labels = teacher[:, :VOCAB].log_softmax(-1).gather(1, chosen)[:, 0]
    return {
        **{"divergence": divergence.detach(), "hidden": hidden.grad, "weight": weight.grad, "whole": whole.detach()},
        **{"log_probs": log_probs.detach(), "teacher_log_probs": of_labels},
    }


def wanted_of(temperature: float, **more: Any) -> Wanted:
    return Wanted(SamplingParams(1, temperature=temperature), VOCAB, **more)


def computed(
    given: dict[str, Tensor], k: int, temperature: float, group: Any = None, part: int = 0, parts: int = 1
) -> Any:
    """The same from this rank's columns of both heads."""
    own, of_teacher = (given[name].chunk(parts)[part].clone() for name in ("weight", "teacher_weight"))
    asked = wanted_of(temperature, entropy=False, top=k)
    with torch.no_grad():
        table = token_table(given["teacher_hidden"], of_teacher, given["labels"], asked, group)
    hidden, weight = given["hidden"].clone().requires_grad_(), own.requires_grad_()
    wanted = wanted_of(temperature, divergence=True, entropy_grad=True)
    values = token_table(hidden, weight, given["labels"], wanted, group, table)
    factors = given["factors"]
    (factors[0] * values[:, 2] + factors[1] * values[:, 0] + factors[2] * values[:, 1]).sum().backward()
    rows = TeacherRows.of(table)
    return {
        **{"divergence": values[:, 2].detach(), "hidden": hidden.grad, "weight": weight.grad},
        **{"log_probs": values[:, 0].detach(), "teacher_log_probs": rows.log_probs, "ids": rows.ids, "rest": rows.rest},
    }


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], names: list[str]) -> None:
    for name in names:
        largest = expected[name].abs().max()
        assert float((found[name].double() - expected[name]).abs().max() / largest) < 5e-6, name


ALL = ["divergence", "hidden", "weight", "log_probs", "teacher_log_probs"]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("k", COUNTS)
@pytest.mark.parametrize("blocks", [False, True])
def test_the_likeliest_tokens_and_the_rest_against_loops(
    k: int, temperature: float, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocks:
        monkeypatch.setattr(module, "KEPT_BYTES", {"cpu": 10 * 4 * PADDED})
        monkeypatch.setattr(module, "BLOCK_BYTES", {"cpu": 8 * 4 * PADDED})
        assert len(Blocks.of(4 * PADDED, "cpu").slices(ROWS)) == 4
    given = inputs()
    found, expected = computed(given, k, temperature), in_loops(given, k, temperature)
    assert_close(found, expected, ALL)
    # It never claims more than there is.
    assert bool((found["divergence"] >= -1e-6).all())
    assert bool((found["divergence"].double() <= expected["whole"] * (1 + 1e-6) + 1e-6).all())
    if k == VOCAB:
        assert_close(found, expected | {"divergence": expected["whole"]}, ["divergence"])
        assert bool((found["rest"] == -math.inf).all())
    else:
        assert bool(found["rest"].isfinite().all()), "also of the teacher that is sure"


@pytest.mark.parametrize("k", COUNTS)
def test_logits_that_are_all_there_give_the_same(k: int) -> None:
    given = inputs()
    table = table_of_logits(
        given["teacher_hidden"] @ given["teacher_weight"].T, given["labels"], wanted_of(1.0, entropy=False, top=k)
    )
    logits = (given["hidden"] @ given["weight"].T).requires_grad_()
    values = table_of_logits(logits, given["labels"], wanted_of(1.0, divergence=True, entropy_grad=True), table)
    factors = given["factors"]
    (factors[0] * values[:, 2] + factors[1] * values[:, 0] + factors[2] * values[:, 1]).sum().backward()
    assert logits.grad is not None
    found = {"divergence": values[:, 2].detach(), "hidden": logits.grad @ given["weight"]}
    assert_close(found, in_loops(given, k, 1.0), ["divergence", "hidden"])
    assert not bool(logits.grad[:, VOCAB:].any())


def one_of_two(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    torch.save([computed(inputs(), k, 0.7, dist.group.WORLD, rank, 2) for k in COUNTS], f"{folder}/{rank}")
    dist.destroy_process_group()


def test_two_ranks_with_half_of_the_columns_each(tmp_path: Path) -> None:
    """Their shards of both vocabularies are cut at different tokens."""
    torch.multiprocessing.spawn(one_of_two, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    for index, k in enumerate(COUNTS):
        expected = in_loops(inputs(), k, 0.7)
        for rank in ranks:
            assert_close(rank[index], expected, [name for name in ALL if name != "weight"])
            assert torch.equal(rank[index]["ids"], ranks[0][index]["ids"])
        whole = torch.cat([rank[index]["weight"] for rank in ranks])
        assert_close({"weight": whole}, expected, ["weight"])


def test_more_tokens_than_there_are_and_samplings_that_leave_some_out_are_refused() -> None:
    given = inputs()
    with pytest.raises(ValueError, match=r"distill.topK: 62 is more than the vocabulary's 61"):
        computed(given, VOCAB + 1, 1.0)
    table = TeacherRows(*(torch.zeros(ROWS), torch.zeros(ROWS), torch.zeros(ROWS, 2), torch.zeros(ROWS, 2).long()))
    wanted = Wanted(SamplingParams(1, top_p=0.9), VOCAB, divergence=True)
    with pytest.raises(ValueError, match="whole distributions"):
        output_log_probs(given["hidden"], given["weight"], given["labels"], wanted, None, table)


def test_a_micro_batch_without_responses_has_a_table_of_none() -> None:
    given, nothing = inputs(), torch.zeros(0, dtype=torch.int64)
    table = token_table(given["teacher_hidden"][:0], given["teacher_weight"], nothing, wanted_of(1.0, top=5), None)
    assert table.shape == (0, 12)
    values = token_table(given["hidden"][:0], given["weight"], nothing, wanted_of(1.0, divergence=True), None, table)
    assert values.shape == (0, 3)


def spec_of(**distill: Any) -> AlgorithmSpec:
    given = {"name": "distill", "tis": {"enabled": False}, "clipLow": 0.2, "clipHigh": 0.2}
    return AlgorithmSpec.model_validate(given | {"distill": {"teacher": {"path": "t"}} | distill})


@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("reward_weight", [0.0, 0.3])
def test_sampled_tokens_against_a_loop(updated: bool, reward_weight: float) -> None:
    generator = torch.Generator().manual_seed(11)
    new, old, teacher = (-3 * torch.rand(40, generator=generator) for _ in range(3))
    advantages, weights = torch.randn(40, generator=generator), torch.rand(40, generator=generator)
    log_probs = new.clone().requires_grad_()
    inputs = LossInputs(
        log_probs,
        advantages,
        torch.ones(40, dtype=torch.bool),
        weights,
        old_log_probs=old if updated else None,
        teacher_log_probs=teacher,
    )
    loss, metrics = policy_gradient_loss(inputs, spec_of(coefficient=0.7, rewardWeight=reward_weight))
    loss.backward()
    from_ = old if updated else new
    total, gradients, distance = 0.0, [], 0.0
    for i in range(40):
        gap = float(from_[i]) - float(teacher[i])
        advantage = reward_weight * float(advantages[i]) - 0.7 * gap
        ratio = math.exp(float(new[i]) - float(from_[i]))
        plain, clipped = -advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2)
        total += float(weights[i]) * max(plain, clipped)
        gradients.append(float(weights[i]) * plain if plain >= clipped else 0.0)
        distance += gap
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert log_probs.grad is not None
    assert torch.allclose(log_probs.grad.double(), torch.tensor(gradients, dtype=torch.float64), atol=1e-5)
    assert metrics["teacher_kl"].item() == pytest.approx(distance, rel=1e-5)


def test_the_gradient_of_sampled_tokens_is_the_divergences_on_average() -> None:
    """Each token once, weighted by its probability: the expectation itself, without a draw."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(VOCAB, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(VOCAB, generator=generator, dtype=torch.float64).log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    (log_probs.exp() * (log_probs - teacher)).sum().backward()
    expected, logits.grad = logits.grad, None
    log_probs = logits.log_softmax(-1)
    loss, _ = policy_gradient_loss(
        LossInputs(
            log_probs,
            torch.zeros(VOCAB),
            torch.ones(VOCAB, dtype=torch.bool),
            log_probs.detach().exp(),
            teacher_log_probs=teacher,
        ),
        spec_of(),
    )
    loss.backward()
    assert expected is not None
    assert logits.grad is not None
    assert torch.allclose(logits.grad, expected, atol=1e-12)


def test_the_loss_has_the_divergence_by_its_weight() -> None:
    generator = torch.Generator().manual_seed(2)
    log_probs, divergence, weights = (torch.rand(9, generator=generator) for _ in range(3))
    divergence.requires_grad_()
    mask = torch.ones(9, dtype=torch.bool)
    inputs = LossInputs(log_probs, torch.ones(9), mask, weights, divergence=divergence)
    loss, metrics = policy_gradient_loss(inputs, spec_of(divergence="TopK", coefficient=0.4))
    loss.backward()
    assert loss.item() == pytest.approx(0.4 * float((weights * divergence).sum()), rel=1e-6)
    assert divergence.grad is not None
    assert torch.allclose(divergence.grad, 0.4 * weights)
    assert metrics["teacher_kl"].item() == pytest.approx(float(divergence.sum()), rel=1e-6)
    with pytest.raises(ValueError, match=r"algorithm\.distill"):
        policy_gradient_loss(LossInputs(log_probs, torch.ones(9), mask, weights), spec_of(divergence="TopK"))
