"""Samples that compute their prompt once: which do, in which rows, and what attention makes of such a row."""

from __future__ import annotations

import types
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import by_formula

from rljob_worker.models.config import ModelConfig
from rljob_worker.models.cost import segment_cost
from rljob_worker.trainer.batches import PackedBatch, plan_step
from rljob_worker.trainer.dealing import Dealing, plan_update
from rljob_worker.trainer.megatron.models.kernels import CausalAttention, CpuCausalAttention
from rljob_worker.trainer.megatron.models.megatron_npu import FusionAttention
from rljob_worker.trainer.shared_attention import attend_shared_on_cpu
from rljob_worker.trainer.sharing import Prompts, plan_sharing
from rljob_worker.types import TrainBatch

GROUPS = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 7), min_size=1, max_size=6)), min_size=1)
SHARED = Dealing(1000, segment_cost=0.0)


def make_batch(groups: list[tuple[int, list[int]]], prompts: int = 1000) -> TrainBatch:
    """Groups of (prompt tokens, response tokens of each sample); prompts repeat after so many groups."""
    sizes = [
        (number % prompts, prompt, answer) for number, (prompt, answers) in enumerate(groups) for answer in answers
    ]
    random = np.random.default_rng(0)
    answers = np.array([answer for *_, answer in sizes])
    return TrainBatch.of_responses(
        tokens=[
            np.concatenate([100 * number + np.arange(prompt), random.integers(10**6, 10**7, answer)])
            for number, prompt, answer in sizes
        ],
        prompt_lengths=np.array([prompt for _, prompt, _ in sizes]),
        rollout_log_probs=[-random.random(answer).astype(np.float32) for answer in answers],
        advantages=random.standard_normal(len(sizes)).astype(np.float32),
    )


def contexts(packed: PackedBatch, samples: np.ndarray) -> list[tuple[int, ...]]:
    """All that each sampled token of these is predicted from."""
    found = []
    for sample in samples.tolist():
        start, first = int(packed.starts[sample]), int(packed.sampled_starts[sample])
        for place in packed.places[first : first + int(packed.responses[sample])].tolist():
            found.append(tuple(packed.tokens[start : start + place].tolist()))
    return found


@given(GROUPS, st.integers(1, 3), st.integers(1, 120), st.integers(1, 4), st.booleans())
@settings(max_examples=80)
def test_each_token_is_predicted_from_what_came_before_it(
    groups: list[tuple[int, list[int]]], parts: int, bound: int, distinct: int, lockstep: bool
) -> None:
    batch = make_batch(groups, distinct)
    experts = np.concatenate([tokens[:-1] for tokens in np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])])
    packed = PackedBatch(replace(batch, experts=(experts % 30000).astype(np.uint16).reshape(-1, 1, 1)))
    dealing = Dealing(bound, parts, lockstep=lockstep, segment_cost=0.0)
    plans = [plan_step(packed, None, dealing, part)[0] for part in range(parts)]
    assert len({len(plan.micro_batches) for plan in plans}) == 1
    seen = [sample for plan in plans for row in plan.micro_batches for sample in row.samples.tolist()]
    assert sorted(seen) == list(range(len(batch)))
    for row in (row for plan in plans for row in plan.micro_batches if len(row.samples)):
        alone = packed.micro_batch(row.samples)
        for field in ("labels", "sequences", "mask", "rollout_log_probs", "advantages", "versions"):
            assert torch.equal(getattr(row, field), getattr(alone, field))
        assert len(row.samples) == 1 or max(row.bounds[-1], len(row.labels)) <= bound
        for given_row in (row, row.padded(4)):
            ids, prefixes = given_row.input_ids[0], given_row.prefixes
            assert given_row.bounds[-1] == len(ids)
            segments = list(pairwise(given_row.bounds.tolist()))
            prompts = [-1] * len(segments) if prefixes is None else prefixes.tolist()
            before = [slice(*segments[prompt]) if prompt >= 0 else slice(0) for prompt in prompts]
            assert all(begin < end for begin, end in segments)
            whole = [torch.cat([ids[prompt], ids[slice(*own)]]) for prompt, own in zip(before, segments, strict=True)]
            assert given_row.longest == max(map(len, whole))
            starts = given_row.bounds[:-1]
            got = []
            for at in given_row.rows.tolist():
                segment = int(np.searchsorted(starts, at, side="right")) - 1
                sequence = whole[segment][: len(whole[segment]) - (segments[segment][1] - at) + 1]
                assert given_row.position_ids[0, at] == len(sequence) - 1
                got.append(tuple(sequence.tolist()))
            assert got == contexts(packed, row.samples)
        if row.experts is not None and packed.lengths[row.samples].min() > 1:
            assert torch.equal(row.experts[:, 0, 0, 0].long(), row.input_ids[0] % 30000)


