"""Shared set-up: fast tests first, no network, no compilation, no usage statistics."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests, then those that start Ray or vLLM, those on a Kubernetes control plane, and those on a real node."""
    markers = ("node", "cluster", "slow")
    items.sort(key=lambda item: [item.get_closest_marker(marker) is not None for marker in markers])
