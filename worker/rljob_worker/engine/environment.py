"""Variables that an engine process needs before Python starts."""

from __future__ import annotations

import os
from pathlib import Path

import rljob_api
import rljob_worker
from rljob_api import derived
from rljob_api.rules.devices import V2_RUNNER
from rljob_api.spec import RLJobSpec
from rljob_worker.devices.kinds import device_kind
from rljob_worker.engine.platforms import engine_platform
from rljob_worker.host.sockets import LOOPBACK
from rljob_worker.host.threads import threads_per_process


def engine_environment(spec: RLJobSpec, *, cache_folder: str | None = None) -> dict[str, str]:
    """Environment variables of an engine actor, for its `runtime_env`.

    Args:
        spec: the job.
        cache_folder: where vLLM keeps what it found out about models, and compiled; default: where it is used to.
    """
    threads = str(threads_per_process(spec.resources.threads_per_device, derived.node_groups(spec)[-1].devices))
    environment = {
        # The engine core inside the actor: half the rollout time of a small model, and no process outlives the actor.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # vLLM takes its second one for some models where there is Triton; the patches are for the first.
        V2_RUNNER: "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        # Ray sets 1 for actors that ask for no CPUs, and vLLM makes torch.set_num_threads a no-op.
        "OMP_NUM_THREADS": threads,
        # vLLM looks for n-grams with numba, whose number of threads becomes OpenMP's.
        "NUMBA_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        # The model is a local folder by now; a hub that does not answer must not delay the start.
        "HF_HUB_OFFLINE": "1",
        # All of an engine is on one node: nobody else needs to reach its workers.
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        # Workers of a tensor-parallel engine import the worker extension by name.
        "PYTHONPATH": _python_path(),
    }
    environment |= engine_platform(device_kind(spec.resources).name).environment(spec)
    if cache_folder is not None:
        environment["VLLM_CACHE_ROOT"] = str(Path(cache_folder) / "vllm")
    return environment


def _python_path() -> str:
    own = [
        str(Path(package.__file__).resolve().parents[1]) for package in (rljob_worker, rljob_api) if package.__file__
    ]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return os.pathsep.join(dict.fromkeys([*own, *inherited]))
