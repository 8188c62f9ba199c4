"""Numbers that follow from a spec."""

from __future__ import annotations

import math

from rljob_api.profiles import PROFILES
from rljob_api.spec import RLJobSpec
from rljob_api.spec.rollout import StalenessSpec


def devices(spec: RLJobSpec) -> int:
    """Devices of the whole job."""
    return spec.resources.nodes * devices_per_node(spec)


def devices_per_node(spec: RLJobSpec) -> int:
    """`resources.devicesPerNode`, or the fewest devices on one node that hold every parallel group."""
    if spec.resources.devices_per_node is not None:
        return spec.resources.devices_per_node
    training = spec.training
    stages = training.pipeline_parallel
    return math.lcm(training.tensor_parallel * stages, training.expert_parallel * stages, spec.rollout.tensor_parallel)


def data_parallel(spec: RLJobSpec) -> int:
    """Model replicas in training."""
    return devices(spec) // (spec.training.tensor_parallel * spec.training.pipeline_parallel)


def engines(spec: RLJobSpec) -> int:
    """Rollout engines."""
    return devices(spec) // spec.rollout.tensor_parallel


def engines_per_node(spec: RLJobSpec) -> int:
    """Rollout engines on each node."""
    return devices_per_node(spec) // spec.rollout.tensor_parallel


def samples_per_step(spec: RLJobSpec) -> int:
    """Responses generated in one step."""
    return spec.rollout.prompts_per_step * spec.rollout.samples_per_prompt


def prompts_at_once(spec: RLJobSpec) -> int:
    """Prompts that are generated together: those of a step, of its first round, or more that may outlast it."""
    oversampling, partial, tail = spec.rollout.oversampling, spec.rollout.partial, spec.rollout.tail
    if partial is not None:
        return prompts_of_round(spec.rollout.prompts_per_step, partial.factor)
    if tail is not None:
        more = prompts_of_round(spec.rollout.prompts_per_step, 1 / (1 - tail.defer_longest))
        return max(more, spec.rollout.prompts_per_step + 1)
    if oversampling is None:
        return spec.rollout.prompts_per_step
    return prompts_of_round(spec.rollout.prompts_per_step, oversampling.factor)


def max_staleness(spec: RLJobSpec) -> int:
    """How many updates older than the weights that are trained a token's may be."""
    if spec.rollout.partial is None:
        return 0
    return (spec.rollout.staleness or StalenessSpec()).max


def prompts_of_round(missing: int, factor: float) -> int:
    """Prompts to draw for so many missing groups."""
    return math.ceil(round(missing * factor, 9))


def updates_per_step(spec: RLJobSpec) -> int:
    """Optimizer updates in one step."""
    return samples_per_step(spec) // (spec.training.global_batch_size or samples_per_step(spec))


def release_process_groups(spec: RLJobSpec) -> bool:
    """Whether sleeping trainers give up their communicators."""
    if spec.memory_saver.release_process_groups is not None:
        return spec.memory_saver.release_process_groups
    return PROFILES[spec.resources.profile].uses_hccl
