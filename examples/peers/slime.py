"""Reward functions as slime's `--custom-rm-path` names them: one sample, or a group's with `--group-rm`."""

from slime.utils.types import Sample


async def custom_rm(args, sample: Sample) -> float:
    """Share of the label's words that the response has, less a penalty where it was cut off."""
    words = sample.label.split()
    found = sum(word in sample.response.split() for word in words) / len(words)
    return found - (args.cut_penalty if sample.status == Sample.Status.TRUNCATED else 0.0)


async def group_rm(args, samples: list[Sample]) -> list[float]:
    """A group's responses, by how much shorter they are than the longest one."""
    longest = max(sample.response_length for sample in samples)
    return [1.0 - sample.response_length / max(1, longest) * sample.metadata["weight"] for sample in samples]


def answered(args, sample: Sample) -> float:
    """Share of the context that is the response, in tokens."""
    return sample.response_length / len(sample.tokens)
