"""Captured graphs of decoding steps (`rollout.graphMode` on devices): what vLLM is asked to capture."""

from __future__ import annotations

from rljob_api.derived import max_sequences
from rljob_api.spec import RLJobSpec

DECODING_STEPS = "FULL_DECODE_ONLY"
"""vLLM's mode that captures the whole model for steps of one token a sequence; prompts run as without graphs."""


def graph_arguments(spec: RLJobSpec, compilation: int) -> dict[str, object]:
    """vLLM's `compilation_config`, with the user's settings over it.

    Args:
        spec: the job, whose `rollout.engineArgs` may give sizes of their own.
        compilation: vLLM's `CompilationMode`; 0 captures the kernels that run without graphs.
    """
    given = _given(spec)
    own: dict[str, object] = {"mode": compilation, "cudagraph_mode": DECODING_STEPS}
    if "cudagraph_capture_sizes" not in spec.rollout.engine_args:
        own["cudagraph_capture_sizes"] = capture_sizes(spec)
    return {"compilation_config": own | given}


def capture_sizes(spec: RLJobSpec) -> list[int]:
    """Tokens of the steps that are captured, ascending: of powers of two of sequences, up to all that run at once.

    With speculative decoding a sequence has a token and its guesses in a step.
    """
    arguments, given = spec.rollout.engine_args, _given(spec)
    sizes = arguments.get("cudagraph_capture_sizes") or given.get("cudagraph_capture_sizes")
    if isinstance(sizes, list):
        return sorted({size for size in sizes if isinstance(size, int)})
    each = 1 + (0 if spec.rollout.speculative is None else spec.rollout.speculative.draft_tokens)
    most = max_sequences(spec)
    counts = [2**power for power in range(most.bit_length()) if 2**power < most]
    largest = arguments.get("max_cudagraph_capture_size") or given.get("max_cudagraph_capture_size")
    if not isinstance(largest, int):
        largest = each * most
    # vLLM refuses a largest size that is not the list's last one.
    return [each * count for count in counts if each * count < largest] + [largest]


def _given(spec: RLJobSpec) -> dict[str, object]:
    given = spec.rollout.engine_args.get("compilation_config") or {}
    assert isinstance(given, dict)  # rljob_api.engine_arguments has looked at it
    return given
