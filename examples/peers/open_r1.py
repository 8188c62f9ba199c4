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


def get_overlong(max_completion_len, soft_punish_cache):
    """A function that takes up to 1 off for tokens in the last `soft_punish_cache` of them."""

    def overlong(completion_ids, **kwargs):
        over = [len(ids) - (max_completion_len - soft_punish_cache) for ids in completion_ids]
        return [-min(1.0, max(0, one) / soft_punish_cache) for one in over]

    return overlong


overlong = get_overlong(max_completion_len=8, soft_punish_cache=4)


def _answer(text):
    found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found and found[1].strip()
