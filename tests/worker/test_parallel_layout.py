from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rljob_worker.parallel_layout import ParallelLayout

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
    whole = replace(of_a_node, pp=1, world_size=of_a_node.world_size * nodes)
    for at in every_rank(whole):
        here = at.in_node(of_a_node.world_size)
        assert here == replace(of_a_node, pp=1, rank=at.rank % of_a_node.world_size)
        assert (here.tp_rank, here.ep_rank) == (at.tp_rank, at.ep_rank)


@given(sizes, st.data())
def test_a_checkpoint_gives_the_layout_back(layout: ParallelLayout, data: st.DataObject) -> None:
    at = replace(layout, rank=data.draw(st.integers(0, layout.world_size - 1)))
    assert ParallelLayout.of_coordinates(at.coordinates()) == at
