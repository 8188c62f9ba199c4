"""Figures that need a GPU, in less than 4 minutes on one: the hand-over, graphs, attention over rows.

    python benchmarks/on_gpu.py [--layers 36] [--minutes 4]

- Attention of a row of samples of skewed length, forward and backward, against the same samples padded to a rectangle.
- The verified hand-over of a model of Qwen3-4B's shapes from a trainer's process to a vLLM engine in another, through
  two slots and straight from the trainer's parameters, against one copy of the same bytes on the device.
- Tokens a second of an engine with graphs against one without: each sleeps, wakes, takes weights in place and then
  generates what is timed.

What would begin after the given minutes is left out and named, and the exit code is 1. On a machine without a GPU it
says so and ends with 2. It has not run on a device yet.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from figures import Figure, report

from rljob_api.spec import RLJobSpec
from rljob_api.validation import load_manifest
from rljob_worker.devices import Device, get_device
from rljob_worker.errors import UserError
from rljob_worker.trainer.packed_attention import attend_on_cpu, attend_on_cuda

ATTENTION_LIMIT, SLOTS_LIMIT, STRAIGHT_LIMIT, GRAPHS_LIMIT = 1.1, 0.4, 0.7, 1.15
DEADLINE = 60.0
PROMPT, RESPONSE, SEQUENCES = 64, 192, 32
SLOTS, STRAIGHT = "slots", "straight"


class Budget:
    """The time that there is; a part that would begin too late is left out."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._end = now, now() + seconds
        self.left_out: list[str] = []

    def has(self, what: str, seconds: float) -> bool:
        """Whether a part that takes so long may begin."""
        fits = self._now() + seconds <= self._end
        if not fits:
            self.left_out.append(what)
        return fits


# --- attention


def skewed_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths of log-normal samples, whose longest has `longest` tokens."""
    draw = random.Random(seed)
    lengths = [math.exp(draw.gauss(0.0, 0.8)) for _ in range(count)]
    return [max(16, int(longest * length / max(lengths))) for length in lengths]


def bounds_of(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def padded_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Sequence[int]
) -> torch.Tensor:
    """Context of a row [T, H, D] by torch's kernel over a rectangle, each sample padded to the longest."""
    lengths = [end - begin for begin, end in pairwise(bounds)]
    queries, keys, values = (
        torch.nn.utils.rnn.pad_sequence(list(tensor.split(lengths)), batch_first=True).transpose(1, 2)
        for tensor in (query, key, value)
    )
    grouped = query.shape[1] != key.shape[1]
    context = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
    return torch.cat([sample[:, :length].transpose(0, 1) for sample, length in zip(context, lengths, strict=True)])


def packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
    attend = attend_on_cuda if query.is_cuda else attend_on_cpu
    return attend(query, key, value, bounds, query.shape[-1] ** -0.5)


def row_of(lengths: Sequence[int], heads: int, groups: int, width: int, device: torch.device) -> list[torch.Tensor]:
    """Query, key and value of a row, whose gradients are asked for."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    return [
        torch.randn(sum(lengths), count, width, device=device, dtype=dtype).requires_grad_()
        for count in (heads, groups, groups)
    ]


def attention(device: Device, repeats: int = 10) -> Figure:
    """A layer's attention of Qwen3-4B over 16 samples."""
    lengths = skewed_lengths(16, 4096)
    inputs, bounds = row_of(lengths, 32, 8, 128, device.torch_device), bounds_of(lengths)

    def seconds(attend: Callable[..., torch.Tensor]) -> float:
        times = []
        for _ in range(repeats + 2):
            device.synchronize()
            started = time.perf_counter()
            attend(*inputs, bounds).sum().backward()
            device.synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times[2:])

    rows, rectangle = seconds(packed), seconds(padded_attention)
    note = f"{rows * 1e3:.2f} ms against {rectangle * 1e3:.2f}, {sum(lengths)} tokens of {16 * max(lengths)}"
    return Figure(
        "attention of a row of 16 skewed samples, forward and backward", "padded", rectangle / rows, ATTENTION_LIMIT,
        note=note,
    )  # fmt: skip


# --- a trainer here, an engine in another process


