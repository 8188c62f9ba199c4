from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.spec import TrainingSpec
from rljob_worker.parallel_layout import ParallelLayout, check_nodes

sizes = st.builds(
    lambda tp, pp, ep, more: ParallelLayout(tp * pp * ep * more, tp, pp, ep),
    *(st.sampled_from([1, 2, 4]),) * 3,
    st.integers(1, 4),
)


def every_rank(layout: ParallelLayout) -> list[ParallelLayout]:
    return [replace(layout, rank=rank) for rank in range(layout.world_size)]


@given(sizes)
def test_each_place_of_each_cut_is_held_by_one_rank(layout: ParallelLayout) -> None:
    ranks = every_rank(layout)
    dense = {(at.tp_rank, at.dp_rank, at.pp_rank) for at in ranks}
    assert dense == {(t, d, p) for t in range(layout.tp) for d in range(layout.dp) for p in range(layout.pp)}
    experts = [(at.ep_rank, at.expert_dp_rank, at.pp_rank) for at in ranks]
    places = {(e, d, p) for e in range(layout.ep) for d in range(layout.expert_dp) for p in range(layout.pp)}
    assert set(experts) == places
    assert all(experts.count(place) == layout.expert_tp for place in places)


@given(sizes)
def test_stages_are_outermost_and_tensor_parallel_ranks_are_neighbours(layout: ParallelLayout) -> None:
    ranks = every_rank(layout)
    assert [at.pp_rank for at in ranks] == sorted(at.pp_rank for at in ranks)
    assert all(at.tp_rank == at.rank % layout.tp for at in ranks)
    assert [at.rank for at in ranks if at.first_stage] == list(range(layout.stage_size))
    assert sum(at.last_stage for at in ranks) == layout.stage_size


@given(sizes, st.integers(1, 3))
def test_nodes_hold_whole_replicas(of_a_node: ParallelLayout, nodes: int) -> None:
    per_node = of_a_node.world_size
    whole = replace(of_a_node, world_size=per_node * nodes)
    ranks = every_rank(whole)
    dealt = whole.nodes(per_node)
    assert sorted(rank for node in dealt for rank in node) == list(range(whole.world_size))
    for node in dealt:
        here = [ranks[rank].in_node(per_node) for rank in node]
        assert here == every_rank(of_a_node), "as a node alone, in the order of its devices"
        for at, rank in zip(here, node, strict=True):
            outside = ranks[rank]
            assert (at.tp_rank, at.pp_rank, at.ep_rank) == (outside.tp_rank, outside.pp_rank, outside.ep_rank)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"pipelineParallel": 3}, r"training\.pipelineParallel: 3 does not divide resources\.devicesPerNode 4"),
        ({"tensorParallel": 8}, r"training\.tensorParallel: 8 does not divide"),
        ({"expertParallel": 8}, r"training\.expertParallel: 8 does not divide"),
        (
            {"pipelineParallel": 2, "tensorParallel": 4},
            r"training\.tensorParallel: 4 in each of 2 pipeline stages does not divide resources\.devicesPerNode 4",
        ),
        ({"pipelineParallel": 2, "expertParallel": 4}, r"training\.expertParallel: 4 in each of 2 pipeline stages"),
    ],
)
def test_a_node_must_hold_whole_copies_of_the_model(training: dict[str, int], message: str) -> None:
    asked = TrainingSpec.model_validate(training)
    with pytest.raises(ValueError, match=message):
        check_nodes(asked, 4, 2)
    check_nodes(asked, 8, 1)


@pytest.mark.parametrize(
    ("nodes", "devices", "tp", "pp", "ep"),
    [(2, 1, 1, 1, 1), (2, 4, 2, 1, 2), (3, 2, 1, 1, 2), (1, 4, 2, 1, 1), (2, 4, 2, 2, 2), (2, 8, 2, 2, 1)],
)
def test_one_replica_in_each_node_sends(nodes: int, devices: int, tp: int, pp: int, ep: int) -> None:
    whole = ParallelLayout(nodes * devices, tp, pp, ep)
    for node in whole.nodes(devices):
        here = [replace(whole, rank=rank).in_node(devices) for rank in node]
        dense = [(at.pp_rank, at.tp_rank) for at in here if at.dp_rank == 0]
        assert dense == [(stage, part) for stage in range(pp) for part in range(tp)]
        holders = [(at.pp_rank, at.ep_rank) for at in here if at.expert_dp_rank == 0 and at.rank % at.expert_tp == 0]
        assert holders == [(stage, share) for stage in range(pp) for share in range(ep)]


def test_replicas_that_fit_a_node_are_accepted() -> None:
    check_nodes(TrainingSpec.model_validate({"pipelineParallel": 2, "tensorParallel": 2, "expertParallel": 2}), 4, 2)


@given(sizes, st.data())
def test_a_checkpoint_gives_the_layout_back(layout: ParallelLayout, data: st.DataObject) -> None:
    at = replace(layout, rank=data.draw(st.integers(0, layout.world_size - 1)))
    assert ParallelLayout.of_coordinates(at.coordinates()) == at
