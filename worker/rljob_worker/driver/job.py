"""The job as the loop sees it: every verb that a line of the loop uses."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rljob_api import RLJobSpec, derived
from rljob_worker.algorithms import get_algorithm
from rljob_worker.data.evaluate import EvaluatedPrompt, aggregate
from rljob_worker.data.tokenizer import decode_responses
from rljob_worker.driver.batch import (
    evaluation_sampling,
    requests,
    rollout_metrics,
    split_by_engine,
    train_batch,
    training_sampling,
)
from rljob_worker.driver.calls import Call, Calls
from rljob_worker.driver.checkpoints import CheckpointStore, DriverState
from rljob_worker.driver.cluster import Cluster
from rljob_worker.driver.events import EventLog
from rljob_worker.driver.inputs import Inputs
from rljob_worker.driver.probe import WeightProbe
from rljob_worker.driver.sync_report import sync_report
from rljob_worker.errors import JobError, StopRequested, UserError
from rljob_worker.phases import PhaseClock
from rljob_worker.records.trajectories import write_trajectories
from rljob_worker.records.writer import Record, RecordWriter
from rljob_worker.rewards.runner import RewardResult, RewardSample
from rljob_worker.rollout.arguments import max_model_length
from rljob_worker.types import (
    FloatArray,
    Generation,
    GenerationRequest,
    Prompt,
    SamplingParams,
    StepMetrics,
    TrainBatch,
)


@dataclass(slots=True)
class Rollout:
    """The responses of one step, and what became of them; P prompts, G samples each, prompt-major."""

    step: int
    weight_version: int
    prompts: list[Prompt]
    generations: list[Generation] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reward_results: list[RewardResult] = field(default_factory=list)
    rewards: FloatArray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """[P, G]."""
    advantages: FloatArray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """[P, G]."""


class Job:
    """State of a running job. The loop calls it; nothing here knows the order of the phases."""

    def __init__(
        self,
        spec: RLJobSpec,
        *,
        cluster: Cluster,
        calls: Calls,
        clock: PhaseClock,
        stop: threading.Event,
        inputs: Inputs,
        checkpoints: CheckpointStore,
        records: RecordWriter,
        events: EventLog,
        attempt: int,
    ) -> None:
        self.spec = spec
        self.clock = clock
        self.sampling = training_sampling(spec)
        self._algorithm = get_algorithm(spec.algorithm.name)
        self.step = 0
        self.weight_version = 0
        self.ready = False
        self._cluster = cluster
        self._calls = calls
        self._stop = stop
        self._inputs = inputs
        self._prompts = inputs.prompts
        self._rewards = inputs.rewards
        self._probe = WeightProbe(spec, inputs.model.vocab_size, max_model_length(spec, inputs.model) - 1)
        self._checkpoints = checkpoints
        self._records = records
        self._events = events
        self._attempt = attempt
        self._cursor = self._prompts.state()
        self._saved_step: int | None = None
        self._recorded_step = 0
        self._unrecorded: Record | None = None
        self._checkpoint_requested = threading.Event()
        self._trained: list[StepMetrics] = []
        self._busy: dict[str, float] = {}
        self._scored_prompts: list[int] = []

    # --- what the loop asks -----------------------------------------------------------------

    @property
    def uses_reference(self) -> bool:
        """Whether a step needs the reference policy's log-probabilities."""
        return self._algorithm.needs_reference(self.spec.algorithm)

    @property
    def uses_old_log_probs(self) -> bool:
        """Whether a step needs log-probabilities from before its updates."""
        return self._algorithm.needs_old_log_probs(derived.updates_per_step(self.spec))

    def stopping(self) -> bool:
        """Whether the job was asked to stop."""
        return self._stop.is_set()

    def due_checkpoint(self) -> bool:
        """After every `checkpoint.everySteps` steps, after the last one, and when asked for over HTTP."""
        regular = self.step % self.spec.checkpoint.every_steps == 0 or self.step == self.spec.steps
        return regular or self._checkpoint_requested.is_set()

    def due_probe(self) -> bool:
        """Whether the fixed-prompt probe runs this step."""
        every = self.spec.weight_sync.probe_every_steps
        return every > 0 and self.step % every == 0

    def due_evaluation(self) -> bool:
        """Whether this step ends with an evaluation."""
        evaluation = self.spec.evaluation
        if evaluation is None:
            return False
        return self.step % evaluation.every_steps == 0 or self.step == self.spec.steps

    def due_initial_evaluation(self) -> bool:
        """Whether to evaluate before the first step."""
        return self.spec.evaluation is not None and self.spec.evaluation.at_start and self.step == 0

    # --- phases ------------------------------------------------------------------------------

    def next_rollout(self) -> Rollout:
        """Draw the prompts of the next step."""
        prompts = self._prompts.next_prompts(self.spec.rollout.prompts_per_step)
        return Rollout(self.step + 1, self.weight_version, prompts)

    def generate(self, rollout: Rollout) -> None:
        """Generate all responses; each prompt's group goes to its reward as soon as it is complete."""
        group = self.spec.rollout.samples_per_prompt
        work = requests(rollout.prompts, group, self.spec.seed, rollout.step)
        rollout.generations, rollout.texts = self._generate(work, rollout.prompts, self.sampling)

    def _generate(
        self, work: list[GenerationRequest], prompts: list[Prompt], sampling: SamplingParams
    ) -> tuple[list[Generation], list[str]]:
        """Responses and their texts in the order of `work`, spread over the engines by whole prompt groups."""
        group = len(work) // len(prompts)
        shares = split_by_engine(len(work), group, len(self._cluster.engines))
        parts = [work[share.start : share.stop] for share in shares]
        streams = self._cluster.generate(parts, sampling, self.weight_version)
        done: dict[int, tuple[Generation, str]] = {}
        missing = dict.fromkeys(range(len(prompts)), group)
        self._scored_prompts = []
        phase = self.clock.current or "eval"
        for engine, chunk in self._calls.stream(phase, streams, self._deadline(phase)):
            texts = decode_responses(self._inputs.tokenizer, [generation for _, generation in chunk])
            for (index, generation), text in zip(chunk, texts):
                position = shares[engine].start + index
                done[position] = (generation, text)
                missing[position // group] -= 1
            complete = [prompt for prompt, left in missing.items() if not left]
            for prompt in complete:
                del missing[prompt]
                samples = [(i, *done[prompt * group + i]) for i in range(group)]
                self._rewards.submit([RewardSample(prompts[prompt], i, g, text) for i, g, text in samples])
            self._scored_prompts += complete
        if len(done) != len(work):
            raise JobError(f"{phase}: the engines returned {len(done)} of {len(work)} responses")
        return [done[i][0] for i in range(len(work))], [done[i][1] for i in range(len(work))]

    def _collect(self, group: int) -> list[RewardResult]:
        """Results of the last `_generate`, in its order; StopRequested when the job was asked to stop.

        Ray's job API sends a stop signal to all of the driver's descendants, so that scores of a reward that was just
        ended by it may be those of an error.
        """
        results = self._rewards.collect(time.monotonic() + self._deadline(self.clock.current or "reward"))
        if self.stopping():
            raise StopRequested
        by_prompt = {prompt: results[i * group : (i + 1) * group] for i, prompt in enumerate(self._scored_prompts)}
        return [result for prompt in sorted(by_prompt) for result in by_prompt[prompt]]

    def collect_rewards(self, rollout: Rollout) -> None:
        """Wait for the rewards that generation did not hide, and turn them into advantages."""
        group = self.spec.rollout.samples_per_prompt
        results = self._collect(group)
        scores = torch.tensor([result.score for result in results], dtype=torch.float32).view(-1, group)
        rollout.rewards = scores.numpy()
        rollout.reward_results = results
        rollout.advantages = self._algorithm.advantages(scores, self.spec.algorithm).numpy()

    def train_batch(self, rollout: Rollout) -> TrainBatch:
        """What the trainers learn from."""
        return train_batch(rollout.prompts, rollout.generations, rollout.advantages)

    def actor_train(self, batch: TrainBatch) -> bool:
        """All optimizer updates of the step; False when a non-finite value kept the weights as they were."""
        calls = self._cluster.on_trainers("train", batch, self.sampling, self.weight_version + 1)
        self._trained = self._calls.gather("actor_train", calls, self._deadline("actor_train"), stoppable=True)
        return all(result.applied for result in self._trained)

    def non_finite_reason(self) -> str:
        """Where the value that stopped the update came from."""
        reasons = [str(result.detail.get("reason", "")) for result in self._trained if not result.applied]
        return reasons[0] or "a loss or gradient was not finite"

    def advance(self) -> None:
        """The weights are those of the next step now."""
        self.step += 1
        self.weight_version += 1
        self._cursor = self._prompts.state()

    def update_weights(self) -> None:
        """Hand the weights over: trainers send while engines receive; both verify."""
        seconds = self._deadline("update_weights")
        senders = self._cluster.on_trainers("send_weights", self.weight_version, seconds)
        receivers = self._cluster.on_engines("receive_weights", self.weight_version, seconds)
        # Both sides keep the deadline themselves and say what they waited for; the driver only backs them up.
        reports = self._calls.gather("update_weights", [*senders, *receivers], seconds + 5.0)
        sent, received = reports[: len(senders)], reports[len(senders) :]
        self._records.weights(sync_report(self.weight_version, sent, received, self.spec.resources.nodes))
        if self.due_probe():
            self._probe.score_trainers(self.trainers("score", self._probe.tokens))

    def probe_weights(self) -> None:
        """Compare both sides' log-probabilities of fixed prompts: catches what changed after it was landed."""
        self._records.metrics(self._probe.compare(self.engines("score", self._probe.tokens), self.weight_version))

    def evaluate(self) -> None:
        """Score the held-out prompts for the record of the running step.

        Raises:
            StopRequested: the step is then recorded by whoever continues from its checkpoint, with an evaluation.
        """
        metrics = self._evaluation()
        if self.step:
            self._records.metrics(metrics)

    def _evaluation(self) -> dict[str, float]:
        """Metrics of the held-out prompts; with the same seeds each time, evaluations differ by the weights alone."""
        evaluation = self.spec.evaluation
        assert evaluation is not None
        if self.stopping():
            raise StopRequested
        group, prompts = evaluation.samples_per_prompt, self._inputs.evaluation_prompts
        work = requests(prompts, group, self.spec.seed, step=0)
        generations, _ = self._generate(work, prompts, evaluation_sampling(self.spec))
        rewards = self._collect(group)
        scored = [
            EvaluatedPrompt(
                prompt.source,
                [result.score for result in rewards[i * group : (i + 1) * group]],
                sum(g.finish_reason == "length" for g in generations[i * group : (i + 1) * group]),
            )
            for i, prompt in enumerate(prompts)
        ]
        metrics = aggregate(scored, evaluation)
        self._events.write("evaluation", after_step=self.step, metrics=metrics)
        return metrics

    def save_checkpoint(self) -> Path:
        """Write the state of the last completed step."""
        folder = self._checkpoints.begin(self.step)
        self._calls.gather("checkpoint", self._cluster.on_trainers("save", str(folder)), self._deadline("checkpoint"))
        state = DriverState(
            step=self.step,
            weight_version=self.weight_version,
            data_cursor=self._cursor,
            attempt=self._attempt,
            world_size=len(self._cluster.trainers),
            record=None if self.step == self._recorded_step else self._records.draft(self.step, self.clock.so_far()),
        )
        self._checkpoint_requested.clear()
        self._saved_step = self.step
        return self._checkpoints.commit(folder, state)

    def save_before_leaving(self) -> Path | None:
        """The checkpoint that a stop request asks for, unless this step has one."""
        return None if self._saved_step == self.step else self.save_checkpoint()

    def request_checkpoint(self) -> None:
        """Take a checkpoint at the end of the running step; thread-safe."""
        self._checkpoint_requested.set()

    def restore_latest(self) -> int:
        """Continue from the newest complete checkpoint, if there is one; returns its step, else 0."""
        state = self._checkpoints.latest()
        if state is None:
            return 0
        folder = self._checkpoints.folder(state.step)
        if state.world_size != len(self._cluster.trainers):
            raise UserError(
                f"{folder}: saved by {state.world_size} trainers, but the job has {len(self._cluster.trainers)}; "
                "a checkpoint continues only on as many"
            )
        loading = self._cluster.on_trainers("load", str(folder))
        self._calls.gather("load", loading, self.spec.timeouts.start_seconds, until_stop=True)
        self._prompts.restore(state.data_cursor)
        self._cursor = state.data_cursor
        self.step = self._saved_step = self._recorded_step = self._events.step = state.step
        self.weight_version = state.weight_version
        if state.record is not None and not self._records.has(state.step, state.attempt):
            self._unrecorded = state.record
        return state.step

    def complete_restored_step(self) -> None:
        """Evaluate and record the restored step, where the attempt before ended between its checkpoint and its end."""
        if self._unrecorded is None:
            return
        metrics = self._evaluation() if self.due_evaluation() else {}
        self._records.recover({**self._unrecorded, "metrics": {**self._unrecorded["metrics"], **metrics}})
        self._unrecorded = None

    def first_hand_over(self) -> None:
        """Bring engines to the trainers' weights through the same verified path as every later step."""
        if not self._cluster.engines_sleep_first:
            self.engines("sleep")
        self.engines("wake_weights")
        self.update_weights()
        self.trainers("sleep")
        self.engines("wake_kv")
        if self.due_probe():
            self.probe_weights()

    def describe(self, rollout: Rollout) -> None:
        """Write the step's trajectories and note its metrics, now that it was trained on."""
        write_trajectories(
            self._records.folder, self.spec.records, rollout.step, self._samples(rollout), rollout.rewards.shape[1]
        )
        self._records.metrics(rollout_metrics(rollout.generations, rollout.rewards, rollout.advantages))
        self._records.metrics(self._trained[0].metrics)
        self._records.overlapped({"reward": self._rewards.take_busy_seconds()})

    def record(self, rollout: Rollout) -> None:
        """Close the step's clock and write its record."""
        self._records.busy(self._busy_since_last_step())
        self._records.write(rollout.step, self.clock.end_step(), applied=self._trained[0].applied)
        self._events.step = self._recorded_step = rollout.step

    def _samples(self, rollout: Rollout) -> list[dict[str, Any]]:
        group = rollout.rewards.shape[1]
        return [
            {
                "prompt_uid": rollout.prompts[i // group].uid,
                "prompt": rollout.prompts[i // group].text,
                "label": rollout.prompts[i // group].label,
                "sample": i % group,
                "response": text,
                "response_tokens": len(generation.token_ids),
                "finish_reason": generation.finish_reason,
                "reward": float(rollout.rewards[i // group, i % group]),
                "reward_parts": result.parts,
                "reward_error": result.error,
                "advantage": float(rollout.advantages[i // group, i % group]),
                "weight_version": rollout.weight_version,
            }
            for i, (generation, text, result) in enumerate(
                zip(rollout.generations, rollout.texts, rollout.reward_results)
            )
        ]

    def status(self) -> dict[str, Any]:
        """What `/v1/status` says; thread-safe."""
        return {
            "ready": self.ready,
            "step": self.step,
            "steps": self.spec.steps,
            "phase": self.clock.current,
            "attempt": self._attempt,
            "weight_version": self.weight_version,
            "last_checkpoint_step": self._saved_step,
            "stopping": self._stop.is_set(),
        }

    # --- calls -------------------------------------------------------------------------------

    def trainers(self, method: str, *args: Any, stoppable: bool = False) -> list[Any]:
        """Call all trainers within the running phase's deadline."""
        return self._run(method, self._cluster.on_trainers(method, *args), stoppable)

    def engines(self, method: str, *args: Any) -> list[Any]:
        """Call all engines within the running phase's deadline."""
        return self._run(method, self._cluster.on_engines(method, *args), False)

    def _run(self, method: str, calls: list[Call], stoppable: bool) -> list[Any]:
        what = self.clock.current or method
        results = self._calls.gather(what, calls, self._deadline(what), stoppable=stoppable)
        self._records.memory(what, {call.process: result for call, result in zip(calls, results)})
        return results

    def _busy_since_last_step(self) -> dict[str, float]:
        now = dict(self._calls.busy)
        before, self._busy = self._busy, now
        return {process: seconds - before.get(process, 0.0) for process, seconds in now.items()}

    def _deadline(self, phase: str) -> float:
        return self.spec.timeouts.phases.get(phase, self.spec.timeouts.phase_seconds)
