"""A sampling seed for every request, derived from what the request is and not from where it runs."""

from __future__ import annotations

import hashlib

_BITS = 62


def request_seed(job_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """Seed of one sample; the same four numbers always give the same seed.

    A prompt's samples have consecutive seeds, which is also what vLLM gives the children of one request with `n`
    samples: a group can be sent either way.

    Args:
        job_seed: `spec.seed`.
        step: step of the job (or a fixed number for evaluation).
        prompt_index: index of the prompt within the step, over all engines.
        sample_index: index of the sample within its prompt's group.

    Returns:
        An integer in [0, 2**63).
    """
    key = f"{job_seed}/{step}/{prompt_index}".encode()
    base = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> (64 - _BITS)
    return base + sample_index