def test_a_prompt_is_computed_once() -> None:
    packed = PackedBatch(make_batch([(50, [10, 7, 1, 9]), (20, [5]), (3, [0, 4])]))
    (update,) = plan_step(packed, None, SHARED, 0)
    (row,) = update.micro_batches
    assert row.input_ids.shape[1] == 50 + 9 + 6 + 0 + 8 + 24 + 2 + 6
    assert row.prefixes is not None
    # A response of one token has no segment, only a label.
    assert (row.prefixes >= 0).sum() == 3
    assert (update.num_tokens, update.num_sequences) == (36, 7)


def test_two_groups_with_one_prompt_are_one() -> None:
    packed = PackedBatch(make_batch([(50, [5, 6]), (50, [7, 8])], prompts=1))
    (update,) = plan_step(packed, None, SHARED, 0)
    assert update.micro_batches[0].input_ids.shape[1] == 50 + 4 + 5 + 6 + 7


def test_samples_whose_experts_differ_within_the_prompt_share_none() -> None:
    batch = make_batch([(50, [5, 6, 7])])
    experts = np.zeros((len(batch.tokens) - 3, 2, 2), dtype=np.uint8)
    # The last token of the second sample's prompt, which predicts its first token.
    experts[54 + 49] = 1
    packed = PackedBatch(replace(batch, experts=experts))
    assert [group.tolist() for group in packed.groups(np.arange(3))] == [[0, 2]]


@pytest.mark.parametrize(
    ("groups", "dealing"),
    [
        pytest.param([(50, [600] * 8)], SHARED, id="short prompts"),
        pytest.param([(50, [5] * 8)], replace(SHARED, segment_cost=None), id="kernels that cannot"),
        pytest.param([(50, [5] * 8)], replace(SHARED, segment_cost=100.0), id="a small model"),
        pytest.param([(50, [5])] * 8, SHARED, id="groups of one"),
        pytest.param([(50, [5] * 8)], replace(SHARED, max_tokens=57), id="no room for two"),
        pytest.param([(50, [9] * 8)], replace(SHARED, parts=8), id="as many ranks as samples"),
    ],
)
def test_where_it_does_not_pay_rows_are_as_they_were(groups: list[tuple[int, list[int]]], dealing: Dealing) -> None:
    packed = PackedBatch(make_batch(groups))
    for part in range(dealing.parts):
        (update,) = plan_step(packed, None, dealing, part)
        rows = plan_update(packed.inputs, dealing, part)
        assert [row.samples.tolist() for row in update.micro_batches] == [row.tolist() for row in rows]
        assert all(row.prefixes is None for row in update.micro_batches)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40), st.integers(0, 2)), min_size=1, max_size=12),
    segment=st.floats(0.5, 80.0),
    pair=st.sampled_from([0.0, 0.01]),
    parts=st.integers(1, 3),
)
def test_nothing_is_planned_of_prompts_too_short_to_share(
    lengths: list[tuple[int, int, int]], segment: float, pair: float, parts: int
) -> None:
    update = Prompts(
        lengths=np.array([prompt + answer for prompt, answer, _ in lengths]),
        prompts=np.array([prompt for prompt, _, _ in lengths]),
        responses=np.array([answer for _, answer, _ in lengths]),
        groups=[
            np.array(group)
            for which in range(3)
            for length in {one[0] for one in lengths}
            if len(group := [i for i, one in enumerate(lengths) if (one[0], one[2]) == (length, which)]) > 1
        ],
    )
    dealing = Dealing(100, parts, pair_cost=pair, segment_cost=segment)
    if dealing.may_share(int(update.prompts.max())):
        return
    for part in range(parts):
        rows, _ = plan_sharing(update, dealing, part)
        assert [row.tolist() for row, _ in rows] == [row.tolist() for row in plan_update(update.lengths, dealing, part)]
        assert all(sizes is None for _, sizes in rows)