def model_config(layers: int) -> dict[str, object]:
    """Qwen3-4B's config, with so many layers."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 1024,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def job(folder: str, *, graphs: bool) -> RLJobSpec:
    """The job whose engine is measured."""
    document = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "on-gpu"},
        "spec": {
            "steps": 1,
            "model": {"path": folder},
            "data": {"synthetic": {"task": "RepeatLast", "symbols": 13, "promptSymbols": 4, "answerSymbols": 4}},
            "reward": {"name": "match"},
            "rollout": {
                "promptsPerStep": SEQUENCES // 2,
                "samplesPerPrompt": 2,
                "maxResponseTokens": RESPONSE,
                "graphMode": graphs,
                "memoryFraction": 0.3,
                "kvCacheBytes": 4 * 2**30,
                "prefixCaching": False,
            },
            "resources": {"profile": "cuda", "devicesPerNode": 1},
        },
    }
    return load_manifest(document).spec


def engine_process(folder: str, graphs: bool, pipe: Connection) -> None:
    """A vLLM engine as a job has it; answers commands."""
    from rljob_worker.engine.arguments import engine_arguments
    from rljob_worker.engine.environment import engine_environment
    from rljob_worker.engine.platforms import engine_platform

    spec = job(folder, graphs=graphs)
    os.environ |= engine_environment(spec)
    engine_platform("cuda").prepare()
    from vllm import LLM, SamplingParams, TokensPrompt

    from rljob_worker.engine.sleep_controller import DeviceSleepController
    from rljob_worker.weightsync.engine import WeightSyncEngine
    from rljob_worker.weightsync.routes import route_from

    arguments: dict[str, Any] = engine_arguments(spec, folder) | {"load_format": "dummy"}
    llm = LLM(**arguments)
    controller = DeviceSleepController(llm.llm_engine, lambda: None)
    if graphs:
        controller.check_graphs()
    receivers: dict[str, WeightSyncEngine] = {}

    def land(method: Callable[..., Any], message: Any, seconds: float) -> list[Any]:
        return list(llm.collective_rpc(method.__name__, timeout=seconds, args=(message,)))

    def receive(route: str, version: int) -> None:
        if route not in receivers:
            receivers[route] = WeightSyncEngine(land, route=route_from(route), engine=0)
        receivers[route].update_weights(version, DEADLINE)

    def generate() -> float:
        sampling = SamplingParams(max_tokens=RESPONSE, temperature=0, ignore_eos=True, detokenize=False)
        prompts = [TokensPrompt(prompt_token_ids=[7 * i + place for place in range(PROMPT)]) for i in range(SEQUENCES)]
        started = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - started

    commands: dict[str, Callable[..., object]] = {
        "receive": receive,
        "generate": generate,
        "sleep": controller.sleep,
        "wake_weights": controller.wake_weights,
        "wake_kv": controller.wake_kv,
    }
    pipe.send(None)
    while (command := pipe.recv()) is not None:
        name, *arguments = command
        found = commands[name](*arguments)
        pipe.send(found if isinstance(found, float) else None)
    for receiver in receivers.values():
        receiver.close()


@contextmanager
def engine(folder: str, *, graphs: bool) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=engine_process, args=(folder, graphs, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield ours
        ours.send(None)
        process.join(30)
    finally:
        if process.is_alive():
            process.kill()
        ours.close()


class TrainerSide:
    """A trainer's parameters on the device, and its ends of both routes."""

    def __init__(self, model: str, folders: dict[str, str], device: Device) -> None:
        from weight_sync import shapes_of

        from rljob_worker.models.config import ModelConfig
        from rljob_worker.models.manifest import hf_manifest
        from rljob_worker.parallel_layout import ParallelLayout
        from rljob_worker.trainer.megatron.models.convert import local_pieces
        from rljob_worker.weightsync.device_ipc import Exchange
        from rljob_worker.weightsync.plan import build_plan
        from rljob_worker.weightsync.routes import HostRoute, InPlaceRoute
        from rljob_worker.weightsync.trainer import WeightSyncTrainer

        config = ModelConfig.from_hf(model)
        shapes = shapes_of(config)
        # As Megatron has them: one flat buffer.
        flat = torch.empty(sum(map(math.prod, shapes.values())), dtype=torch.bfloat16, device=device.torch_device)
        parts = flat.normal_(0.0, 0.02).split([math.prod(shape) for shape in shapes.values()])
        pieces = local_pieces(
            {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)},
            config,
            ParallelLayout(),
        )
        plan = build_plan(hf_manifest(config), {0: pieces}, dtype=torch.bfloat16, engines=1, bucket_bytes=512 * 2**20)
        self.flat, self.nbytes = flat, plan.nbytes
        self.routes = {SLOTS: HostRoute(folders[SLOTS]), STRAIGHT: InPlaceRoute(folders[STRAIGHT])}

        def allocate(nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)

        self._senders = {
            way: WeightSyncTrainer(pieces, plan, trainer=0, route=route, exchange=Exchange(device, [0], allocate))
            for way, route in self.routes.items()
        }
        self._version = 0

    def hand_over(self, way: str, pipe: Connection) -> float:
        """Seconds of a sync."""
        self._version += 1
        started = time.perf_counter()
        pipe.send(("receive", self.routes[way].to_json(), self._version))
        self._senders[way].update_weights(self._version, DEADLINE)
        pipe.recv()
        return time.perf_counter() - started

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()


