"""Numbers that follow from a spec."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rljob_api.algorithms import ALGORITHMS
from rljob_api.profiles import PROFILES
from rljob_api.spec import (
    CriticSpec,
    DataSource,
    DeviceGroupSpec,
    JudgeSpec,
    LoraHandover,
    LoraSpec,
    LrSchedule,
    Mode,
    OptimizerSpec,
    PodResources,
    RLJobSpec,
    TextEnvironmentSpec,
    WeightTransport,
)
from rljob_api.spec.algorithm import RatioAnchor
from rljob_api.spec.rollout import StalenessLimit, StalenessSpec

_MOST_SEQUENCES = 1024


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes that hold the same."""

    name: str
    nodes: int
    devices: int
    """On each node, as all that follows."""
    trainers: int
    """They have the first devices, one each."""
    first_engine_device: int
    """Engines span the devices from this one on."""
    worker: PodResources
    """Each pod of the group, as far as the job says it."""
    judge_devices: int = 0
    """The last ones are a judge's alone."""

    @property
    def worker_field(self) -> str:
        """Field below `spec` that says how large the pods are."""
        own = {TRAINER_GROUP: "resources.trainer.worker", ENGINE_GROUP: "resources.rollout.worker"}
        return own.get(self.name, "resources.worker")

    @property
    def engine_devices(self) -> int:
        """Devices that engines span."""
        return self.devices - self.first_engine_device - self.judge_devices


WORKER_GROUP, TRAINER_GROUP, ENGINE_GROUP = "workers", "trainers", "engines"


def node_groups(spec: RLJobSpec) -> tuple[NodeGroup, ...]:
    """The job's nodes: one group with trainers and engines, or the trainers' and then the engines'."""
    trainers, engine_devices = trainers_per_node(spec), engine_devices_per_node(spec)
    if has_nodes_apart(spec):
        training, serving = (
            (group and group.worker) or spec.resources.worker
            for group in (spec.resources.trainer, spec.resources.rollout)
        )
        return (
            NodeGroup(TRAINER_GROUP, trainer_nodes(spec), trainers, trainers, trainers, training),
            NodeGroup(ENGINE_GROUP, engine_nodes(spec), engine_devices, 0, 0, serving),
        )
    first, judges = trainers if divides_devices(spec) else 0, judge_devices_per_node(spec)
    devices, worker = first + engine_devices + judges, spec.resources.worker
    return (NodeGroup(WORKER_GROUP, spec.resources.nodes, devices, trainers, first, worker, judges),)


def may_lose_engines(spec: RLJobSpec) -> bool:
    """Whether others go on when an engine dies: the loop can, and a new one can get its devices.

    An engine that spans several accelerators gets those of other processes, which are gone with its node.
    """
    alone = spec.rollout.tensor_parallel == 1 or PROFILES[spec.resources.profile].ray_resource is None
    return spec.mode == Mode.ASYNC and has_nodes_apart(spec) and alone


def is_elastic(spec: RLJobSpec) -> bool:
    """Whether the number of nodes with engines may change while the job runs."""
    return spec.resources.rollout is not None and spec.resources.rollout.max_nodes is not None


def node_bounds(spec: RLJobSpec, group: NodeGroup) -> tuple[int, int]:
    """The fewest and the most nodes that a group may have while the job runs."""
    return engine_node_bounds(spec) if group.name == ENGINE_GROUP else (group.nodes, group.nodes)


def engine_node_bounds(spec: RLJobSpec) -> tuple[int, int]:
    """The fewest and the most nodes with engines that there may be while the job runs."""
    rollout = spec.resources.rollout
    if rollout is None or rollout.max_nodes is None:
        return engine_nodes(spec), engine_nodes(spec)
    return rollout.min_nodes or 1, rollout.max_nodes


def has_nodes_apart(spec: RLJobSpec) -> bool:
    """Whether trainers and engines are on different nodes."""
    return divides_devices(spec) and _nodes(spec.resources.trainer) is not None


def has_slots(spec: RLJobSpec) -> bool:
    """Whether weights go through staging slots, and not straight from the trainers' parameters."""
    return spec.weight_sync.transport != WeightTransport.IN_PLACE


