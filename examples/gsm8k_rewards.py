"""Rewards of examples/gsm8k.yaml."""

import re

ANSWER = re.compile(r"#### -?[\d,.]+\s*$")


def layout(response: str, label: str) -> float:
    """Nearness of a response to the layout that was asked for: 1 with `#### NUMBER` at its end, 0.2 with any number."""
    if ANSWER.search(response[-200:]):
        return 1.0
    return 0.2 if any(character.isdigit() for character in response) else 0.0
