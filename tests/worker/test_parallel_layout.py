from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.spec import TrainingSpec
from rljob_worker.parallel_layout import ParallelLayout, check_nodes

sizes = st.builds(
    lambda tp, pp, ep, cp, more: ParallelLayout(tp * cp * pp * ep * more, tp, pp, ep, cp=cp),
    *(st.sampled_from([1, 2, 4]),) * 3,
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
)


def every_rank(layout: ParallelLayout) -> list[ParallelLayout]:
    return [replace(layout, rank=rank) for rank in range(layout.world_size)]


@given(sizes)
def test_each_place_of_each_cut_is_held_by_one_rank(layout: ParallelLayout) -> None:
    ranks = every_rank(layout)
    dense = {(at.tp_rank, at.dp_rank, at.pp_rank) for at in ranks}
    assert dense == {(t, d, p) for t in range(layout.tp) for d in range(layout.dp) for p in range(layout.pp)}
    experts = Counter((at.ep_rank, at.expert_dp_rank, at.pp_rank) for at in ranks)
    places = [(e, d, p) for e in range(layout.ep) for d in range(layout.expert_dp) for p in range(layout.pp)]
    assert experts == dict.fromkeys(places, layout.expert_tp)


@given(sizes)
def test_stages_are_outermost_and_tensor_parallel_ranks_are_neighbours(layout: ParallelLayout) -> None:
    ranks = every_rank(layout)
    assert [at.pp_rank for at in ranks] == sorted(at.pp_rank for at in ranks)
    assert all(at.tp_rank == at.rank % layout.tp for at in ranks)
    assert [at.rank for at in ranks if at.first_stage] == list(range(layout.stage_size))
    assert sum(at.last_stage for at in ranks) == layout.stage_size


@given(sizes)
def test_ranks_that_divide_rows_are_neighbours_of_one_stage(layout: ParallelLayout) -> None:
    ranks = every_rank(layout)
    places = {(at.samples_rank, at.cp_rank, at.tp_rank, at.pp_rank) for at in ranks}
    assert len(places) == layout.world_size
    assert layout.samples * layout.cp == layout.dp
    groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for at in ranks:
        groups[at.pp_rank, at.samples_rank].append(at.rank)
    for group in groups.values():
        assert group == list(range(group[0], group[0] + layout.tp * layout.cp))


@given(sizes, st.integers(1, 3))
def test_nodes_hold_whole_replicas(of_a_node: ParallelLayout, nodes: int) -> None:
    per_node = of_a_node.world_size
    whole = replace(of_a_node, world_size=per_node * nodes)
    ranks = every_rank(whole)
    dealt = whole.nodes(per_node)
    assert sorted(rank for node in dealt for rank in node) == list(range(whole.world_size))
    for node in dealt:
        here = [ranks[rank].among_replicas(per_node) for rank in node]
        assert here == every_rank(of_a_node), "as a node alone, in the order of its devices"
        assert [ranks[rank].place_in_node(per_node) for rank in node] == list(range(per_node))
        for at, rank in zip(here, node, strict=True):
            outside = ranks[rank]
            assert (at.tp_rank, at.pp_rank, at.ep_rank) == (outside.tp_rank, outside.pp_rank, outside.ep_rank)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(2, 6), st.integers(1, 4), st.integers(1, 4))