def nodes(spec: RLJobSpec) -> int:
    """Nodes of the whole job."""
    return sum(group.nodes for group in node_groups(spec))


def trainer_nodes(spec: RLJobSpec) -> int:
    """Nodes with trainers."""
    return (has_nodes_apart(spec) and _nodes(spec.resources.trainer)) or spec.resources.nodes


def engine_nodes(spec: RLJobSpec) -> int:
    """Nodes with engines."""
    return (has_nodes_apart(spec) and _nodes(spec.resources.rollout)) or spec.resources.nodes


def _nodes(group: DeviceGroupSpec | None) -> int | None:
    return None if group is None else group.nodes


def devices(spec: RLJobSpec) -> int:
    """Devices of the whole job."""
    return sum(group.nodes * group.devices for group in node_groups(spec))


def devices_per_node(spec: RLJobSpec) -> int:
    """Devices on each node, the larger ones where trainers and engines have nodes of their own."""
    return max(group.devices for group in node_groups(spec))


def trainers(spec: RLJobSpec) -> int:
    """Trainers of the whole job, one a device."""
    return trainer_nodes(spec) * trainers_per_node(spec)


def trainers_per_node(spec: RLJobSpec) -> int:
    """Trainers on each node, on its first devices."""
    return _of_group(spec, spec.resources.trainer, _for_training(spec))


def engine_devices_per_node(spec: RLJobSpec) -> int:
    """Devices on each node that engines span."""
    return _of_group(spec, spec.resources.rollout, spec.rollout.tensor_parallel)


def divides_devices(spec: RLJobSpec) -> bool:
    """Whether trainers and engines have devices of their own."""
    return spec.mode != Mode.COLOCATED


def mixes_versions(spec: RLJobSpec) -> bool:
    """Whether tokens of one response may be of several weights."""
    return spec.rollout.partial is not None or (spec.mode == Mode.ASYNC and max_staleness(spec) > 0)


def ratio_anchor(spec: RLJobSpec) -> RatioAnchor:
    """Start of the ratio of the policy loss."""
    if spec.algorithm.anchor is not None:
        return spec.algorithm.anchor
    return RatioAnchor.ROLLOUT if spec.mode == Mode.ASYNC and max_staleness(spec) >= 2 else RatioAnchor.TRAINER


def _of_group(spec: RLJobSpec, group: DeviceGroupSpec | None, fewest: int) -> int:
    """The given number of devices, or the fewest on one node that hold the group's parallel groups, or those of
    both."""
    if divides_devices(spec):
        return (group and group.devices_per_node) or fewest
    return spec.resources.devices_per_node or math.lcm(_for_training(spec), spec.rollout.tensor_parallel)


def _for_training(spec: RLJobSpec) -> int:
    training = spec.training
    stages = training.pipeline_parallel
    shards = (training.fsdp and training.fsdp.shard_size) or 1
    dense = training.tensor_parallel * training.context_parallel
    return math.lcm(dense * stages, training.expert_parallel * stages, shards)


def nodes_of_a_model(spec: RLJobSpec) -> int:
    """Nodes that hold whole copies of the trained model between them: one, where a node has room for a copy."""
    group, per_node = _for_training(spec), trainers_per_node(spec)
    return 1 if per_node >= trainers(spec) else group // math.gcd(per_node, group)


def data_parallel(spec: RLJobSpec) -> int:
    """Parts that the samples of an update are dealt to."""
    training = spec.training
    return trainers(spec) // (training.tensor_parallel * training.pipeline_parallel * training.context_parallel)


def engines(spec: RLJobSpec) -> int:
    """Rollout engines."""
    return engine_nodes(spec) * engines_per_node(spec)


def fewest_engines(spec: RLJobSpec) -> int:
    """Rollout engines where as few nodes have any as the job allows: each has to be able to do this share."""
    return engine_node_bounds(spec)[0] * engines_per_node(spec)


