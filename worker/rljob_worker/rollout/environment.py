"""What an engine process needs in its environment before Python starts."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import rljob_api
import rljob_worker
from rljob_api.spec import Precision, RLJobSpec
from rljob_worker.threads import threads_per_process

TORCH_LINEAR = "RLJOB_TORCH_LINEAR"
"""Variable that has the engine's linear layers call torch; read by `worker_extension` in each engine process."""


def engine_environment(spec: RLJobSpec, *, cache_folder: str | None = None) -> dict[str, str]:
    """Environment variables of an engine actor, for its `runtime_env`.

    Args:
        spec: the job.
        cache_folder: where vLLM and the compiler keep their caches; default: where they are used to.
    """
    environment = {
        # The engine core inside the actor: half the rollout time of a small model, and no process outlives the actor.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # vLLM would pin its threads to cores of its own choice: engines side by side would all take the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        # Ray sets 1 for actors that ask for no CPUs, and vLLM makes torch.set_num_threads a no-op.
        "OMP_NUM_THREADS": str(threads_per_process(spec)),
        "TOKENIZERS_PARALLELISM": "false",
        # The model is a local folder by now; a hub that does not answer must not delay the start.
        "HF_HUB_OFFLINE": "1",
        # Workers of a tensor-parallel engine import the worker extension by name.
        "PYTHONPATH": _python_path(),
    }
    # Eager mode compiles helpers all the same: 11 to 22 s at start-up for bit-equal results.
    environment["TORCHDYNAMO_DISABLE"] = "0" if spec.rollout.graph_mode else "1"
    fp32_on_x86 = spec.training.precision is Precision.FP32 and platform.machine() == "x86_64"
    if fp32_on_x86 and not spec.rollout.graph_mode:
        # For a decoding step of 64 rows of fp32, torch's packed products take two thirds of the time of vLLM's own, and
        # as long for a few. The compiler cannot read the packed weights.
        environment[TORCH_LINEAR] = "1"
    if cache_folder is not None:
        environment["VLLM_CACHE_ROOT"] = str(Path(cache_folder) / "vllm")
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache_folder) / "inductor")
    return environment


def _python_path() -> str:
    own = [
        str(Path(package.__file__).resolve().parents[1]) for package in (rljob_worker, rljob_api) if package.__file__
    ]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return os.pathsep.join(dict.fromkeys([*own, *inherited]))
