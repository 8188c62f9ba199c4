"""Assumptions of a plan, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api import derived
from rljob_api.spec import MemorySaverMode, RLJobSpec, TrainingBackend
from rljob_worker.host.sockets import is_local_name
from rljob_worker.models.facts import ModelFacts
from rljob_worker.models.places import CRITIC_PATH, TEACHER_PATH, folder_here, judge_path
from rljob_worker.planning.engine import GRAPH_BYTES
from rljob_worker.planning.job_shape import ASSUMED_PROMPT_TOKENS
from rljob_worker.planning.memory import PROCESS_BYTES, RAY_BYTES, RUNTIME_BYTES
from rljob_worker.planning.tables import GIB, MemoryPlan


def assumptions(spec: RLJobSpec, model: ModelFacts, plan: MemoryPlan) -> list[str]:
    """The assumptions that matter to this job."""
    lines = [*_of_batch(plan), *_of_models(spec, model)]
    if spec.records.http_port is not None and not is_local_name(spec.records.http_host):
        lines.append(
            f"the driver's HTTP endpoint on {spec.records.http_host} (records.httpHost) may be reached from other "
            "machines; it asks for a token, and is not encrypted"
        )
    if plan.job.kind == "cpu":
        lines += [
            "the KV cache is counted whole, though its pages are taken as they are used",
            "the limit is that of a pod; `rljob run` on this machine has the machine's memory",
        ]
        return lines
    return [*lines, *_of_devices(spec, plan), *_of_sleep(spec, plan)]


def _of_batch(plan: MemoryPlan) -> Iterator[str]:
    yield (
        f"a micro-batch of {plan.batch.tokens} tokens, all samples as long as they may be "
        f"({plan.batch.longest} tokens), logits at {plan.batch.responses} of its positions"
    )
    yield (
        f"each process takes {PROCESS_BYTES[plan.job.kind] / GIB:g} GiB of host memory before its tensors, "
        f"Ray {RAY_BYTES / GIB:g} GiB a node"
    )
    if plan.batch.assumed_prompt:
        yield f"prompts of at most {ASSUMED_PROMPT_TOKENS} tokens: data.maxPromptTokens is not set"


def _of_models(spec: RLJobSpec, model: ModelFacts) -> Iterator[str]:
    """Assumptions about the policy and the models beside it."""
    if spec.model.random is not None and "vocab_size" not in spec.model.random.config:
        yield f"a vocabulary of {model.vocab_size}, the tokenizer's upper bound: it is trained at start-up"
    critic = derived.critic(spec)
    if critic is not None and critic.model is not None and folder_here(critic.model.path, CRITIC_PATH) is None:
        yield "a critic of the policy's size: critic.model.path is not here"
    distill = spec.algorithm.distill
    if distill is not None and folder_here(distill.teacher.path, TEACHER_PATH) is None:
        yield "a teacher of the policy's size: algorithm.distill.teacher.path is not here"
    judge = derived.judge_model(spec)
    if judge is not None and judge.model is not None and folder_here(judge.model.path, judge_path(spec, judge)) is None:
        yield f"a judge of the policy's size: judges: {judge.name}: model.path is not here"
    if any(model.moe_layers):
        yield "tokens spread evenly over the experts"


def _of_devices(spec: RLJobSpec, plan: MemoryPlan) -> Iterator[str]:
    """Assumptions about libraries on devices."""
    kind = plan.job.kind
    yield f"each process takes {RUNTIME_BYTES[kind] / GIB:g} GiB of a device for context, streams and operators"
    yield (
        "activations are those of fused norms, rotary embedding and attention"
        if spec.training.backend is TrainingBackend.MEGATRON
        else "activations are those of transformers' model with torch's attention"
    )
    yield (
        "each device has two staging slots of its own, outside the memory saver"
        if derived.has_slots(spec)
        else "the trainer's weights stay on its device, outside the memory saver, for the engine there to copy from"
    )
    yield (
        f"{'HCCL' if kind == 'npu' else 'NCCL'} holds 2 x {spec.hccl.buffer_size_mb or 200} MiB a communicator "
        "and nothing else"
    )
    if plan.engine.graphs:
        yield (
            f"each captured size of a decoding step takes {GRAPH_BYTES / GIB * 1024:g} MiB, awake and asleep "
            f"({plan.engine.graphs // GRAPH_BYTES} sizes): not measured"
        )


def _of_sleep(spec: RLJobSpec, plan: MemoryPlan) -> Iterator[str]:
    """Assumptions about what leaves the devices, for other processes or between updates."""
    if not derived.divides_devices(spec):
        yield "the trainer's allocator gives its cache back before the engine's weights wake, and loses nothing to gaps"
        but = " but its graphs" if plan.engine.graphs else ""
        yield f"the engine sleeps at level 2: nothing of it goes to the host, and nothing stays on the device{but}"
        if spec.memory_saver.mode is not MemorySaverMode.OFF:
            yield "the memory saver keeps a pinned copy of all that it pauses, awake too"
    if spec.training.optimizer.host_offload:
        part = "" if spec.training.backend is TrainingBackend.MEGATRON else ", and a part of it at a time"
        yield f"with hostOffload the optimizer's state is on the device only while an update is applied{part}"
    if plan.devices[0].limit is None:
        yield "the device's memory is not known: give --device-memory to compare"
