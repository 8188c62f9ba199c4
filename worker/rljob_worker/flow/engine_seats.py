"""Which engines come and go so that a number of nodes is in use."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def change(
    seats: Mapping[str, str], made: Collection[str], nodes: int, engines_per_node: int
) -> tuple[list[str], list[str]]:
    """Who is let go, and who is to be made, for so many nodes full of engines.

    Nodes are given back whole: those with the fewest engines first, of two the one whose engines joined later. Before
    any engine that takes part, those go that are still being made.

    Args:
        seats: node of each engine that takes part, in the order in which they joined; at least one.
        made: engines that are being made, in the order in which that began.
        nodes: how many are wanted, at least 1.
        engines_per_node: on each.

    Returns:
        Names of those that are let go, and of new ones: `engine-N` with the smallest numbers that nobody has.
    """
    by_node: dict[str, list[str]] = {}
    for engine, node in seats.items():
        by_node.setdefault(node, []).append(engine)
    fewest_last = sorted(by_node.values(), key=len, reverse=True)
    kept, gone = fewest_last[:nodes], [engine for engines in fewest_last[nodes:] for engine in engines]
    missing = max(0, nodes * engines_per_node - sum(map(len, kept)))
    gone += list(made)[missing:]
    taken = {*seats, *made}
    numbers = (f"engine-{number}" for number in range(len(taken) + missing))
    new = [name for name in numbers if name not in taken][: max(0, missing - len(made))]
    return gone, new
