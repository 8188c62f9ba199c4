from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_worker.flow import Episode, Group, TokenStream
from rljob_worker.rollouts.batch import train_batch
from rljob_worker.trainer.batches import MicroBatch, PackedBatch, plan_step
from rljob_worker.trainer.dealing import Dealing
from rljob_worker.types import TrainBatch


def make_batch(prompts: list[int], responses: list[int]) -> TrainBatch:
    """Token `t` of sample `i` is 1000 * i + t, so that every value says where it came from."""
    return TrainBatch.of_responses(
        tokens=[1000 * i + np.arange(p + r) for i, (p, r) in enumerate(zip(prompts, responses))],
        prompt_lengths=np.array(prompts, dtype=np.int64),
        rollout_log_probs=[-(i + np.arange(r) / 100).astype(np.float32) for i, r in enumerate(responses)],
        advantages=np.arange(len(prompts), dtype=np.float32),
    )


def assert_row_is_whole(row: MicroBatch) -> None:
    """Sequences fill the row, each position is that in its own sequence, and the longest is the longest."""
    lengths = np.diff(row.bounds)
    assert row.bounds[0] == 0
    assert row.bounds[-1] == row.input_ids.shape[1] == row.position_ids.shape[1]
    assert row.position_ids[0].tolist() == [place for length in lengths for place in range(length)]
    assert row.longest == lengths.max()
    if row.experts is not None:
        assert row.experts.shape[:2] == (row.bounds[-1], 1)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 60),
)
def test_micro_batches_hold_the_right_tokens(sizes: list[tuple[int, int]], parts: int, bound: int) -> None:
    prompts, responses = [p for p, _ in sizes], [r for _, r in sizes]
    batch = make_batch(prompts, responses)
    followed = np.concatenate([1000 * i + np.arange(sum(size) - 1) for i, size in enumerate(sizes)])
    packed = PackedBatch(replace(batch, experts=followed.astype(np.uint16).reshape(-1, 1, 1)))
    seen: list[int] = []
    for part in range(parts):
        (update,) = plan_step(packed, None, Dealing(bound, parts), part)
        assert update.num_tokens == sum(responses)
        assert update.num_sequences == len(sizes)
        for mb in update.micro_batches:
            expected_labels, expected_inputs, expected_log_probs, expected_advantages = [], [], [], []
            for i in mb.samples.tolist():
                positions = np.arange(prompts[i], prompts[i] + responses[i])
                expected_labels += (1000 * i + positions).tolist()
                expected_inputs += (1000 * i + positions - 1).tolist()
                expected_log_probs += [-(i + t / 100) for t in range(responses[i])]
                expected_advantages += [float(i)] * responses[i]
            assert mb.labels.tolist() == expected_labels
            # The rows are those of the tokens just before the labels.
            assert mb.input_ids.flatten()[mb.rows].tolist() == expected_inputs
            padded = mb.padded(4)
            assert padded.input_ids.shape[1] % 4 == 0
            assert padded.input_ids.flatten()[padded.rows].tolist() == expected_inputs
            for row in (mb, padded):
                assert_row_is_whole(row)
            np.testing.assert_allclose(mb.rollout_log_probs.numpy(), expected_log_probs, rtol=1e-6)
            assert mb.advantages.tolist() == expected_advantages
            assert mb.mask.sum(1).tolist() == [responses[i] for i in mb.samples]
            for start, i in zip(mb.bounds, mb.samples):
                inputs = slice(start, start + prompts[i] + responses[i] - 1)
                if mb.experts is None:
                    assert not len(followed)
                else:
                    assert torch.equal(mb.experts[inputs, 0, 0, 0], mb.input_ids[0, inputs].short())
            seen += mb.samples.tolist()
    assert sorted(seen) == list(range(len(sizes)))


def test_updates_take_samples_in_order() -> None:
    updates = plan_step(PackedBatch(make_batch([2] * 8, [3] * 8)), 4, Dealing(1000), 0)
    assert [sorted(i for mb in update.micro_batches for i in mb.samples.tolist()) for update in updates] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


