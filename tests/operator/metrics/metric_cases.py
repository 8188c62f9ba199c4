"""Records and jobs as the operator meets them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rljob_api.phases import PHASES
from rljob_api.spec import RLJobSpec
from rljob_api.status import RLJobStatus
from rljob_operator.metrics import JobKey, JobMetricsStore
from rljob_operator.state.observed import JobView

KEY: JobKey = ("team", "qwen", "uid-1")
START = 1_800_000_000.0

SPEC: dict[str, Any] = {
    "steps": 150,
    "model": {"path": "/models/m"},
    "data": {"path": "/data/d.jsonl"},
    "reward": {"name": "math"},
    "rollout": {"promptsPerStep": 8, "samplesPerPrompt": 8, "maxResponseTokens": 64},
    "resources": {"profile": "cpu", "nodes": 1, "devicesPerNode": 8},
}


def record(index: int, step: int | None = None, run: int = 0, ranks: int = 2, **more: Any) -> dict[str, Any]:
    """A record as JSON gives it; `run` tells run folders apart."""
    step = index + 1 if step is None else step
    phases = {name: 0.004 * (position + 1) * (1 + step % 7) for position, name in enumerate(PHASES)}
    seconds = sum(phases.values()) + 0.002
    trainer = {"rank": 0, "phase": "sleep", "free": 9_000, "used": 1_000 + step, "paused": 700, "moved_bytes": 5}
    return {
        "index": index,
        "step": step,
        "attempt": 1,
        "rerun": False,
        "time": START + 10.0 * index + run,
        "step_seconds": seconds,
        "phases": phases,
        "lanes": {"engine": {"rollout": 0.5 * seconds, "admission_wait": 0.25 * seconds}},
        "other": 0.002,
        "switch_seconds": 0.1,
        "applied": True,
        "recovered": False,
        "metrics": {
            "rollout/raw_reward": 0.25 + step / 1000,
            "rollout/reward_parts/format": 0.5 + step / 1000,
            "rollout/response_len/mean": 64.0 + step,
            "rollout/episodes/failures/infra": 1.0,
            "train/train_rollout_logprob_abs_diff": 0.003,
            "train/loss": None,
        },
        "weights": {"version": step, "bytes": 1_200_000, "tensors": 25, "verified": True, "mode": "load"},
        "memory": {
            **{f"trainer-{rank}": {"wake_up": {"paused": 0}, "sleep": trainer} for rank in range(ranks)},
            **{f"engine-{rank}": {"rollout_wake_kv": {"resident_bytes": 6_000 + step}} for rank in range(ranks)},
        },
        "busy_seconds": {},
        "overlapped": {},
        **more,
    }


def run_of(steps: Iterable[int], run: int = 0) -> list[dict[str, Any]]:
    """A run folder's records: a step that was executed before is marked, as the driver does."""
    done: set[int] = set()
    records = []
    for index, step in enumerate(steps):
        records.append(record(index, step, run, rerun=step in done))
        done.add(step)
    return records


def view(key: JobKey = KEY, *, created: float = START, spec: dict[str, Any] | None = SPEC, **status: Any) -> JobView:
    """The job with a status given in camelCase."""
    return JobView(
        namespace=key[0],
        name=key[1],
        uid=key[2],
        generation=1,
        created=created,
        spec=None if spec is None else RLJobSpec.model_validate(spec),
        status=RLJobStatus.model_validate(status),
    )


def condition(kind: str, status: str = "True", time: str = "2027-01-15T08:00:00Z") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": "R", "lastTransitionTime": time}


def samples(text: bytes) -> dict[str, float]:
    """Value by series, as written."""
    lines = [line for line in text.decode().split("\n") if line and not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def exposition(store: JobMetricsStore) -> bytes:
    """All that /metrics would answer."""
    return b"".join(store.parts())
