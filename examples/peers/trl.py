"""Reward functions as TRL's GRPOTrainer calls them: lists in, one score for each completion out."""


def accuracy(completions, answer, **kwargs):
    """1 where the last word of a completion is the answer; no score for a row that has none."""
    scores = []
    for completion, wanted in zip(completions, answer):
        if wanted is None:
            scores.append(None)
            continue
        words = completion.split()
        scores.append(1.0 if words and words[-1] == wanted else 0.0)
    return scores


def brevity(prompts, completions, **kwargs):
    """Less for a completion that is longer than its prompt."""
    return [min(1.0, len(prompt) / max(1, len(text))) for prompt, text in zip(prompts, completions)]


def length(completion_ids, **kwargs):
    """Number of tokens."""
    return [float(len(ids)) for ids in completion_ids]
