"""Looking at a model's class: in the engine's own process, which loads the class next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rljob_worker.upstream.patch import VLLM, Patch, Process, put

T = TypeVar("T")


def look_in_this_process() -> None:
    """Have vLLM import a model's module here in order to see what its class can do."""
    import vllm.model_executor.models.registry as registry

    put(registry, _run_in_subprocess=_call)


def _call(function: Callable[[], T]) -> T:
    return function()


PATCHES = (
    Patch(
        "vllm-models-in-process",
        ("vllm.model_executor.models.registry._run_in_subprocess",),
        {"vllm": VLLM},
        "for each model that is not in its cache, and a new run folder has none, vLLM starts an interpreter that "
        "imports torch and vLLM again, to keep CUDA out of the engine's process: ten seconds of a core, on CPU too. "
        "(On NPUs vllm-ascend changes what models import when its worker is made: they must not be imported before)",
        "tests/worker/upstream/test_vllm_models.py::test_a_models_class_is_looked_at_without_a_process",
        look_in_this_process,
        (Process.ENGINE,),
        ("cpu",),
    ),
)