def test_a_group_is_parted_where_ranks_would_stand_idle() -> None:
    packed = PackedBatch(make_batch([(50, [40] * 8)]))
    plans = [plan_step(packed, None, replace(SHARED, parts=2), part)[0].micro_batches for part in range(2)]
    assert [[len(row.samples) for row in rows] for rows in plans] == [[4], [4]]
    assert [row.input_ids.shape[1] for rows in plans for row in rows] == [50 + 4 * 39] * 2


def test_one_more_sequence_costs_a_large_model_little() -> None:
    shape = {"vocab_size": 1000, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"head_dim": 16, "max_position_embeddings": 64, "model_type": "qwen3", "tie_word_embeddings": True}
    small, large = (
        segment_cost(ModelConfig.from_hf(shape | {"hidden_size": hidden, "intermediate_size": 2 * hidden}))
        for hidden in (64, 2048)
    )
    assert small > 20
    assert large < 0.2


ROWS = {
    "groups": ([9, 3, 3, 5, 4, 4, 2, 6], [-1, 0, 0, 0, -1, 4, 4, -1]),
    "neighbours alike": ([4, 4, 4, 4, 4], [-1, 0, 0, -1, 3]),
    "nothing shared": ([5, 2], [-1, -1]),
}


@pytest.mark.parametrize("lengths_and_prefixes", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_attention_is_that_of_whole_sequences(
    lengths_and_prefixes: tuple[list[int], list[int]], key_heads: int
) -> None:
    """Against the formula on each sequence with its prompt before it, gradients included, in float64."""
    lengths, prefixes = lengths_and_prefixes
    bounds = [0, *np.cumsum(lengths).tolist()]
    torch.manual_seed(0)
    row = [torch.randn(bounds[-1], heads, 16, dtype=torch.float64) for heads in (4, key_heads, key_heads)]
    row = [tensor.requires_grad_() for tensor in row]
    expected = []
    for (begin, end), prefix in zip(pairwise(bounds), prefixes, strict=True):
        prompt = range(bounds[prefix], bounds[prefix + 1]) if prefix >= 0 else range(0)
        places = torch.tensor([*prompt, *range(begin, end)])
        whole = by_formula(*(tensor[places] for tensor in row), [len(places)], 0.3)
        expected.append(whole[len(prompt) :])
    upper = torch.randn(bounds[-1], 4, 16, dtype=torch.float64)
    results = [torch.cat(expected), attend_shared_on_cpu(*row, bounds, prefixes, 0.3)]
    wanted, got = [(out, *torch.autograd.grad((out * upper).sum(), row)) for out in results]
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_kernels_that_take_no_such_rows_say_so() -> None:
    query = torch.randn(5, 1, 2, 16)
    params = types.SimpleNamespace(cu_seqlens_q=torch.tensor([0, 3, 5]), cu_seqlens_kv_padded=torch.tensor([-1, 0]))
    assert CpuCausalAttention.shares_prompts
    for kind in (CausalAttention, FusionAttention):
        assert not kind.shares_prompts
        with pytest.raises(ValueError, match=f"{kind.__name__} takes no rows with shared prompts"):
            kind(None)(query, query, query, packed_seq_params=params)
