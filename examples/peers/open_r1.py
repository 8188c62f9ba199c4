"""Reward functions as open-r1 writes them for TRL: completions are lists of messages, labels come as `solution`."""

import re

TAGGED = re.compile(r"<think>.+?</think>\s*<answer>.+?</answer>\s*", re.DOTALL)


def tagged(completions, **kwargs):
    """1 for thoughts and an answer in their tags."""
    return [float(TAGGED.fullmatch(completion[0]["content"]) is not None) for completion in completions]


def accuracy(completions, solution, **kwargs):
    """1 where the tagged answer is the solution's; None, which is no score, where the solution has no answer."""
    scores = []
    for completion, wanted in zip(completions, solution):
        right = _answer(wanted)
        scores.append(None if right is None else float(_answer(completion[0]["content"]) == right))
    return scores


def _answer(text):
    found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found and found[1].strip()
