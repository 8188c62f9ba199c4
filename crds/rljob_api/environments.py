"""Facts about environments for manifest and worker. Environment hosts import it: keep it light."""

from __future__ import annotations

from enum import StrEnum


class BuiltIn(StrEnum):
    """Environments that a manifest names. Each has the module of its member's name, in lower case, in
    `rljob_worker.environments`."""

    FROZEN_LAKE = "FrozenLake"
    SOKOBAN = "Sokoban"


class AgentField(StrEnum):
    """Field of an agent's request."""

    TEMPERATURE = "temperature"
    TOP_P = "top_p"
    MAX_TOKENS = "max_tokens"
    MAX_COMPLETION_TOKENS = "max_completion_tokens"
    STOP = "stop"
    SEED = "seed"


class Form(StrEnum):
    """Form in which a policy writes its action."""

    PLAIN = "Plain"
    """A word: the last one that is an action counts."""
    ANSWER = "Answer"
    """Between `<answer>` and `</answer>`: the last ones count."""
    THINK = "Think"
    """`<think>...</think> <answer>...</answer>` and nothing else."""