def engines_per_node(spec: RLJobSpec) -> int:
    """Rollout engines on each node that has any."""
    return engine_devices_per_node(spec) // spec.rollout.tensor_parallel


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


def staleness(spec: RLJobSpec) -> StalenessSpec:
    """Return `rollout.staleness`, its defaults where the manifest has none: rules tell the two apart."""
    return spec.rollout.staleness or StalenessSpec()


def max_staleness(spec: RLJobSpec) -> int:
    """Number of updates by which a token's weights may be older than the weights that are trained."""
    if spec.rollout.partial is None and not divides_devices(spec):
        return 0
    return staleness(spec).max


def prompts_open(spec: RLJobSpec) -> int:
    """Prompts whose samples may be open at once: those that are generated together, or that the staleness allows."""
    if spec.mode != Mode.ASYNC:
        return prompts_at_once(spec)
    within_bound = (max_staleness(spec) + 1) * spec.rollout.prompts_per_step
    return min(staleness(spec).in_flight or within_bound, within_bound)


def on_limit(spec: RLJobSpec) -> StalenessLimit:
    """Treatment of groups that reach the bound before they are complete."""
    return staleness(spec).on_limit


def max_sequences(spec: RLJobSpec) -> int:
    """Sequences an engine runs at once: too few of them double the rollout time."""
    if spec.rollout.max_num_seqs is not None:
        return spec.rollout.max_num_seqs
    # A node without an engine is refused by a rule of its own.
    prompts = -(-prompts_at_once(spec) // max(1, fewest_engines(spec)))
    return min(_MOST_SEQUENCES, prompts * spec.rollout.samples_per_prompt)


def prompts_of_round(missing: int, factor: float) -> int:
    """Prompts to draw for so many missing groups."""
    return math.ceil(round(missing * factor, 9))


def updates_per_step(spec: RLJobSpec) -> int:
    """Optimizer updates in one step."""
    return samples_per_step(spec) // (spec.training.global_batch_size or samples_per_step(spec))


def critic(spec: RLJobSpec) -> CriticSpec | None:
    """The model that is trained beside the policy; None where the algorithm needs none."""
    return (spec.critic or CriticSpec()) if ALGORITHMS[spec.algorithm.name].needs_critic else None


def judge_model(spec: RLJobSpec) -> JudgeSpec | None:
    """The judge whose model the job runs itself; None where there is none."""
    return next((judge for judge in spec.judges if judge.model is not None), None)


def judge_devices_per_node(spec: RLJobSpec) -> int:
    """Devices on each node that the judge's model has to itself; 0: it takes turns with trainers and engines."""
    judge = judge_model(spec)
    return (judge is not None and judge.model is not None and judge.model.devices_per_node) or 0


def critic_optimizer(spec: RLJobSpec, critic: CriticSpec) -> OptimizerSpec:
    """The critic's optimizer: its own settings, and the policy's for the rest."""
    own = critic.optimizer.model_dump() | {"schedule": LrSchedule.CONSTANT, "min_lr": 0.0, "decay_steps": None}
    return spec.training.optimizer.model_copy(update=own)


def trains_policy(spec: RLJobSpec, step: int) -> bool:
    """Whether a step, counted from 1, updates the policy: those of the critic's warm-up do not."""
    beside = critic(spec)
    return beside is None or step > beside.warmup_steps


def total_updates(spec: RLJobSpec) -> int:
    """Optimizer updates of the policy in the whole job."""
    beside = critic(spec)
    return (spec.steps - (beside.warmup_steps if beside else 0)) * updates_per_step(spec)


def release_process_groups(spec: RLJobSpec) -> bool:
    """Whether sleeping trainers give up their communicators."""
    if spec.memory_saver.release_process_groups is not None:
        return spec.memory_saver.release_process_groups
    return PROFILES[spec.resources.profile].uses_hccl


def data_sources(spec: RLJobSpec) -> Iterator[tuple[str, DataSource]]:
    """The training data's sources, each with its place below `spec`."""
    if not spec.data.sources:
        yield "data", spec.data
    for index, source in enumerate(spec.data.sources):
        yield f"data.sources[{index}]", source


def held_out_sources(spec: RLJobSpec) -> Iterator[tuple[str, DataSource]]:
    """The data sets of the evaluation, each with its place below `spec`; none without one."""
    if spec.evaluation is None:
        return
    if spec.evaluation.data is not None:
        yield "evaluation.data", spec.evaluation.data
    for index, source in enumerate(spec.evaluation.sets or []):
        yield f"evaluation.sets[{index}]", source


def pictures(spec: RLJobSpec) -> Iterator[str]:
    """The fields by which data have pictures, below `spec`."""
    for sources in (data_sources(spec), held_out_sources(spec)):
        for place, source in sources:
            if source.image_key is not None:
                yield f"{place}.imageKey"
            elif source.synthetic is not None and source.synthetic.task == "NameColor":
                yield f"{place}.synthetic.task"


def environments(spec: RLJobSpec) -> Iterator[tuple[str, TextEnvironmentSpec]]:
    """The environments of training and evaluation, each with its source's place below `spec`."""
    for sources in (data_sources(spec), held_out_sources(spec)):
        yield from ((place, source.environment) for place, source in sources if source.environment is not None)


def is_deterministic(environment: TextEnvironmentSpec) -> bool:
    """Whether an environment of an episode can be made anew by its seed and actions."""
    unknown = environment.python, environment.openenv, environment.tools, environment.agent
    known = all(kind is None for kind in unknown)
    return known if environment.deterministic is None else environment.deterministic


def max_tokens_per_turn(spec: RLJobSpec) -> int:
    """Tokens of an answer at most."""
    own = None if spec.episodes is None else spec.episodes.max_tokens_per_turn
    return spec.rollout.max_response_tokens if own is None else own


def longest_sampled(spec: RLJobSpec) -> int:
    """Tokens that are sampled at most of what is trained on: of a response, or of all answers of an episode."""
    lengths = [spec.rollout.max_response_tokens] if _any_answers_once(spec) else []
    if spec.episodes is not None and _any_environment(spec):
        lengths.append(min(spec.episodes.max_turns * max_tokens_per_turn(spec), spec.episodes.max_tokens))
    # An environment without `episodes` is refused by a rule of its own.
    return max(lengths, default=spec.rollout.max_response_tokens)


def longest_sample(spec: RLJobSpec, prompt: int) -> int:
    """Tokens at most of what is trained on, where prompts outside of episodes have up to so many."""
    lengths = [prompt + spec.rollout.max_response_tokens] if _any_answers_once(spec) else []
    if spec.episodes is not None and _any_environment(spec):
        lengths.append(spec.episodes.max_tokens)
    return max(lengths, default=prompt + spec.rollout.max_response_tokens)


def longest_sequence(spec: RLJobSpec) -> int | None:
    """Tokens of the longest sequence of an engine, in training or evaluation; None: as many as the model takes."""
    prompt = spec.data.max_prompt_tokens
    held_out = [source.environment for _, source in held_out_sources(spec)]
    if None in held_out or (prompt is None and _any_answers_once(spec)):
        return None
    episode = spec.episodes.max_tokens if held_out and spec.episodes is not None else 0
    return max(episode, longest_sample(spec, prompt or 0))


def prompts_have_room(spec: RLJobSpec) -> tuple[str, int]:
    """Field below `spec` and tokens that an engine keeps free beside a prompt."""
    if spec.episodes is None or _any_answers_once(spec):
        return "rollout.maxResponseTokens", spec.rollout.max_response_tokens
    return "episodes.maxTokensPerTurn", max_tokens_per_turn(spec)


def _any_answers_once(spec: RLJobSpec) -> bool:
    return any(source.environment is None for _, source in data_sources(spec))


def _any_environment(spec: RLJobSpec) -> bool:
    return any(source.environment is not None for _, source in data_sources(spec))


def adapters_apart(spec: RLJobSpec) -> LoraSpec | None:
    """The job's adapters where engines have them beside the model's weights; None: engines have weights alone."""
    lora = spec.training.lora
    return lora if lora is not None and lora.handover == LoraHandover.ADAPTERS else None
