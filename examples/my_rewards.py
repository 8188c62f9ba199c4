"""Rewards of examples/rewards.yaml."""

from itertools import pairwise


def alternates(response: str, label: str) -> dict[str, float]:
    """Share of neighbouring symbols that differ; reported beside it: how many different ones there are."""
    symbols = response.split()
    changes = sum(a != b for a, b in pairwise(symbols))
    return {"score": changes / max(1, len(symbols) - 1), "distinct": len(set(symbols))}
