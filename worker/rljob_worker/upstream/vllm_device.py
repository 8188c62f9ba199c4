"""Objects of vLLM's workers on npu and cuda that are set right once they are there."""

from __future__ import annotations

import torch

from rljob_worker.upstream.patch import VLLM, VLLM_ASCEND, Patch, Process, put
from rljob_worker.upstream.vllm_types import ModelRunner

Parameters = list[tuple[torch.nn.Module, str, torch.nn.Parameter]]
"""Module, name in it, parameter."""


def return_asked_log_probs(model_runner: ModelRunner) -> None:
    """Have the sampler return the log-probabilities that the engine's arguments ask for.

    Raises:
        RuntimeError: the sampler does not have the setting.
    """
    sampler = model_runner.sampler
    mode = model_runner.model_config.logprobs_mode
    for part in (sampler, sampler.topk_topp_sampler):
        if not hasattr(part, "logprobs_mode"):
            raise RuntimeError(f"{type(part).__qualname__} has no logprobs_mode: RLJob needs {mode}")
        put(part, logprobs_mode=mode)


def parameters_of(model: torch.nn.Module) -> Parameters:
    """All parameters, each where its module has it; for `put_back`."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]


def put_back(parameters: Parameters) -> int:
    """Put back parameters that were replaced since; returns how many.

    The reload puts its result, packed, where the weights were that the engine computes with: it would find another
    shape there.
    """
    replaced = 0
    for module, name, parameter in parameters:
        if module._parameters.get(name) is not parameter:
            module._parameters[name] = parameter
            replaced += 1
    return replaced


PATCHES = (
    Patch(
        "vllm-log-probs-mode",
        ("Sampler.logprobs_mode", "TopKTopPSampler.logprobs_mode"),
        {"vllm": VLLM},
        "vllm-ascend makes its sampler without it, and would return log-probabilities before temperature and top-p",
        "tests/worker/engine/test_engine_platforms.py::test_the_sampler_is_made_to_return_what_it_samples_from",
        return_asked_log_probs,
        (Process.ENGINE_WORKER,),
        ("cuda", "npu"),
        scoped=True,
    ),
    Patch(
        "vllm-ascend-parameters-after-wake",
        ("the parameters of the experts",),
        {"vllm-ascend": VLLM_ASCEND},
        "waking, vllm-ascend replaces the experts' weights by transposed views of them, in the layout of a checkpoint",
        "tests/worker/engine/test_engine_platforms.py::test_parameters_that_waking_replaces_are_put_back",
        put_back,
        (Process.ENGINE_WORKER,),
        ("npu",),
        scoped=True,
    ),
)
