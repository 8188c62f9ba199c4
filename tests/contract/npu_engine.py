"""An engine of `rljob_worker.engine` in a process of its own: `npu_engine.py SPEC MODEL DEVICE [async] [record]`.

It generates, sleeps and wakes at both of vLLM's levels, and prints a JSON line with what it generated after each; on an
NPU before it the bytes given back, and which of vllm-ascend's functions were called (where they are recorded).
"""

from __future__ import annotations

import json
import sys
from functools import partial
from types import FrameType
from typing import Any

from rollout_models import MAX_RESPONSE, group_requests

from rljob_worker.engine import engine as engine_module
from rljob_worker.engine.arguments import engine_arguments
from rljob_worker.engine.engine import Engine
from rljob_worker.types import SamplingParams

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
        print(json.dumps({"first_level": slept - free, "second_level": released}))
        print(json.dumps(sorted(called)))
    print(json.dumps(generated))
    engine.shutdown(process_ends=True)


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