def copy_seconds(device: Device, flat: torch.Tensor, repeats: int = 5) -> float:
    """Median of one copy of the bytes on the device."""
    other, times = torch.empty_like(flat), []
    for _ in range(repeats + 1):
        device.synchronize()
        started = time.perf_counter()
        other.copy_(flat)
        device.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def hand_overs(device: Device, trainer: TrainerSide, pipe: Connection, repeats: int = 8) -> list[Figure]:
    """Both ways by turns; the first of each finds what goes where."""
    times: dict[str, list[float]] = {SLOTS: [], STRAIGHT: []}
    for _ in range(repeats + 1):
        for way, found in times.items():
            found.append(trainer.hand_over(way, pipe))
    copy = copy_seconds(device, trainer.flat)
    figures = []
    for way, limit in ((SLOTS, SLOTS_LIMIT), (STRAIGHT, STRAIGHT_LIMIT)):
        took = statistics.median(times[way][1:])
        what = f"verified hand-over of {trainer.nbytes / 1e9:.1f} GB by IPC, {way}"
        note = f"{took * 1e3:.1f} ms against {copy * 1e3:.1f}"
        figures.append(Figure(what, "a copy on the device", copy / took, limit, note=note))
    return figures


def told(pipe: Connection, *command: object) -> float | None:
    """The engine's answer."""
    pipe.send(command)
    answer: float | None = pipe.recv()
    return answer


def generating(trainer: TrainerSide, pipe: Connection) -> float:
    """Seconds of generating, after a sleep and new weights that landed in place."""
    told(pipe, "generate")
    times = []
    for _ in range(2):
        told(pipe, "sleep")
        told(pipe, "wake_weights")
        trainer.hand_over(SLOTS, pipe)
        told(pipe, "wake_kv")
        took = told(pipe, "generate")
        assert took is not None
        times.append(took)
    return min(times)


def with_engines(device: Device, layers: int, budget: Budget) -> Iterator[Figure]:
    """The hand-over and the graphs."""
    with tempfile.TemporaryDirectory(prefix="rljob-") as root:
        folders = {name: str(Path(root, name)) for name in ("model", "eager", "graphs")}
        for name in ("model", *(f"{side}/{way}" for side in ("eager", "graphs") for way in (SLOTS, STRAIGHT))):
            Path(root, name).mkdir(parents=True)
        Path(root, "model", "config.json").write_text(json.dumps(model_config(layers)))
        seconds = {}
        for side, needed in (("eager", 90.0), ("graphs", 100.0)):
            what = "hand-over, and generation without graphs" if side == "eager" else "generation with graphs"
            if not budget.has(what, needed):
                return
            ways = {way: f"{folders[side]}/{way}" for way in (SLOTS, STRAIGHT)}
            trainer = TrainerSide(folders["model"], ways, device)
            with engine(folders["model"], graphs=side == "graphs") as pipe:
                if side == "eager":
                    yield from hand_overs(device, trainer, pipe)
                seconds[side] = generating(trainer, pipe)
            trainer.close()
        note = f"{SEQUENCES * RESPONSE / seconds['graphs']:.0f} against {SEQUENCES * RESPONSE / seconds['eager']:.0f}"
        yield Figure(
            f"rollout tokens/s with graphs, {SEQUENCES} sequences, after a sleep and new weights",
            "without graphs",
            seconds["eager"] / seconds["graphs"],
            GRAPHS_LIMIT,
            note=note,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36, help="of the model (default 36)")
    parser.add_argument("--minutes", type=float, default=4.0, help="in which it is to be over (default 4)")
    options = parser.parse_args(arguments)
    try:
        device = get_device("cuda")
    except UserError as error:
        print(f"on_gpu.py needs an NVIDIA GPU: {error}", file=sys.stderr)
        return 2
    device.set_current()
    budget = Budget(options.minutes * 60)
    figures = [attention(device), *with_engines(device, options.layers, budget)]
    status = report(figures)
    for what in budget.left_out:
        print(f"left out, for lack of time: {what}")
    return 1 if budget.left_out else status


if __name__ == "__main__":
    sys.exit(main())