def test_stages_over_nodes_lie_on_as_few_as_can_be(tp: int, ep: int, pp: int, more: int, nodes: int) -> None:
    per_node = more * max(tp, ep)
    training = TrainingSpec.model_validate({"tensorParallel": tp, "expertParallel": ep, "pipelineParallel": pp})
    together = ParallelLayout(per_node * pp * nodes, tp, pp, ep).nodes_of_replica(per_node)
    count = together * nodes
    check_nodes(training, per_node, count)
    layout = ParallelLayout.of_training(training, per_node * count)
    dealt, ranks = layout.nodes(per_node), every_rank(layout)
    assert sorted(rank for node in dealt for rank in node) == list(range(layout.world_size))
    for node in dealt:
        assert [ranks[rank].place_in_node(per_node) for rank in node] == list(range(per_node))
        for size in (tp, ep):
            groups = [(ranks[rank].pp_rank, rank % layout.stage_size // size) for rank in node]
            assert all(groups.count(group) == size for group in groups), "no group lies on two nodes"
    size = layout.nodes_of_replica(per_node)
    groups = [[rank for node in dealt[first : first + size] for rank in node] for first in range(0, count, size)]
    assert layout.nodes(per_node * size) == groups, (
        "those that hold whole replicas together are dealt as large nodes are"
    )
    for block in groups:
        alone = replace(layout, world_size=len(block))
        assert [ranks[rank].among_replicas(per_node) for rank in block] == every_rank(alone)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            {"pipelineParallel": 6},
            r"training\.pipelineParallel: with 6 stages 3 nodes of 4 devices .* does not divide the 2 nodes",
        ),
        ({"tensorParallel": 8}, r"training\.tensorParallel: 8 does not divide resources\.devicesPerNode 4"),
        ({"contextParallel": 8}, r"training\.tensorParallel x training\.contextParallel: 8 does not divide"),
        ({"expertParallel": 8}, r"training\.expertParallel: 8 does not divide"),
        ({"pipelineParallel": 2, "tensorParallel": 3}, r"training\.tensorParallel: 3 does not divide"),
    ],
)
def test_only_stages_may_lie_on_several_nodes(training: dict[str, int], message: str) -> None:
    asked = TrainingSpec.model_validate(training)
    with pytest.raises(ValueError, match=message):
        check_nodes(asked, 4, 2)
    check_nodes(asked, 12, 1)


@pytest.mark.parametrize(
    ("nodes", "devices", "tp", "pp", "ep"),
    [(2, 1, 1, 1, 1), (2, 4, 2, 1, 2), (3, 2, 1, 1, 2), (1, 4, 2, 1, 1), (2, 4, 2, 2, 2), (2, 8, 2, 2, 1)],
)
def test_one_replica_in_each_node_sends(nodes: int, devices: int, tp: int, pp: int, ep: int) -> None:
    whole = ParallelLayout(nodes * devices, tp, pp, ep)
    for node in whole.nodes(devices):
        here = [replace(whole, rank=rank).among_replicas(devices) for rank in node]
        dense = [(at.pp_rank, at.tp_rank) for at in here if at.dp_rank == 0]
        assert dense == [(stage, part) for stage in range(pp) for part in range(tp)]
        holders = [(at.pp_rank, at.ep_rank) for at in here if at.expert_dp_rank == 0 and at.rank % at.expert_tp == 0]
        assert holders == [(stage, share) for stage in range(pp) for share in range(ep)]


@given(sizes, st.data())
def test_a_checkpoint_gives_the_layout_back(layout: ParallelLayout, data: st.DataObject) -> None:
    at = replace(layout, rank=data.draw(st.integers(0, layout.world_size - 1)))
    assert ParallelLayout.of_coordinates(at.coordinates()) == at
    sharded = replace(at, shards=2)
    assert ParallelLayout.of_coordinates(sharded.coordinates()) == sharded
    before_shards = {name: value for name, value in at.coordinates().items() if name != "shards"}
    assert ParallelLayout.of_coordinates(before_shards) == at, "as older checkpoints have them"


@pytest.mark.parametrize(
    ("shards", "per_node", "together"), [(1, 2, 1), (2, 2, 1), (2, 4, 1), (4, 2, 2), (3, 2, 3), (8, 2, 4), (12, 12, 1)]
)
def test_ranks_that_divide_a_copy_hold_it_together(shards: int, per_node: int, together: int) -> None:
    layout = ParallelLayout(24, rank=23, shards=shards)
    assert layout.nodes_of_replica(per_node) == together
    among = layout.among_replicas(per_node)
    assert among == ParallelLayout(per_node * together, rank=per_node * together - 1, shards=shards)
    assert not among.world_size % shards