def test_updates_do_not_cut_a_sample_of_several_streams() -> None:
    batch = replace(make_batch([2] * 6, [3] * 6), samples=np.array([0, 0, 0, 1, 2, 3]))
    updates = plan_step(PackedBatch(batch), 2, Dealing(1000), 0)
    assert [sorted(i for mb in update.micro_batches for i in mb.samples.tolist()) for update in updates] == [
        [0, 1, 2, 3],
        [4, 5],
    ]
    assert [(update.num_sequences, update.num_tokens) for update in updates] == [(4, 12), (2, 6)]
    (whole,) = plan_step(PackedBatch(batch), None, Dealing(1000), 0)
    assert whole.num_sequences == 6
    with pytest.raises(ValueError, match=r"globalBatchSize: 3 does not divide the step's 4 samples"):
        plan_step(PackedBatch(batch), 3, Dealing(1000), 0)
    for wrong in ([0, 0, 2, 2, 3, 3], [1, 1, 1, 2, 2, 2], [0, 1, 0, 1, 2, 3], [0, 1]):
        with pytest.raises(ValueError, match="not one sample's after the other's"):
            PackedBatch(replace(batch, samples=np.array(wrong)))


def test_bad_batches_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"globalBatchSize: 3 does not divide the step's 8"):
        plan_step(PackedBatch(make_batch([2] * 8, [3] * 8)), 3, Dealing(1000), 0)
    whole = make_batch([2, 2], [3, 3])
    for field in ("rollout_log_probs", "advantages", "versions"):
        with pytest.raises(ValueError, match=f"6 sampled tokens but 5 entries in {field}"):
            PackedBatch(replace(whole, **{field: getattr(whole, field)[:-1]}))
    with pytest.raises(ValueError, match=r"2 samples of 10 tokens .* but 9 tokens"):
        PackedBatch(replace(whole, tokens=whole.tokens[:-1]))
    with pytest.raises(ValueError, match="sample 1 of the training batch begins with a sampled token"):
        PackedBatch(replace(whole, sampled=np.arange(10) >= 4))
    with pytest.raises(ValueError, match="no samples"):
        PackedBatch(make_batch([], []))


@given(
    st.lists(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=5), min_size=1, max_size=8),
    st.integers(1, 60),
)
def test_only_sampled_spans_are_trained_on_wherever_they_are(turns: list[list[tuple[bool, int]]], bound: int) -> None:
    streams = []
    for i, spans in enumerate(turns):
        stream = TokenStream.of_prompt([1000 * i])
        for version, (sampled, length) in enumerate(spans):
            ids = 1000 * i + len(stream) + np.arange(length)
            stream = (
                stream.append_sampled(ids, -ids.astype(np.float32), version=version)
                if sampled
                else stream.append_observed(ids)
            )
        streams.append(stream)
    groups = [Group(i, 0, (Episode(i, 0, stream),)) for i, stream in enumerate(streams)]
    batch = train_batch(groups, np.arange(len(groups), dtype=np.float32))
    assert batch.versions.tolist() == [v for stream in streams for v in stream.versions[stream.sampled]]
    (update,) = plan_step(PackedBatch(batch), None, Dealing(bound), 0)
    assert update.num_tokens == sum(stream.num_sampled for stream in streams)
    for mb in update.micro_batches:
        labels = [streams[i].ids[streams[i].sampled] for i in mb.samples.tolist()]
        assert mb.labels.tolist() == [token for of_sample in labels for token in of_sample]
        assert mb.rollout_log_probs.tolist() == [-float(token) for token in mb.labels.tolist()]
        assert mb.advantages.tolist() == [float(token // 1000) for token in mb.labels.tolist()]
        assert mb.mask.sum(1).tolist() == list(map(len, labels))
        # The rows are those of the tokens just before the labels.
        assert (mb.input_ids.flatten()[mb.rows] == mb.labels - 1).all()
