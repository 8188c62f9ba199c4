"""Generation: prompts to the engines, responses to their rewards, and the evaluation of held-out prompts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from rljob_api import RLJobSpec, derived
from rljob_api.spec.rollout import RolloutAssignment
from rljob_worker.algorithms import get_algorithm, step_advantages
from rljob_worker.cluster.groups import EngineGroup
from rljob_worker.cluster.phase_calls import PhaseCalls
from rljob_worker.data.evaluate import EvaluatedPrompt, aggregate, held_out_settings
from rljob_worker.data.tokenizer import decode_responses
from rljob_worker.engine.arguments import max_sequences
from rljob_worker.engine.engine import Engine
from rljob_worker.engine.reports import DraftCounts
from rljob_worker.errors import JobError, StopRequested, UserError
from rljob_worker.flow import Decision, Finish, Group, GroupPool
from rljob_worker.flow.occupancy import Occupancy
from rljob_worker.flow.pool import NumberedPrompt
from rljob_worker.rewards.score_calls import RewardSample
from rljob_worker.rollouts.batch import (
    answered_group,
    decided,
    evaluation_sampling,
    requests,
    too_few_groups,
    training_sampling,
)
from rljob_worker.rollouts.dispatch import Dispatch
from rljob_worker.rollouts.inputs import Inputs
from rljob_worker.rollouts.step import Progress, Responses, Step
from rljob_worker.types import Generation, GenerationRequest, Prompt, RewardResult, SamplingParams


class Rollouts:
    """Generates and scores.

    Args:
        spec: the job.
        engines: all of them.
        calls: waits for them.
        pool: prompts and groups.
        inputs: tokenizer, rewards and held-out prompts.
        progress: how far the job is.
        stop: set when the job was asked to stop.
    """

    def __init__(
        self,
        spec: RLJobSpec,
        engines: EngineGroup,
        calls: PhaseCalls,
        pool: GroupPool,
        inputs: Inputs,
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        self._spec = spec
        self._engines = engines
        self._calls = calls
        self._pool = pool
        self._inputs = inputs
        self._progress = progress
        self._stop = stop
        self._algorithm = get_algorithm(spec.algorithm.name)
        self._sampling = training_sampling(spec)
        self._longest: dict[str, int] = {}
        """Tokens of the longest response to a prompt when it was seen last."""
        self._newest: Occupancy | None = None
        oversampling = spec.rollout.oversampling
        self._factor = 1.0 if oversampling is None else oversampling.factor
        self._most_prompts = spec.rollout.prompts_per_step * (1 if oversampling is None else oversampling.limit)

    def next_step(self) -> Step:
        """Begin the next step."""
        # A checkpoint of partial rollout or tail batching has some.
        self._pool.drop_groups()
        return self._begun()

    def _begun(self) -> Step:
        return Step(self._progress.step + 1, self._progress.weight_version, occupancy=self._occupancy())

    def engine_loads(self) -> dict[str, int]:
        """Responses that each engine is asked for and did not return yet, by its name; thread-safe."""
        now = self._newest
        return {process.name: 0 if now is None else now.left(process.name) for process in self._engines}

    def open_groups(self) -> dict[str, int]:
        """Groups that are open now, by what they wait for, where they may outlast a step; thread-safe."""
        return {}

    def wants_round(self, step: Step) -> bool:
        """Whether the step has too few groups to train on; UserError where it may not draw more prompts."""
        rollout = self._spec.rollout
        missing = rollout.prompts_per_step - len(step.of(Decision.TRAINED))
        if missing and self._exhausted(step):
            raise UserError(too_few_groups(step, rollout))
        return missing > 0

    def generate(self, step: Step) -> None:
        """Draw prompts and generate all their responses; each group goes to its reward as soon as it is complete."""
        missing = self._spec.rollout.prompts_per_step - len(step.of(Decision.TRAINED))
        wanted = derived.prompts_of_round(missing, self._factor)
        drawn = self._pool.draw(min(wanted, self._most_prompts - step.drawn))
        prompts = [prompt for _, prompt in drawn]
        work = requests(prompts, self._spec.rollout.samples_per_prompt, self._spec.seed, step.number, step.drawn)
        step.responses = self._generate(work, drawn, self._sampling, step.occupancy)
        step.drafts += self._take_draft_counts()
        step.drawn += len(drawn)
        step.rounds += 1

    def collect_rewards(self, step: Step) -> None:
        """Wait for the rewards that generation did not hide, decide on each group, and make advantages of them."""
        new = step.responses
        for group, prompt, texts, results in zip(new.groups, new.prompts, new.texts, self._collect(new)):
            step.take(replace(group, results=tuple(results)), Decision.TRAINED, prompt, texts)
        if self._spec.rollout.oversampling is not None:
            step.groups = decided(step.groups, self._spec.rollout.prompts_per_step)
        trained = step.of(Decision.TRAINED)
        step.passed = len(trained)
        if len(trained) == self._spec.rollout.prompts_per_step:
            self._set_advantages(step)

    def _texts(self, group: Group) -> list[str]:
        """What its samples are in words."""
        return decode_responses(self._inputs.tokenizer, group.generations())

    def _exhausted(self, step: Step) -> bool:
        """Whether the step may draw no more prompts."""
        return step.drawn >= self._most_prompts

    def _set_advantages(self, step: Step) -> None:
        trained = step.of(Decision.TRAINED)
        step.advantages = step_advantages(
            self._algorithm,
            torch.from_numpy(np.concatenate([group.rewards for group in trained])),
            [len(group.results) for group in trained],
            torch.tensor(step.learned_lengths()),
            self._spec.algorithm,
        ).numpy()

    def evaluate(self) -> dict[str, float]:
        """Metrics of the held-out prompts; with the same seeds each time, evaluations differ by the weights alone.

        Raises:
            StopRequested: the job was asked to stop before it was done.
        """
        evaluation = self._spec.evaluation
        assert evaluation is not None
        alike: dict[int, list[Prompt]] = {}
        for prompt in self._inputs.evaluation_prompts:
            alike.setdefault(held_out_settings(evaluation, prompt.source).samples_per_prompt, []).append(prompt)
        scored = [one for group, prompts in alike.items() for one in self._evaluate(prompts, group)]
        # Those of the next step are its own.
        self._take_draft_counts()
        return aggregate(scored, evaluation)

    def _evaluate(self, prompts: list[Prompt], group: int) -> list[EvaluatedPrompt]:
        if self._stop.is_set():
            raise StopRequested
        work = requests(prompts, group, self._spec.seed, step=0)
        numbered = [NumberedPrompt(i, prompt) for i, prompt in enumerate(prompts)]
        responses = self._generate(work, numbered, evaluation_sampling(self._spec), self._occupancy())
        return [
            EvaluatedPrompt(
                prompt.source,
                [result.score for result in results],
                sum(episode.finish is Finish.LENGTH for episode in answered.episodes),
            )
            for prompt, answered, results in zip(prompts, responses.groups, self._collect(responses))
        ]

    def _occupancy(self) -> Occupancy:
        self._newest = Occupancy(len(self._engines), max_sequences(self._spec))
        return self._newest

    def _generate(
        self,
        work: list[GenerationRequest],
        prompts: list[NumberedPrompt],
        sampling: SamplingParams,
        occupancy: Occupancy,
    ) -> Responses:
        """Responses and their texts in the order of `work`, spread over the engines by whole prompt groups."""
        group, version = len(work) // len(prompts), self._progress.weight_version
        dispatch = self._dispatch(prompts, group)
        given = [[place * group + i for place in places for i in range(group)] for places in dispatch.first]
        parts = [[work[position] for position in positions] for positions in given]
        streams = self._engines.generate(parts, sampling, version, more=bool(dispatch))
        done: dict[int, tuple[Generation, str]] = {}
        missing = dict.fromkeys(range(len(prompts)), group)
        answered: dict[int, tuple[Group, tuple[str, ...]]] = {}
        names = [process.name for process in self._engines]
        for name, of_engine in zip(names, parts):
            occupancy.given(name, len(of_engine), time.monotonic())
        for engine, chunk in self._calls.stream("eval", streams):
            occupancy.came(names[engine], len(chunk), time.monotonic())
            texts = decode_responses(self._inputs.tokenizer, [generation for _, generation in chunk])
            for (index, generation), text in zip(chunk, texts):
                position = given[engine][index]
                done[position] = (generation, text)
                missing[position // group] -= 1
            complete = [prompt for prompt, left in missing.items() if not left]
            for place in complete:
                del missing[place]
                ordinal, prompt = prompts[place]
                samples = [done[place * group + i] for i in range(group)]
                self._inputs.rewards.submit([RewardSample(prompt, i, g, text) for i, (g, text) in enumerate(samples)])
                generations, written = zip(*samples)
                seed = work[place * group].seed
                answered[place] = answered_group(ordinal, version, prompt, generations, seed), written
                self._longest[prompt.uid] = max(len(generation.token_ids) for generation, _ in samples)
            if dispatch:
                fresh = [place * group + i for place in dispatch.take(len(complete)) for i in range(group)]
                given[engine] += fresh
                occupancy.given(names[engine], len(fresh), time.monotonic())
                more = self._engines.submit(engine, [work[position] for position in fresh], last=not dispatch)
                self._calls.gather("eval", more)
        if len(done) != len(work):
            phase = self._calls.phase("eval")
            raise JobError(f"{phase}: the engines returned {len(done)} of {len(work)} responses")
        in_order = [answered[place] for place in range(len(prompts))]
        return Responses(
            [group for group, _ in in_order],
            [prompt for _, prompt in prompts],
            [texts for _, texts in in_order],
            list(answered),
        )

    def _take_draft_counts(self) -> DraftCounts:
        """The guesses of all engines since the last time."""
        if self._spec.rollout.speculative is None:
            return DraftCounts()
        return sum(self._calls.gather("eval", self._engines.call(Engine.take_draft_counts)), DraftCounts())

    def _dispatch(self, prompts: list[NumberedPrompt], group: int) -> Dispatch:
        """Who generates what. Prompts whose responses were long the last time go first."""
        if self._spec.rollout.assignment is RolloutAssignment.FIXED:
            return Dispatch(len(prompts), len(self._engines))
        usual = sum(self._longest.values()) / max(1, len(self._longest))
        order = sorted(range(len(prompts)), key=lambda place: -self._longest.get(prompts[place].prompt.uid, usual))
        return Dispatch(len(prompts), len(self._engines), order, max(1, max_sequences(self._spec) // group))

    def _collect(self, responses: Responses) -> list[list[RewardResult]]:
        """The rewards of each group, in their order; StopRequested when the job was asked to stop."""
        results = self._scores()
        sizes = {place: len(responses.texts[place]) for place in responses.scored}
        by_place = {place: [next(results) for _ in range(size)] for place, size in sizes.items()}
        return [by_place[place] for place in range(len(responses.groups))]

    def _scores(self) -> Iterator[RewardResult]:
        """All rewards since the last time, in the order of their samples; StopRequested as above.

        Ray's job API sends a stop signal to all of the driver's descendants, so that scores of a reward that was just
        ended by it may be those of an error.
        """
        seconds = self._calls.deadline(self._calls.phase("reward"))
        results = self._inputs.rewards.collect(time.monotonic() + seconds)
        if self._stop.is_set():
            raise StopRequested
        return iter(results)
