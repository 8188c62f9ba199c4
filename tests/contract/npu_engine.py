"""An engine of `rljob_worker.engine` in a process of its own: `npu_engine.py SPEC MODEL DEVICE [OPTION ...]`.

It generates, sleeps and wakes at both of vLLM's levels, and prints a JSON line with what it generated after each; on an
NPU before it the bytes given back, and which of vllm-ascend's functions were called (with `record`). With `graphs` a
line with their number, their replays and refusals comes first, and two generations more: after a weight was written
where it is, and after it was written back. With `async` one batch is scheduled ahead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

from rollout_models import MAX_RESPONSE, group_requests

from rljob_worker.engine import engine as engine_module
from rljob_worker.engine.arguments import engine_arguments
from rljob_worker.engine.engine import Engine
from rljob_worker.errors import WeightSyncError
from rljob_worker.types import SamplingParams
from rljob_worker.upstream.vllm_graphs import model_of

SAMPLING = SamplingParams(max_tokens=MAX_RESPONSE, ignore_eos=True)
KEEP = 1
"""vLLM's first level: weights are copied to the host."""


def main(spec: str, model: str, device: str, *options: str) -> None:
    called: set[str] = set()
    if "record" in options:
        sys.setprofile(partial(_record, called))
    if "async" in options:
        # Jobs refuse it on devices; how vllm-ascend takes it is what is asked here.
        engine_module.engine_arguments = _asynchronous
    engine = Engine(json.loads(spec), index=0, model_folder=model, devices=None if device == "npu" else [device])
    engine.start()
    generated = [_generate(engine)]
    if device == "npu":
        core = engine._engine
        free = engine._sleep_controller.memory().device_free_bytes
        core.sleep(level=KEEP)
        slept = engine._sleep_controller.memory().device_free_bytes
        core.wake_up()
        generated.append(_generate(engine))
        released = engine.sleep().released_bytes
        engine.wake_weights()
        core.model_executor.driver_worker.worker.model_runner.reload_weights()
        engine.wake_kv()
        engine.weight_version = 0
        generated.append(_generate(engine))
        sys.setprofile(None)
        if "graphs" in options:
            generated += _written_in_place(engine)
            print(json.dumps(_graphs(core.model_executor.driver_worker.worker)))
        print(json.dumps({"first_level": slept - free, "second_level": released}))
        print(json.dumps(sorted(called)))
    print(json.dumps(generated))
    engine.shutdown(process_ends=True)


def _written_in_place(engine: Engine) -> Iterator[list[tuple[list[int], list[float]]]]:
    """Generate with weights that were written where they are, as a weight sync does, and with them written back."""
    for factor in (0.25, 4.0):
        engine.scale_weights(factor)
        yield _generate(engine)


def _graphs(worker: Any) -> dict[str, object]:
    """Graphs, replays, and how a weight that is put elsewhere, or packed anew, is refused."""
    from graphs import Graph

    held, refused = worker._rljob_graphs, []
    worker._rljob_graphs.begin(iter(()))
    held.check()
    norm = model_of(worker.model_runner).model.norm
    for packed in (["model.layers.0.mlp.experts"], []):
        try:
            held.begin(iter(packed))
        except WeightSyncError as error:
            refused.append(str(error))
        norm.weight.data = norm.weight.data.clone()
    return {"graphs": worker.rljob_captured_graphs(), "replays": Graph.replays, "refused": refused}


def _record(called: set[str], frame: FrameType, event: str, _argument: object) -> None:
    if event == "call" and "vllm_ascend" in frame.f_code.co_filename:
        called.add(frame.f_code.co_qualname.removesuffix(".__init__"))


def _asynchronous(*arguments: Any) -> dict[str, object]:
    return engine_arguments(*arguments) | {"async_scheduling": True}


def _generate(engine: Engine) -> list[tuple[list[int], list[float]]]:
    responses = engine.generate(group_requests(), SAMPLING, 0)
    return [(response.token_ids.tolist(), response.log_probs.tolist()) for response in responses]


if __name__ == "__main__":
    main(*sys.argv[1:])
