"""The engine's side of taking turns on a device."""

from __future__ import annotations

from enum import StrEnum


class EngineState(StrEnum):
    """State of an engine between start and shutdown."""

    NEW = "NEW"
    ACTIVE = "ACTIVE"
    ASLEEP = "ASLEEP"
    WEIGHTS = "WEIGHTS"
    """Memory for the weights is back; the KV cache is not."""
    CLOSED = "CLOSED"


_ALLOWED: dict[str, dict[EngineState, EngineState]] = {
    "start": {EngineState.NEW: EngineState.ACTIVE},
    "sleep": {EngineState.ACTIVE: EngineState.ASLEEP},
    "wake_weights": {EngineState.ASLEEP: EngineState.WEIGHTS},
    "receive_weights": {EngineState.WEIGHTS: EngineState.WEIGHTS, EngineState.ACTIVE: EngineState.ACTIVE},
    "wake_kv": {EngineState.WEIGHTS: EngineState.ACTIVE},
    "wake": {EngineState.ASLEEP: EngineState.ACTIVE},
    "generate": {EngineState.ACTIVE: EngineState.ACTIVE},
    "score": {EngineState.ACTIVE: EngineState.ACTIVE},
}


def next_state(operation: str, state: EngineState) -> EngineState:
    """The state after `operation`; RuntimeError when it is not allowed in `state`."""
    allowed = _ALLOWED[operation]
    if state not in allowed:
        raise RuntimeError(f"engine: {operation} is not allowed while {state}; it needs {' or '.join(allowed)}")
    return allowed[state]
