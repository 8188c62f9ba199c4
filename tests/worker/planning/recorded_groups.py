"""Two trainer ranks train a step in several layouts and write which of Megatron's groups they used.

Called as `python recorded_groups.py RANK FOLDER CASE...`; writes `FOLDER/rank-N.json`: case -> names of the groups.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from rljob_worker.trainer.trainer import Trainer
from rljob_worker.types import SamplingParams, TrainBatch

LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "tensor": ("dense", {"tensorParallel": 2}),
    "data": ("dense", {}),
    "pipeline": ("dense", {"pipelineParallel": 2}),
    "pipeline-tied": ("tied", {"pipelineParallel": 2}),
    "context": ("dense", {"contextParallel": 2}),
    "expert": ("moe", {"expertParallel": 2}),
    "expert-tensor": ("moe", {"tensorParallel": 2}),
}
"""Case -> model folder and `spec.training`."""
_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "_all_gather_base",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "all_to_all_single",
    "broadcast",
)


def spec(training: dict[str, int]) -> dict[str, Any]:
    return {
        "steps": 10,
        "model": {"random": {"config": {"model_type": "qwen3"}}},
        "data": {"synthetic": {}},
        "reward": {"name": "match"},
        "rollout": {"promptsPerStep": 2, "samplesPerPrompt": 4, "maxResponseTokens": 4},
        "training": {"precision": "fp32", **training},
        "resources": {"profile": "cpu", "devicesPerNode": 2},
        "memorySaver": {"trainMemoryMargin": "0"},
        "timeouts": {"startSeconds": 300, "phaseSeconds": 300},
    }


def batch() -> TrainBatch:
    random = np.random.default_rng(0)
    return TrainBatch.of_responses(
        tokens=[random.integers(0, 31, 8) for _ in range(8)],
        prompt_lengths=np.full(8, 4),
        rollout_log_probs=[np.full(4, -3.0, dtype=np.float32)] * 8,
        advantages=random.standard_normal(8).astype(np.float32),
    )


def names_of_groups() -> dict[int, str]:
    """id of each of this rank's groups of two ranks -> `parallel_state`'s name for it."""
    from megatron.core import parallel_state

    found = {}
    for attribute in sorted(dir(parallel_state)):
        if not attribute.startswith("get_") or not attribute.endswith("_group"):
            continue
        name = attribute.removeprefix("get_").removesuffix("_group")
        function = getattr(parallel_state, attribute)
        variants: dict[str, dict[str, bool]] = {name: {}}
        if "with_context_parallel" in inspect.signature(function).parameters:
            variants[f"{name}_with_context_parallel"] = {"with_context_parallel": True}
        for variant, arguments in variants.items():
            try:
                group = function(**arguments)
            except Exception:  # not made in this layout
                continue
            if isinstance(group, dist.ProcessGroup) and group.size() > 1:
                found[id(group)] = variant
    return found


def record(used: set[int]) -> None:
    """Note the group of each collective; groups are given by position or by name."""
    for name in _COLLECTIVES:
        if hasattr(dist, name):
            _replace(getattr(dist, name), _recording(getattr(dist, name), used))
    plain = dist.batch_isend_irecv

    def batched(operations: list[Any]) -> Any:
        used.update(id(operation.group) for operation in operations)
        return plain(operations)

    _replace(plain, batched)


def _replace(function: Any, by: Any) -> None:
    """For all but torch itself: Megatron, which may have been imported, has names of its own for some."""
    for module_name, module in list(sys.modules.items()):
        if module is dist or module_name.partition(".")[0] in ("megatron", "rljob_worker"):
            for name in [name for name, value in list(vars(module).items()) if value is function]:
                setattr(module, name, by)


def _recording(function: Any, used: set[int]) -> Any:
    def recording(*args: Any, **kwargs: Any) -> Any:
        used.update(id(value) for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup))
        return function(*args, **kwargs)

    return recording


def main(rank: int, folder: Path, cases: list[str]) -> None:
    used: set[int] = set()
    record(used)
    result = {}
    for case in cases:
        model, training = LAYOUTS[case]
        trainer = Trainer(
            spec(training),
            rank=rank,
            world_size=2,
            store=f"file://{folder}/store-{case}",
            secret="of-a-test",
            model_folder=str(folder / model),
            total_updates=10,
        )
        trainer.setup()
        used.clear()
        trainer.train(batch(), SamplingParams(max_tokens=4), 1)
        names = names_of_groups()
        backend: Any = trainer.backend
        if backend.rank.cp_group is not None:
            names[id(backend.rank.cp_group)] = "context_parallel"
        result[case] = sorted(names[group] for group in used if group in names)
        trainer.close()
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
