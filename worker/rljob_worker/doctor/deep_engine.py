"""The steps of `--deep` that start a small vLLM as a job does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api.roles import engine_variables
from rljob_api.validation import load_manifest
from rljob_worker.devices import get_device
from rljob_worker.doctor.deep import Settings
from rljob_worker.doctor.findings import Finding, not_applicable, ok, problem, warning
from rljob_worker.doctor.units import size
from rljob_worker.errors import UserError
from rljob_worker.types import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from rljob_worker.engine.engine import Engine

_PROFILE = {"npu": "ascend-a2", "cuda": "cuda", "cpu": "cpu"}
_SMALL_JOB = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "doctor"},
    "spec": {
        "steps": 1,
        "model": {
            "random": {
                "config": {
                    "model_type": "qwen3",
                    "hidden_size": 256,
                    "intermediate_size": 512,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "head_dim": 128,
                    "max_position_embeddings": 512,
                }
            }
        },
        "data": {"synthetic": {"task": "RepeatLast", "rows": 64}},
        "reward": {"name": "match"},
        "rollout": {"promptsPerStep": 2, "samplesPerPrompt": 2, "maxResponseTokens": 8},
    },
}
_SAMPLING = SamplingParams(max_tokens=8, ignore_eos=True)


@contextmanager
def _small_engine(profile: str, *settings: str) -> Iterator[Engine]:
    """A started engine of the small job with these settings; it is shut down."""
    from rljob_worker.driver.inputs import MODEL_FOLDER, read_inputs
    from rljob_worker.engine.environment import engine_environment

    spec = load_manifest(_SMALL_JOB, overrides=[f"spec.resources.profile={profile}", *settings]).spec
    for key, value in (engine_environment(spec) | engine_variables(spec)).items():
        os.environ.setdefault(key, value)
    from rljob_worker.engine.engine import Engine

    with tempfile.TemporaryDirectory(prefix="rljob-doctor-") as folder:
        read_inputs(spec, Path(folder))
        small = Engine(
            spec.model_dump(mode="json", by_alias=True),
            index=0,
            model_folder=str(Path(folder) / MODEL_FOLDER),
            devices=[get_device(profile).identity()],
        )
        small.start()
        try:
            yield small
        finally:
            small.shutdown()


def engine(settings: Settings) -> Finding:
    """Start a small vLLM as a job does, let it sleep, and read the device's free memory."""
    name = "engine"
    profile = _PROFILE[settings["kind"]]
    device = get_device(profile)
    with _small_engine(profile) as small:
        small.generate([GenerationRequest((0,), 0)] * 2, _SAMPLING, 0)
        awake = device.memory_info().free
        report = small.sleep()
        asleep = device.memory_info().free
    found = f"{size(report.released_bytes)} given back; free {size(awake)} awake, {size(asleep)} asleep"
    # On the CPU the KV cache has the pages that were used, and others take and give host memory meanwhile.
    on_cpu = settings["kind"] == "cpu"
    wanted = "memory given back" if on_cpu else "more free memory asleep than awake"
    if report.released_bytes > 0 if on_cpu else asleep > awake:
        return ok(name, found, wanted)
    return problem(name, found, wanted, "expandable_segments:False for engines, and an image with vllm_ascend_C built")


def graphs(settings: Settings) -> Finding:
    """Capture decoding steps, sleep and wake, write weights where they are, and write them back; each is replayed."""
    name, wanted = "graphs", "the same after a sleep, and other tokens' log-probabilities with other weights"
    off = "rollout.graphMode: false; `docs/ascend-status.md` has where graphs stand"
    if settings["kind"] == "cpu":
        return not_applicable(name, "nothing is captured on CPU")
    try:
        with _small_engine(_PROFILE[settings["kind"]], "spec.rollout.graphMode=true") as small:
            first = _generated(small)
            small.sleep_with_weights()
            slept = _generated(small)
            small.scale_weights(0.25)
            changed = _generated(small)
            small.scale_weights(4.0)
            restored = _generated(small)
    except UserError as error:
        return warning(name, str(error), wanted, off)
    wrong = [
        what
        for what, holds in (
            ("other log-probabilities after a sleep", slept == first),
            ("weights that were written in place are not seen", changed != first),
            ("other log-probabilities with the first weights again", restored == first),
        )
        if not holds
    ]
    return warning(name, "; ".join(wrong), wanted, off) if wrong else ok(name, "as wanted", wanted)


def _generated(small: Engine) -> list[tuple[list[int], list[float]]]:
    requests = [GenerationRequest((token,), token) for token in range(4)]
    return [
        (response.token_ids.tolist(), response.log_probs.tolist())
        for response in small.generate(requests, _SAMPLING, 0)
    ]
