"""Each rule between fields: its CEL and its local check refuse the same manifests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manifests import manifest
from schema_evaluator import admit, broken_rules, compile_rule

from rljob_api.algorithms import ALGORITHMS, AlgorithmFacts
from rljob_api.blocks import path_text
from rljob_api.rules import RULES, Rule
from rljob_api.rules.algorithms import algorithm_rules, group_size_rule
from rljob_api.spec import Profile
from rljob_api.spec.rollout import RESERVED_ENGINE_ARGS
from rljob_api.validation import ManifestError, load_manifest

WITHOUT_EFFECT = {
    "clip_low": "clipLow=0.1",
    "clip_high": "clipHigh=0.5",
    "dual_clip": "dualClip=3",
    "normalize_by_std": "normalizeByStd=true",
    "sapo": "sapo.tauPositive=2",
}

# What is refused: settings over the design's example, and the paths that are blamed.
DIVIDED = ["mode=Disaggregated", "resources={profile: cpu}"]
"""Mode Disaggregated, with the fewest devices for each group."""
APART = ["mode=Async", "resources={profile: cpu}"]
NODES_APART = [*APART, "resources.trainer={nodes: 1}", "resources.rollout={nodes: 1}", "network.hostNetwork=true"]
ELASTIC = [*APART, "resources.trainer={nodes: 1}", "resources.rollout={nodes: 2, minNodes: 1, maxNodes: 4}"]
"""Mode Async, with engines that may come and go."""
NPU = ["resources.profile=ascend-a2"]
GRAPHS = [*NPU, "rollout.graphMode=true"]
ALONE = [
    "resources={profile: cpu, devicesPerNode: 1}", "training={tensorParallel: 1}", "rollout.tensorParallel=1",
]  # fmt: skip
"""One trainer and one engine."""
EPISODES = ["data={seeds: {count: 8}, environment: {name: FrozenLake}}", "reward={name: environment}",
            "rollout.maxResponseTokens=64", "episodes={maxTurns: 4, maxTokens: 512}"]  # fmt: skip
GYMNASIUM = [*EPISODES, "data={seeds: {count: 8}, environment: {gymnasium: {id: 'mine:Text-v0'}}}"]
"""An environment that takes every text."""
LAKE = ["data={seeds: {count: 8}, environment: {name: FrozenLake}}", "reward={name: environment}"]
"""Data that is an environment."""
PPO = [*ALONE, "algorithm={name: ppo}", "training={backend: FSDP}", "rollout.samplesPerPrompt=1"]
TOOLS = ["data={path: /a.jsonl, applyChatTemplate: true, environment: {tools: [{python: 'm:f'}]}}",
         "rollout.maxResponseTokens=64", "episodes={maxTurns: 4, maxTokens: 512, toolParser: hermes}"]  # fmt: skip
AGENT = ["data={path: /a.jsonl, applyChatTemplate: true, environment: {agent: {python: 'm:f'}}}",
         "rollout.maxResponseTokens=64", "episodes={maxTurns: 4, maxTokens: 512}"]  # fmt: skip
DISTILL = ["algorithm={name: distill, distill: {teacher: {path: a/b}}}"]
TEACHER = ["algorithm.distill={teacher: {path: a/b}}"]
JUDGE = ["reward={name: judge}", "judges=[{name: a, kind: Score, model: {path: /models/score}}]"]
JUDGE_APART = [JUDGE[0], "judges=[{name: a, kind: Score, model: {path: /models/score, devicesPerNode: 1}}]"]
REFUSED: list[tuple[list[str], list[str]]] = [
    (["reward={name: judge}", "judges=[{name: a}]"], ["spec.judges[0]"]),
    (
        ["reward={name: judge}", "judges=[{name: a, kind: Score, endpoint: {url: 'http://j:1/v1', model: m}}]"],
        ["spec.judges[0].kind"],
    ),
    (
        [
            "reward={name: judge, args: {judge: a}}",
            "judges=[{name: a, kind: Score, model: {path: /a}}, {name: b, kind: Score, model: {path: /b}}]",
        ],
        ["spec.judges", "spec.judges[1]"],
    ),
    ([*JUDGE, "rollout.oversampling={factor: 1.5, filter: ZeroVariance}"], ["spec.rollout.oversampling"]),
    ([*JUDGE, "rollout.partial={}"], ["spec.rollout.partial"]),
    ([*JUDGE, "rollout.tail={}"], ["spec.rollout.tail"]),
    ([*JUDGE, *APART], ["spec.mode"]),
    ([*JUDGE_APART, *APART], ["spec.mode"]),
    (
        [
            *JUDGE_APART,
            "resources={profile: ascend-a2, devicesPerNode: 1, tuning: {cpuAffinity: '2'}}",
            "rollout.tensorParallel=1",
            "training.tensorParallel=1",
        ],
        ["spec.resources.tuning.cpuAffinity"],
    ),
    (["algorithm={name: distill}"], ["spec.algorithm.distill"]),
    (TEACHER, ["spec.algorithm.distill"]),
    ([*DISTILL, "algorithm.distill.topK=8"], ["spec.algorithm.distill.topK"]),
    ([*DISTILL, "algorithm.kl.coefficient=0.1"], ["spec.algorithm.kl.coefficient"]),
    ([*DISTILL, "rollout.topP=0.9"], ["spec.rollout.topP"]),
    ([*DISTILL, "rollout.topK=20"], ["spec.rollout.topK"]),
    ([*DISTILL, "rollout.minP=0.1"], ["spec.rollout.minP"]),
    ([*DISTILL, "critic={warmupSteps: 1}"], ["spec.critic"]),
    ([*DISTILL, "rollout.oversampling.filter=ZeroVariance"], ["spec.rollout.oversampling.filter"]),
    (
        [*DISTILL, "algorithm.distill.rewardWeight=1", "rollout.samplesPerPrompt=1", "training.globalBatchSize=null"],
        ["spec.rollout.samplesPerPrompt"],
    ),
    ([*PPO, "rollout.promptsPerStep=6"], ["spec.critic.updatesPerStep"]),
    ([*PPO, "critic.updatesPerStep=5"], ["spec.critic.updatesPerStep"]),
    ([*PPO, "critic={warmupSteps: 5}", "steps=5"], ["spec.critic.warmupSteps"]),
    (["critic={warmupSteps: 1}"], ["spec.critic"]),
    (["algorithm.gae={lambda: 0.9}"], ["spec.algorithm.gae"]),
    (["algorithm={name: rloo, gae: {}}"], ["spec.algorithm.gae"]),
    ([*TOOLS, "data.applyChatTemplate=false"], ["spec.data.applyChatTemplate"]),
    ([*TOOLS, "episodes={maxTurns: 4, maxTokens: 512}"], ["spec.episodes.toolParser"]),
    ([*EPISODES, "episodes.toolParser=hermes"], ["spec.episodes.toolParser"]),
    ([*AGENT, "data.applyChatTemplate=false"], ["spec.data.applyChatTemplate"]),
    ([*AGENT, "episodes.pace=Free"], ["spec.episodes.pace"]),
    ([*AGENT, *PPO], ["spec.algorithm.name"]),
    ([*AGENT, "resources.profile=cuda", "rollout.routerReplay=true"], ["spec.rollout.routerReplay"]),
    ([*TOOLS, "data.environment={tools: [{}]}"], ["spec.data.environment.tools[0]"]),
    ([*TOOLS, "data.environment={tools: [{python: 'm:f', mcp: {command: [a]}}]}"], ["spec.data.environment.tools[0]"]),
    ([*TOOLS, "episodes.maxTurns=1"], ["spec.episodes.maxTurns"]),
    ([*GYMNASIUM, "data.environment.gymnasium.form=Answer"], ["spec.data.environment.gymnasium.form"]),
    ([*GYMNASIUM, "data.environment.gymnasium.formatPenalty=-1"], ["spec.data.environment.gymnasium.formatPenalty"]),
    ([*EPISODES, "episodes.maxTokensPerTurn=65"], ["spec.episodes.maxTokensPerTurn"]),
    ([*EPISODES, "episodes.maxTokens=64"], ["spec.episodes.maxTokens"]),
    ([*EPISODES, "episodes.maxTokensPerTurn=8", "episodes.maxTokens=8"], ["spec.episodes.maxTokens"]),
    ([*EPISODES, "episodes.onError=Fail", "episodes.errorReward=-1"], ["spec.episodes.errorReward"]),
    ([*EPISODES, "episodes.pace=Free", "episodes.maxTurns=1"], ["spec.episodes.pace"]),
    ([*EPISODES, "rollout.partial={}"], ["spec.rollout.partial"]),
    ([*EPISODES, "rollout.tail={}"], ["spec.rollout.tail"]),
    (LAKE, ["spec.episodes"]),
    (["episodes={maxTurns: 4, maxTokens: 9000}"], ["spec.episodes"]),
    (["data={seeds: {count: 8}}"], ["spec.data.environment", "spec.reward.name"]),
    (["data.environment={name: Sokoban}"], ["spec.data.environment", "spec.episodes"]),
    (
        [*EPISODES, "data.environment.python=./game.py:Game"],
        ["spec.data.environment"],
    ),
    (["mode=Disaggregated", "resources={profile: cpu, devicesPerNode: 4}"], ["spec.resources.devicesPerNode"]),
    (["mode=Disaggregated", "resources={profile: cpu, nodes: 2}"], ["spec.resources.nodes"]),
    (["mode=Async", "resources={profile: cpu, devicesPerNode: 4}"], ["spec.resources.devicesPerNode"]),
    ([*APART, "resources.trainer={devicesPerNode: 3}"], ["spec.training.tensorParallel"]),
    ([*APART, "resources.rollout.devicesPerNode=3"], ["spec.rollout.tensorParallel"]),
    ([*APART, "rollout.partial={}"], ["spec.rollout.partial"]),
    ([*APART, "rollout.tail={}"], ["spec.rollout.tail"]),
    ([*APART, "rollout.oversampling.filter=ZeroVariance"], ["spec.rollout.oversampling"]),
    ([*APART, "rollout.assignment=WhenFree"], ["spec.rollout.assignment"]),
    ([*APART, "algorithm.tis.enabled=false"], ["spec.algorithm.tis.enabled"]),
    ([*APART, "algorithm.tis={enabled: true, level: Sequence}"], ["spec.algorithm.tis.level"]),
    ([*APART, "rollout.staleness.max=2", "algorithm.tis.enabled=false"], ["spec.algorithm.tis"]),
    ([*APART, "rollout.staleness.max=2", "algorithm.tis={outside: Mask, low: 0.5}"], ["spec.algorithm.tis"]),
    (
        [*APART, "rollout.staleness.max=2", "algorithm.anchor=Trainer", "algorithm.tis={level: Sequence}"],
        ["spec.algorithm.tis.level"],
    ),
    (
        [*APART, "rollout.staleness.max=2", "algorithm.anchor=Trainer", "algorithm.tis.enabled=false"],
        ["spec.algorithm.tis.enabled"],
    ),
    (["algorithm.anchor=Rollout", "algorithm.tis.high=3"], ["spec.algorithm.tis"]),
    ([*DIVIDED, "rollout.staleness.order=ReadyFirst"], ["spec.rollout.staleness.order"]),
    ([*DIVIDED, "rollout.staleness.inFlight=64"], ["spec.rollout.staleness.inFlight"]),
    ([*APART, "rollout.staleness.inFlight=3"], ["spec.rollout.staleness.inFlight"]),
    ([*APART, "rollout.staleness={max: 1, inFlight: 4097}"], ["spec.rollout.staleness.inFlight"]),
    ([*APART, "rollout.staleness.onLimit=Mask"], ["spec.rollout.staleness.onLimit"]),
    ([*APART, "rollout.staleness.onLimit=Discard"], ["spec.rollout.staleness.onLimit"]),
    ([*DIVIDED, "rollout.staleness.onLimit=Mask"], ["spec.rollout.staleness.onLimit"]),
    ([*DIVIDED, "resources.trainer={devicesPerNode: 3}"], ["spec.training.tensorParallel"]),
    ([*DIVIDED, "resources.rollout.devicesPerNode=3"], ["spec.rollout.tensorParallel"]),
    (
        [*DIVIDED, "resources.trainer.devicesPerNode=12", "training.globalBatchSize=64"],
        ["spec.training.globalBatchSize"],
    ),
    ([*DIVIDED, "resources.trainer.nodes=2"], ["spec.resources.rollout.nodes"]),
    ([*DIVIDED, "resources.rollout.nodes=2"], ["spec.resources.rollout.nodes"]),
    ([*ELASTIC, "mode=Disaggregated"], ["spec.resources.rollout.maxNodes"]),
    ([*ELASTIC, "resources.rollout.maxNodes=1"], ["spec.resources.rollout.nodes"]),
    ([*ELASTIC, "resources.rollout.minNodes=3"], ["spec.resources.rollout.nodes"]),
    (
        [*ELASTIC, "resources.rollout.maxNodes=null", "resources.rollout.minNodes=1"],
        ["spec.resources.rollout.minNodes"],
    ),
    ([*ELASTIC, "resources.trainer.maxNodes=2"], ["spec.resources.trainer.maxNodes"]),
    ([*ELASTIC, "scheduling.system=Volcano"], ["spec.resources.rollout.maxNodes"]),
    (
        [*ELASTIC, "resources.profile=ascend-a2", "rollout.tensorParallel=2", "resources.rollout.devicesPerNode=2"],
        ["spec.resources.rollout.maxNodes"],
    ),
    ([*DIVIDED, "resources.trainer={worker: {memory: 9Gi}}"], ["spec.resources.trainer.worker"]),
    ([*DIVIDED, "rollout.partial={}"], ["spec.rollout.partial"]),
    (["weightSync.transport=Disk"], ["spec.weightSync.transport"]),
    ([*DIVIDED, "rollout.oversampling.filter=ZeroVariance"], ["spec.rollout.oversampling"]),
    ([*DIVIDED, "rollout.staleness.max=2"], ["spec.rollout.staleness.max"]),
    ([*DIVIDED, "algorithm.tis.enabled=false"], ["spec.algorithm.tis.enabled"]),
    (["resources.trainer={}"], ["spec.resources.trainer"]),
    (["resources.rollout.devicesPerNode=2"], ["spec.resources.rollout"]),
    (["rollout.partial.factor=1.5", "rollout.staleness.max=0"], ["spec.rollout.staleness.max"]),
    (["algorithm.name=dapo"], ["spec.rollout.oversampling"]),
    (["algorithm.name=dapo", "rollout.oversampling.function=f.g:h"], ["spec.rollout.oversampling"]),
    (["rollout.oversampling.limit=3"], ["spec.rollout.oversampling.filter"]),
    (
        [
            "rollout.samplesPerPrompt=1",
            "training.globalBatchSize=null",
            "algorithm.name=reinforce",
            "rollout.oversampling.filter=ZeroVariance",
        ],
        ["spec.rollout.oversampling.filter"],
    ),
    (["rollout.staleness.max=2"], ["spec.rollout.staleness"]),
    (["rollout.partial.factor=2.5"], ["spec.rollout.partial.factor"]),
    (["rollout.partial.factor=4.5", "rollout.staleness.max=3"], ["spec.rollout.partial.factor"]),
    (["rollout.partial={}", "rollout.assignment=WhenFree"], ["spec.rollout.assignment"]),
    (
        ["rollout.partial={}", "rollout.oversampling={filter: ZeroVariance, factor: 1.5}"],
        ["spec.rollout.oversampling.factor"],
    ),
    (["rollout.tail={}", "rollout.partial={}"], ["spec.rollout.tail"]),
    (["rollout.tail.deferLongest=0.51"], ["spec.rollout.tail.deferLongest"]),
    (["rollout.tail={}", "rollout.assignment=WhenFree"], ["spec.rollout.assignment"]),
    (
        ["rollout.tail={}", "rollout.oversampling={filter: ZeroVariance, factor: 1.5}"],
        ["spec.rollout.oversampling.factor"],
    ),
    (["rollout.partial={}", "algorithm.tis.enabled=false"], ["spec.algorithm.tis"]),
    (["rollout.partial={}", "algorithm.tis.level=Sequence"], ["spec.algorithm.tis"]),
    (["rollout.speculative={minMatch: 5}"], ["spec.rollout.speculative.minMatch"]),
    (["rollout.speculative={}", "rollout.minP=0.1"], ["spec.rollout.minP"]),
    (["rollout.engineArgs.speculative_config=ngram"], ["spec.rollout.engineArgs.speculative_config"]),
    (["rollout.temperature=0.001"], ["spec.rollout.temperature"]),
    (["training.backend=FSDP"], ["spec.training.tensorParallel"]),
    (["training={backend: FSDP, pipelineParallel: 2}"], ["spec.training.pipelineParallel"]),
    (["training={backend: FSDP, expertParallel: 2}"], ["spec.training.expertParallel"]),
    (["training={backend: FSDP, recompute: Selective}"], ["spec.training.recompute"]),
    (["training={backend: FSDP, fsdp: {shardSize: 3}}"], ["spec.training.fsdp.shardSize"]),
    (["training={backend: FSDP}", "rollout.routerReplay=true"], ["spec.rollout.routerReplay"]),
    (["training.fsdp={}"], ["spec.training.fsdp"]),
    (["training.lora={}"], ["spec.training.lora"]),
    (["training={backend: FSDP, lora: {handover: Adapters}}"], ["spec.training.lora.handover"]),
    (["data.imageKey=images"], ["spec.training.backend"]),
    (
        [*APART, "data.imageKey=images", "training={backend: FSDP, lora: {rank: 8, handover: Adapters}}"],
        ["spec.training.lora.handover"],
    ),
    (["data.imageKey=images", "training={backend: FSDP, contextParallel: 2}"], ["spec.training.contextParallel"]),
    (["data.imageKey=images", "training={backend: FSDP}", "algorithm={name: ppo}"], ["spec.algorithm.name"]),
    (["data.imageKey=images", "training={backend: FSDP}", *DISTILL], ["spec.algorithm.name"]),
    (["data={synthetic: {task: Copy}, imageKey: images}", "training={backend: FSDP}"], ["spec.data.imageKey"]),
    ([*TOOLS, "data.imageKey=images", "training={backend: FSDP}"], ["spec.data.imageKey"]),
    (
        [*TOOLS, "data.path=null", "data.synthetic={task: NameColor}", "training={backend: FSDP}"],
        ["spec.data.environment"],
    ),
    (["data={synthetic: {task: NameColor, symbols: 14}}", "training={backend: FSDP}"], ["spec.data.synthetic.symbols"]),
    (
        [*APART, "training={backend: FSDP, lora: {rank: 12, handover: Adapters}}"],
        ["spec.training.lora.rank"],
    ),
    (["training.tensorParallel=3"], ["spec.training.tensorParallel"]),
    (["training.pipelineParallel=8"], ["spec.training.tensorParallel"]),
    (["rollout.tensorParallel=3"], ["spec.rollout.tensorParallel"]),
    (["resources.nodes=2", "rollout.tensorParallel=16"], ["spec.rollout.tensorParallel"]),
    (["training.globalBatchSize=100"], ["spec.training.globalBatchSize"]),
    (["training.globalBatchSize=2"], ["spec.training.globalBatchSize"]),
    (
        ["training.globalBatchSize=null", "rollout.promptsPerStep=3", "rollout.samplesPerPrompt=3"],
        ["spec.training.globalBatchSize"],
    ),
    (["training.expertParallel=3"], ["spec.training.expertParallel"]),
    (["training.contextParallel=3"], ["spec.training.contextParallel"]),
    (["training.contextParallel=8"], ["spec.training.contextParallel"]),
    (["training.contextParallel=2", "training.globalBatchSize=1"], ["spec.training.globalBatchSize"]),
    (["model.random.config={model_type: qwen3}"], ["spec.model"]),
    (["model.path=null"], ["spec.model"]),
    (["model.path=null", "model.random.config={model_type: qwen3}", "model.revision=main"], ["spec.model.revision"]),
    (["data.synthetic={}"], ["spec.data"]),
    (["data.path=null"], ["spec.data"]),
    (["data.sources[0].path=a.jsonl", "data.applyChatTemplate=null"], ["spec.data"]),
    (
        [
            "data.path=null",
            "data.applyChatTemplate=null",
            "data.sources=[{path: a, name: x}, {path: b, name: x}, {path: c}]",
        ],
        ["spec.data.sources"],
    ),
    (
        ["data.path=null", "data.applyChatTemplate=null", "data.sources=[{path: a}, {name: b}]"],
        ["spec.data.sources[1]"],
    ),
    (["data={sources: [{path: a, weight: 2, weights: [{from: 0, value: 1}]}]}"], ["spec.data.sources[0].weights"]),
    (
        ["data={sources: [{path: a, weights: [{from: 0, value: 1}, {from: 5, value: 1}, {from: 5, value: 2}]}]}"],
        ["spec.data.sources[0].weights"],
    ),
    (
        ["data={sources: [{path: a, weights: [{from: 0, value: 0}]}, {path: b}]}"],
        ["spec.data.sources[0].weights"],
    ),
    (
        ["data={sources: [{path: a, weights: [{from: 0, value: 1}, {from: 5, value: 0}]}]}"],
        ["spec.data.sources"],
    ),
    (["data.weights=[{from: 0, value: 1}]"], ["spec.data.weights"]),
    (
        ["evaluation={sets: [{name: a, path: a, weights: [{from: 0, value: 1}]}]}"],
        ["spec.evaluation.sets[0].weights"],
    ),
    (["evaluation.data={path: a, weights: [{from: 0, value: 1}]}"], ["spec.evaluation.data.weights"]),
    (["evaluation.data={path: a, synthetic: {}}"], ["spec.evaluation.data"]),
    (["reward.python=package.module:function"], ["spec.reward"]),
    (["reward.name=null"], ["spec.reward"]),
    (["data.applyChatTemplate=false", "data.chat.system=x"], ["spec.data.chat"]),
    (
        ["data={sources: [{path: a, applyChatTemplate: true, chat: {}}, {path: b, chat: {system: x}}]}"],
        ["spec.data.sources[1].chat"],
    ),
    (["reward.batch=true"], ["spec.reward.batch"]),
    (["reward.signature=TRL"], ["spec.reward.signature"]),
    (["reward={python: a:f, batch: true, signature: Verl}"], ["spec.reward.batch"]),
    (["reward={parts: [{name: math, signature: Auto}]}"], ["spec.reward.parts[0].signature"]),
    (["reward={parts: [{python: a:f, batch: true, signature: TRL}]}"], ["spec.reward.parts[0].batch"]),
    (["reward={parts: [{name: math}], name: math}"], ["spec.reward"]),
    (["reward={by: tag, name: math}"], ["spec.reward.by"]),
    (["reward={by: tag, parts: [{name: math}]}"], ["spec.reward.by"]),
    (["reward={parts: [{name: math, rows: [a]}]}"], ["spec.reward.by"]),
    (["reward={parts: [{name: math}, {weight: 2}]}"], ["spec.reward.parts[1]"]),
    (["reward={parts: [{name: math, batch: true}]}"], ["spec.reward.parts[0].batch"]),
    (["reward={parts: [{name: regex}]}"], ["spec.reward.parts[0].args"]),
    (["reward={parts: [{python: a:score}, {python: ./b.py:score}]}"], ["spec.reward.parts"]),
    (["reward.name=regex"], ["spec.reward.args"]),
    (["reward.name=overlong"], ["spec.reward.args"]),
    (["reward=null"], ["spec.reward"]),
    (
        [
            "reward=null",
            "data.path=null",
            "data.applyChatTemplate=null",
            "data.sources=[{path: a, reward: {name: math}}, {path: b}]",
        ],
        ["spec.reward"],
    ),
    (["reward=null", "data.reward.name=exact", "evaluation.data.path=a"], ["spec.evaluation.data.reward"]),
    (["evaluation.data.path=a", "evaluation.passAt=[1, 4]"], ["spec.evaluation.passAt"]),
    (["rollout.samplesPerPrompt=1", "training.globalBatchSize=null"], ["spec.rollout.samplesPerPrompt"]),
    *(
        (
            [f"algorithm={{name: {name}}}", "rollout.samplesPerPrompt=1", "training.globalBatchSize=null"],
            ["spec.rollout.samplesPerPrompt"],
        )
        for name, facts in ALGORITHMS.items()
        if facts.min_group_size == 2
    ),
    *(
        (
            [
                *(["rollout.oversampling.filter=ZeroVariance"] if facts.requires_filter else []),
                *(["training={tensorParallel: 1, backend: FSDP}"] if facts.needs_critic else []),
                f"algorithm={{name: {name}}}",
                *(TEACHER if facts.needs_teacher else []),
                f"algorithm.{WITHOUT_EFFECT[attribute]}",
            ],
            [f"spec.algorithm.{WITHOUT_EFFECT[attribute].partition('=')[0].partition('.')[0]}"],
        )
        for name, facts in ALGORITHMS.items()
        for attribute in facts.without_effect
    ),
    (["evaluation={data: {path: a}, samplesPerPrompt: 4}"], ["spec.evaluation.samplesPerPrompt"]),
    (["evaluation={sets: [{name: a, path: a}, {name: a, path: b}]}"], ["spec.evaluation.sets"]),
    (["evaluation={everySteps: 3}"], ["spec.evaluation"]),
    (["evaluation={sets: [{name: a, path: a}, {name: b}]}"], ["spec.evaluation.sets[1]"]),
    (["evaluation={sets: [{name: a, path: a, chat: {system: x}}]}"], ["spec.evaluation.sets[0].chat"]),
    (["evaluation={sets: [{name: a, path: a, passAt: [1, 2]}]}"], ["spec.evaluation.sets"]),
    (["evaluation={sets: [{name: a, path: a, samplesPerPrompt: 2}]}"], ["spec.evaluation.sets"]),
    (
        ["reward=null", "data.reward.name=exact", "evaluation={sets: [{name: a, path: a}]}"],
        ["spec.evaluation.sets"],
    ),
    (["evaluation={data: {path: a}, temperature: 0.001}"], ["spec.evaluation.temperature"]),
    (["failurePolicy={backoffSeconds: 20, maxBackoffSeconds: 10}"], ["spec.failurePolicy.maxBackoffSeconds"]),
    (["algorithm.tis.low=2"], ["spec.algorithm.tis.low"]),
    (["training.optimizer={schedule: linear, minLr: 0.1}"], ["spec.training.optimizer.minLr"]),
    (["training.optimizer={schedule: cosine, warmupSteps: 10, decaySteps: 9}"], ["spec.training.optimizer.decaySteps"]),
    (["timeouts.phases.rolout=5"], ["spec.timeouts.phases"]),
    *(([f"rollout.engineArgs.{name}=1"], [f"spec.rollout.engineArgs.{name}"]) for name in RESERVED_ENGINE_ARGS),
    (["hccl.trainerPorts.host={first: 61000, last: 60000}"], ["spec.hccl.trainerPorts.host.last"]),
    ([*NODES_APART, "hccl.trainerPorts.host={first: 21000, last: 21050}"], ["spec.hccl.trainerPorts.host"]),
    ([*NODES_APART, "hccl.rolloutPorts.host={first: 21000, last: 21050}"], ["spec.hccl.rolloutPorts.host"]),
    (
        ["hccl.trainerPorts.host={first: 60000, last: 60050}", "hccl.rolloutPorts.host={first: 60050, last: 60060}"],
        ["spec.hccl.rolloutPorts.host"],
    ),
    (
        ["hccl.trainerPorts.device={first: 2010, last: 2020}", "hccl.rolloutPorts.device={first: 2001, last: 2030}"],
        ["spec.hccl.rolloutPorts.device"],
    ),
    (["hccl.rolloutPorts.device={first: 1, last: 2}"], ["spec.hccl.rolloutPorts.device.first"]),
    (["hccl.trainerPorts.host={first: 1, last: 2}"], ["spec.hccl.trainerPorts.host.first"]),
    (["hccl.rolloutPorts.host={first: 9000, last: 10002}"], ["spec.hccl.rolloutPorts.host"]),
    (["hccl.useHostIp=true"], ["spec.hccl.useHostIp"]),
    (["network.hostNetwork=true", "hccl.useHostIp=true", "hccl.interface==eth0"], ["spec.hccl.useHostIp"]),
    (["hccl.opExpansionMode=AIV"], ["spec.hccl.opExpansionMode"]),
    (["environment.variables.LD_PRELOAD=/lib/x.so"], ["spec.environment.variables"]),
    (["environment.trainer.HCCL_IF_BASE_PORT='1'"], ["spec.environment.trainer"]),
    (["environment.rollout.ASCEND_RT_VISIBLE_DEVICES='0'"], ["spec.environment.rollout"]),
    (["resources.overrides.environment.TASK_QUEUE_ENABLE='2'"], ["spec.resources.overrides.environment"]),
    *(
        ([*NPU, f"{place}.PYTORCH_NPU_ALLOC_CONF='expandable_segments:True'"], [f"spec.{place}"])
        for place in (
            "environment.variables",
            "environment.trainer",
            "environment.rollout",
            "resources.overrides.environment",
        )
    ),
    ([*NPU, "environment.rollout.PYTORCH_ALLOC_CONF='expandable_segments:False'"], ["spec.environment.rollout"]),
    (
        ["resources.profile=cuda", "environment.trainer.PYTORCH_CUDA_ALLOC_CONF='max_split_size_mb:1'"],
        ["spec.environment.trainer"],
    ),
    ([*NPU, "resources.tuning.cpuAffinity='2'"], ["spec.resources.tuning.cpuAffinity"]),
    *(
        (
            [*ALONE, "rollout.samplesPerPrompt=1", f"algorithm={{name: reinforce, rewards: {{{field}: Group}}}}"],
            [f"spec.algorithm.rewards.{field}"],
        )
        for field in ("center", "scale")
    ),
    (
        [
            *ALONE,
            "rollout={promptsPerStep: 1, samplesPerPrompt: 1, maxResponseTokens: 8}",
            "algorithm={name: reinforce, rewards: {center: Batch}}",
        ],
        ["spec.algorithm.rewards.center"],
    ),
    (
        [
            *ALONE,
            "rollout={promptsPerStep: 1, samplesPerPrompt: 1, maxResponseTokens: 8}",
            "algorithm={name: reinforce_pp}",
        ],
        ["spec.algorithm.whitenAdvantages"],
    ),
    (["rollout.topK=1"], ["spec.rollout.topK"]),
    (["rollout.topP=0.001"], ["spec.rollout.topP"]),
    (["rollout.minP=1"], ["spec.rollout.minP"]),
    (["algorithm.tis={outside: Mask, low: 2, high: 3}"], ["spec.algorithm.tis.low"]),
    (
        [*NPU, "memorySaver.mode=torch", "resources.tuning.taskQueueEnable=2"],
        ["spec.resources.tuning.taskQueueEnable"],
    ),
    (
        [*NPU, "memorySaver.mode=torch", "environment.trainer.TASK_QUEUE_ENABLE='2'"],
        ["spec.environment.trainer"],
    ),
    (["environment.trainer.TMS_HOOK_MODE=torch"], ["spec.environment.trainer"]),
    (["resources.profile=ascend-a3", "rollout.speculative={}"], ["spec.rollout.speculative"]),
    (["resources.profile=ascend-a3", "rollout.routerReplay=true"], ["spec.rollout.routerReplay"]),
    (
        ["rollout.engineArgs.enable_return_routed_experts=1"],
        ["spec.rollout.engineArgs.enable_return_routed_experts"],
    ),
    *(
        (
            ["resources.profile=ascend-a3", f"rollout.engineArgs.{name}=true"],
            [f"spec.rollout.engineArgs.{name}"],
        )
        for name in ("async_scheduling", "enable_eplb", "enable_expert_parallel")
    ),
    (["environment.rollout.VLLM_ASCEND_ENABLE_FUSED_MC2='1'"], ["spec.environment.rollout"]),
    (["environment.rollout.VLLM_USE_V2_MODEL_RUNNER='1'"], ["spec.environment.rollout"]),
    (["environment.variables.VLLM_USE_V2_MODEL_RUNNER='true'"], ["spec.environment.variables"]),
    (["environment.variables.VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE='1'"], ["spec.environment.variables"]),
    (["metadata.name=Qwen3"], ["metadata.name"]),
    (["metadata.name=3b"], ["metadata.name"]),
    (["metadata.name=qwen3.4b"], ["metadata.name"]),
    ([f"metadata.name={'a' * 48}"], ["metadata.name"]),
    (["scheduling.queue=research"], ["spec.scheduling.queue"]),
    (["scheduling.superPodBlock=16", "scheduling.system=Volcano"], ["spec.scheduling.superPodBlock"]),
    (["scheduling.tolerations=[{key: a, operator: Exists, value: b}]"], ["spec.scheduling.tolerations[0]"]),
    (["scheduling.tolerations=[{value: b}]"], ["spec.scheduling.tolerations[0]"]),
    (["scheduling.tolerations=[{key: a, tolerationSeconds: 3}]"], ["spec.scheduling.tolerations[0].tolerationSeconds"]),
    (["storage.volumes=[{name: a, mountPath: /a}]"], ["spec.storage.volumes[0]"]),
    (["storage.volumes=[{name: a, mountPath: /a, claim: x, source: {nfs: {}}}]"], ["spec.storage.volumes[0]"]),
    (
        ["storage.volumes=[{name: a, mountPath: /a, claim: x}, {name: a, mountPath: /b, claim: x}]"],
        ["spec.storage.volumes"],
    ),
    (
        ["storage.volumes=[{name: a, mountPath: /a, claim: x}, {name: b, mountPath: /a, claim: x}]"],
        ["spec.storage.volumes"],
    ),
    (["earlyStop.metric=eval/held-out"], ["spec.earlyStop.metric"]),
    (["checkpoint.keepBest.metric=eval/held-out"], ["spec.checkpoint.keepBest.metric"]),
    (["records.trackers=[{name: wandb}, {name: wandb}]"], ["spec.records.trackers"]),
    (["records.trackers=[{name: mlflow, workspace: w}]"], ["spec.records.trackers[0].workspace"]),
    (["records.trackers=[{name: mlflow, url: 'http://a', offline: true}]"], ["spec.records.trackers[0].url"]),
    (
        ["records.trackers=[{name: mlflow}]", "environment.variables={MLFLOW_TRACKING_TOKEN: t}"],
        ["spec.records.trackers"],
    ),
]

ACCEPTED: list[list[str]] = [
    AGENT,
    [*AGENT, *DIVIDED],
    [*AGENT, *APART],
    [*TOOLS, *DIVIDED],
    [*TOOLS, *APART],
    JUDGE,
    JUDGE_APART,
    [*JUDGE, "evaluation.data={path: /data/b.jsonl, reward: {name: math}}"],
    ["training={backend: FSDP, recompute: Full, fsdp: {shardSize: 2, reshardAfterForward: false}}"],
    ["training={backend: FSDP, lora: {rank: 8, alpha: 16, targets: [q_proj, v_proj]}}"],
    ["training={backend: FSDP, lora: {rank: 12, handover: Merged}}"],
    [*APART, "training={backend: FSDP, lora: {rank: 8, handover: Adapters}}"],
    ELASTIC,
    [*ELASTIC, "resources.rollout.minNodes=null", "rollout.tensorParallel=2", "resources.rollout.nodes=4"],
    [*APART, "rollout.staleness={max: 15, order: ReadyFirst}"],
    [*APART, "rollout.staleness.max=2", "algorithm.tis={enabled: true, low: 0, high: 2.0}"],
    [*APART, "rollout.staleness.max=2", "algorithm.anchor=Trainer", "algorithm.tis.high=3"],
    ["algorithm.anchor=Rollout", "rollout.partial={}"],
    [*APART, "rollout.staleness.max=0", "algorithm.tis.enabled=false"],
    ["algorithm.name=dapo", "rollout.oversampling.filter=ZeroVariance"],
    ["rollout.oversampling.function=/volumes/filters.py:keep"],
    ["rollout.oversampling={filter: ZeroVariance, function: package.module:keep, limit: 3}"],
    DIVIDED,
    [*DIVIDED, "resources.trainer.devicesPerNode=4", "resources.rollout={devicesPerNode: 6}"],
    [*DIVIDED, "resources.trainer={nodes: 2, devicesPerNode: 4}", "resources.rollout={nodes: 1, devicesPerNode: 6}"],
    [*DIVIDED, "rollout.staleness.max=0", "algorithm.tis.enabled=false"],
    [*DIVIDED, "rollout.staleness={}"],
    ["rollout.partial={}"],
    ["rollout.speculative={}", "rollout.partial={}", "rollout.topK=8"],
    ["resources.profile=cuda", "rollout.speculative={draftTokens: 1, minMatch: 3, maxMatch: 3}"],
    ["resources.profile=cuda", "rollout.routerReplay=true", "rollout.partial={}", "rollout.speculative={}"],
    [*DIVIDED, "rollout.routerReplay=true"],
    ["rollout.partial.factor=4", "rollout.staleness.max=3", "rollout.oversampling.filter=ZeroVariance"],
    ["rollout.partial.factor=1.25", "algorithm.tis={outside: Mask}"],
    ["rollout.tail={}"],
    ["rollout.tail.deferLongest=0.5", "rollout.oversampling.filter=ZeroVariance", "algorithm.tis.enabled=false"],
    [],
    *(
        [f"algorithm={{name: {name}}}"]
        for name, facts in ALGORITHMS.items()
        if not facts.requires_filter and not facts.needs_critic and not facts.needs_teacher
    ),
    ["algorithm={name: sapo, sapo: {tauNegative: 2}}"],
    ["algorithm={name: reinforce}", "rollout.samplesPerPrompt=1", "training.globalBatchSize=null"],
    *([f"resources.profile={profile.value}"] for profile in Profile),
    ["resources.devicesPerNode=null"],
    ["training=null"],
    ["training.pipelineParallel=2", "training.expertParallel=2", "resources.devicesPerNode=null"],
    ["training.pipelineParallel=2", "training.expertParallel=4"],
    ["training.globalBatchSize=64"],
    ["training.contextParallel=4", "training.globalBatchSize=1"],
    ["training.contextParallel=2", "training.expertParallel=4", "training.pipelineParallel=2"],
    ["training.contextParallel=2", "resources.devicesPerNode=null"],
    ["resources.profile=cpu", "weightSync.bucketBytes=4096"],
    [*DIVIDED, "weightSync.transport=InPlace"],
    [*NPU, "training.tensorParallel=2", "rollout.tensorParallel=2", "weightSync.transport=InPlace"],
    ["model.path=null", "model.random.config={model_type: qwen3, rope_scaling: null}"],
    [
        "data.path=null",
        "data.applyChatTemplate=null",
        "data.sources=[{path: a, name: one}, {synthetic: {}, name: two}]",
    ],
    ["reward=null", "data.reward.python=package.module:function", "data.reward.batch=true"],
    ["reward={name: regex, args: {pattern: '[0-9]+'}}"],
    ["data.chat={system: 'Be brief.', templateFile: ./chat.jinja, templateArgs: {enable_thinking: false}}"],
    ["reward={python: './my rewards/a-b.py:score'}"],
    ["reward={parts: [{name: gsm8k, args: {flexible: true}}, {name: overlong, args: {cache: 4096}}]}"],
    ["reward={parts: [{name: format, args: {tags: [think], rest: true}}, {name: length}]}", "data.labelKey=null"],
    ["reward={parts: [{name: math, weight: 2}, {python: a:f, batch: true, weight: -0.5}, {name: math, recordAs: m}]}"],
    ["evaluation={data: {path: a}, samplesPerPrompt: 4, passAt: [1, 4], temperature: 1}"],
    [
        "evaluation={passAt: [1, 4], temperature: 1, sets: [{name: a.b, path: a, samplesPerPrompt: 4}, "
        "{name: b, path: b, passAt: [1], reward: {name: gsm8k}, maxPrompts: 3}]}"
    ],
    ["data.labelKey=null", "reward={name: regex, args: {pattern: a}}", "records.httpPort=null"],
    ["timeouts.phases={rollout: 100, update_weights: 10}"],
    ["rollout.engineArgs={compilation_config: {level: 0}, async_scheduling: true}"],
    ["hccl.trainerPorts.host={first: 60000, last: 60050}", "hccl.rolloutPorts.host={first: 61000, last: 61050}"],
    ["rollout.graphMode=true"],
    ["resources.profile=cpu", "rollout.graphMode=true", "environment.rollout.TASK_QUEUE_ENABLE='2'"],
    [*GRAPHS, "resources.tuning.taskQueueEnable=1", "rollout.engineArgs.cudagraph_capture_sizes=[1, 8]"],
    [*GRAPHS, "environment.trainer.TASK_QUEUE_ENABLE='2'", "memorySaver.releaseProcessGroups=true"],
    ["resources=null", "rollout.graphMode=true", "training.globalBatchSize=null"],
    ["resources.profile=cuda", "rollout.graphMode=true", "rollout.engineArgs.enable_expert_parallel=true"],
    ["resources.profile=ascend-a2", "rollout.engineArgs={async_scheduling: false, enable_expert_parallel: false}"],
    ["environment.rollout={VLLM_ASCEND_ENABLE_FUSED_MC2: '0'}"],
    ["environment.rollout={VLLM_USE_V2_MODEL_RUNNER: '0'}"],
    ["network.hostNetwork=true", "hccl.useHostIp=true"],
    ["hccl={opExpansionMode: AIV, deterministic: false}"],
    ["environment.rollout.LD_PRELOAD=/usr/lib/libjemalloc.so.2"],
    [*NPU, "environment.trainer.PYTORCH_NPU_ALLOC_CONF='max_split_size_mb:256, Expandable_Segments : false'"],
    ["environment.trainer.PYTORCH_NPU_ALLOC_CONF='expandable_segments:True'"],
    [*NPU, "environment.rollout.HCCL_BUFFSIZE='512'", "environment.trainer.TASK_QUEUE_ENABLE='1'"],
    ["resources.tuning.cpuAffinity='2'"],
    ["algorithm.tis={outside: Mask, low: 0.5, high: 1}"],
    [*ALONE, "rollout.samplesPerPrompt=1", "algorithm={name: reinforce, rewards: {center: Batch}}"],
    [*ALONE, "rollout.samplesPerPrompt=1", "algorithm={name: reinforce_pp}"],
    [*DISTILL, "rollout.samplesPerPrompt=1", "training.globalBatchSize=null"],
    [*DISTILL, "algorithm.distill.rewardWeight=0.5", "algorithm.kl.coefficient=0.1"],
    [*DISTILL, "algorithm.distill.divergence=TopK", "algorithm.distill.topK=8"],
    [*DISTILL, "algorithm.kl.monitor=true", "rollout.temperature=0.7", "rollout.topP=1", "rollout.topK=0"],
    [*ALONE, *DISTILL, "training={backend: FSDP, lora: {rank: 8}}"],
    [*EPISODES, *DISTILL],
    PPO,
    [*PPO, "algorithm.gae={gamma: 0.99, lambda: 0.95}", "critic={model: {path: a/b}, updatesPerStep: 2}"],
    [*PPO, "mode=Async", "resources={profile: cpu}", "training.lora={rank: 8}"],
    ["rollout.topK=2", "rollout.minP=0.99"],
    ["resources.profile=cuda", "training={backend: FSDP, contextParallel: 2}"],
    [*NPU, "training={backend: FSDP, contextParallel: 2}"],
    [*NPU, "resources.tuning.taskQueueEnable=2"],
    [
        "resources={profile: ascend-a3, nodes: 2, devicesPerNode: 8}",
        "scheduling={system: MindCluster, queue: research, superPodBlock: 16}",
    ],
    ["scheduling.tolerations=[{operator: Exists}, {key: a, value: b, effect: NoExecute, tolerationSeconds: 3}]"],
    ["failurePolicy.rules=[{exitCodes: [3], action: Fail}, {reasons: [NodeLost, Evicted], action: Ignore}]"],
    ["storage.volumes=[{name: a, mountPath: /a, claim: x}, {name: b, mountPath: /b, hostPath: /data}]"],
]


def refused_by_api_server(document: dict) -> set[tuple[str, str]]:
    found = set()
    for at, message in broken_rules(admit(document)):
        named = message.startswith("metadata.name: ")
        found.add(("metadata.name", message.removeprefix("metadata.name: ")) if named else (path_text(at), message))
    return found


def refused_locally(document: dict) -> set[tuple[str, str]]:
    try:
        load_manifest(document)
    except ManifestError as error:
        return {p.rule or (p.path, f"{p.wrong}; allowed: {p.allowed}") for p in error.problems}
    return set()


IN_CEL = {rule.message for rule in RULES if rule.cel is not None}
LOCAL_ONLY = {rule.message for rule in RULES if rule.cel is None}


@pytest.mark.parametrize(("changes", "blamed"), REFUSED, ids=[" ".join(changes) for changes, _ in REFUSED])
def test_refused(changes: list[str], blamed: list[str]) -> None:
    locally = refused_locally(manifest(*changes))
    assert sorted(path for path, _ in locally) == sorted(blamed)
    by_api_server = refused_by_api_server(manifest(*changes))
    assert {found for found in locally if found[1] in IN_CEL} == by_api_server
    # What the schema of a field refuses is no rule between fields: bad_manifests.yaml has it.
    assert by_api_server or {message for _, message in locally} <= LOCAL_ONLY


@pytest.mark.parametrize("changes", ACCEPTED, ids=[" ".join(changes) or "as it is" for changes in ACCEPTED])
def test_accepted(changes: list[str]) -> None:
    load_manifest(manifest(*changes))
    assert broken_rules(admit(manifest(*changes))) == []


def test_every_rule_is_broken_by_an_example() -> None:
    broken = {message for changes, _ in REFUSED for _, message in refused_locally(manifest(*changes))}
    assert {rule.message for rule in RULES} - broken == set()


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from([changes for changes, _ in REFUSED] + ACCEPTED), min_size=2, max_size=5))
def test_local_check_and_cel_agree_on_mixtures(mixture: list[list[str]]) -> None:
    try:
        document = manifest(*(change for changes in mixture for change in changes))
    except ManifestError:
        return  # two settings that do not fit each other, such as an item of a list that is not there
    locally = refused_locally(document)
    if _devices_given(document["spec"]):
        assert {found for found in locally if found[1] in IN_CEL} == refused_by_api_server(document)
    else:
        assert refused_by_api_server(document) <= locally  # CEL cannot work out the number of devices


def _devices_given(spec: dict[str, Any]) -> bool:
    resources = spec.get("resources") or {}
    if spec.get("mode") not in ("Disaggregated", "Async"):
        return bool(resources.get("devicesPerNode"))
    return all((resources.get(group) or {}).get("devicesPerNode") for group in ("trainer", "rollout"))


def holds(rule: Rule, spec: dict[str, Any]) -> bool:
    assert rule.cel is not None
    return bool(compile_rule(rule.cel).eval(data={"self": spec}).value())


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@pytest.mark.parametrize("samples", [1, 2, 3, 8])
@pytest.mark.parametrize("batch", [None, 8, 32 * 8])
def test_what_an_algorithm_asks_is_asked_by_cel_and_check_alike(name: str, samples: int, batch: int | None) -> None:
    """Also of algorithms that are not the default, which a manifest without the block does not have."""
    facts = AlgorithmFacts(name="rloo", min_group_size=3, requires_on_policy=True)
    settings = (f"rollout.samplesPerPrompt={samples}", f"training.globalBatchSize={batch or 'null'}")
    given = admit(manifest(*settings))["spec"]
    given["algorithm"] = {"name": name}
    view = SimpleNamespace(
        mode="Colocated",
        algorithm=SimpleNamespace(name=name),
        rollout=SimpleNamespace(prompts_per_step=32, samples_per_prompt=samples, partial=None, staleness=None),
        training=SimpleNamespace(global_batch_size=batch),
    )
    on_group = group_size_rule(3, ["rloo"])
    own_samples, own_step, on_policy = algorithm_rules(facts)
    assert on_group.check(view) == holds(on_group, given) == (name == "grpo" or samples >= 3)
    assert on_policy.check(view) == holds(on_policy, given) == (name == "grpo" or batch in (None, 32 * samples))
    assert own_samples.check(view)
    assert holds(own_samples, given)
    assert own_step.check(view)
    assert holds(own_step, given)
    given["mode"] = view.mode = "Disaggregated"
    assert own_step.check(view) == holds(own_step, given) == (name == "grpo")
    given["rollout"]["staleness"], view.rollout.staleness = {"max": 0}, SimpleNamespace(max=0)
    assert own_step.check(view)
    assert holds(own_step, given)
    given["rollout"]["partial"] = view.rollout.partial = {"factor": 2}
    assert own_samples.check(view) == holds(own_samples, given) == (name == "grpo")
    del given["algorithm"]
    assert holds(own_samples, given)
    assert holds(on_group, given)
    assert holds(on_policy, given)


def test_a_judge_on_the_jobs_own_devices_needs_no_network() -> None:
    load_manifest(manifest(*JUDGE, "reward={network: false, parts: [{python: 'm:f'}, {name: judge}]}"))


def test_a_judge_that_scores_may_be_written_with_all_defaults() -> None:
    """A run's record holds each field of its manifest, and is a manifest itself."""
    job = load_manifest(manifest(*JUDGE))
    written = job.model_dump(mode="json", by_alias=True)
    assert load_manifest(written) == job
    written["spec"]["judges"][0]["verdict"]["max"] = 5
    with pytest.raises(ManifestError, match=r"spec.judges\[0\].verdict: .* has no effect"):
        load_manifest(written)
