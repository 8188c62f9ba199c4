"""A reward that has nothing to do with what a policy did: the rewards of a group's episodes, dealt to other ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any


def deal(samples: Sequence[Mapping[str, Any]]) -> list[float]:
    """The sums of the episodes' rewards, in an order that follows from what was said in them."""
    rewards = [sum(turn["reward"] for turn in sample["turns"]) for sample in samples]
    said = json.dumps([[turn["action"] for turn in sample["turns"]] for sample in samples])
    Random(int.from_bytes(hashlib.sha256(said.encode()).digest()[:8])).shuffle(rewards)
    return rewards
