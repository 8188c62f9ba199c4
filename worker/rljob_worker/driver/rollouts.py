"""Generation: prompts to the engines, responses to their rewards, and the evaluation of held-out prompts."""

from __future__ import annotations

import threading
import time

import torch

from rljob_api import RLJobSpec
from rljob_worker.algorithms import get_algorithm, step_advantages
from rljob_worker.data.evaluate import EvaluatedPrompt, aggregate, held_out_settings
from rljob_worker.data.tokenizer import decode_responses
from rljob_worker.driver.batch import evaluation_sampling, requests, split_by_engine, training_sampling
from rljob_worker.driver.groups import EngineGroup
from rljob_worker.driver.inputs import Inputs
from rljob_worker.driver.phase_calls import PhaseCalls
from rljob_worker.driver.step import Progress, Responses, Step
from rljob_worker.errors import JobError, StopRequested
from rljob_worker.rewards.runner import RewardSample
from rljob_worker.rewards.weighted_parts import RewardResult
from rljob_worker.types import Generation, GenerationRequest, Prompt, SamplingParams


class Rollouts:
    """Generates and scores.

    Args:
        spec: the job.
        engines: all of them.
        calls: waits for them.
        inputs: prompts, tokenizer and rewards.
        progress: how far the job is.
        stop: set when the job was asked to stop.
    """

    def __init__(
        self,
        spec: RLJobSpec,
        engines: EngineGroup,
        calls: PhaseCalls,
        inputs: Inputs,
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        self._spec = spec
        self._engines = engines
        self._calls = calls
        self._inputs = inputs
        self._progress = progress
        self._stop = stop
        self._algorithm = get_algorithm(spec.algorithm.name)
        self._sampling = training_sampling(spec)

    def next_step(self) -> Step:
        """Draw the prompts of the next step."""
        prompts = self._inputs.prompts.next_prompts(self._spec.rollout.prompts_per_step)
        return Step(self._progress.step + 1, self._progress.weight_version, prompts)

    def generate(self, step: Step) -> None:
        """Generate all responses; each prompt's group goes to its reward as soon as it is complete."""
        group = self._spec.rollout.samples_per_prompt
        work = requests(step.prompts, group, self._spec.seed, step.number)
        step.responses = self._generate(work, step.prompts, self._sampling)

    def collect_rewards(self, step: Step) -> None:
        """Wait for the rewards that generation did not hide, and turn them into advantages."""
        group = self._spec.rollout.samples_per_prompt
        results = self._collect(step.responses, group)
        scores = torch.tensor([result.score for result in results], dtype=torch.float32).view(-1, group)
        step.rewards = scores.numpy()
        step.reward_results = results
        lengths = torch.tensor([len(generation.token_ids) for generation in step.responses.generations]).view(-1, group)
        step.advantages = step_advantages(self._algorithm, scores, lengths, self._spec.algorithm).numpy()

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
        return aggregate(scored, evaluation)

    def _evaluate(self, prompts: list[Prompt], group: int) -> list[EvaluatedPrompt]:
        if self._stop.is_set():
            raise StopRequested
        work = requests(prompts, group, self._spec.seed, step=0)
        responses = self._generate(work, prompts, evaluation_sampling(self._spec))
        rewards = self._collect(responses, group)
        return [
            EvaluatedPrompt(
                prompt.source,
                [result.score for result in rewards[i * group : (i + 1) * group]],
                sum(g.finish_reason == "length" for g in responses.generations[i * group : (i + 1) * group]),
            )
            for i, prompt in enumerate(prompts)
        ]

    def _generate(self, work: list[GenerationRequest], prompts: list[Prompt], sampling: SamplingParams) -> Responses:
        """Responses and their texts in the order of `work`, spread over the engines by whole prompt groups."""
        group = len(work) // len(prompts)
        shares = split_by_engine(len(work), group, len(self._engines))
        parts = [work[share.start : share.stop] for share in shares]
        streams = self._engines.generate(parts, sampling, self._progress.weight_version)
        done: dict[int, tuple[Generation, str]] = {}
        missing = dict.fromkeys(range(len(prompts)), group)
        scored: list[int] = []
        for engine, chunk in self._calls.stream("eval", streams):
            texts = decode_responses(self._inputs.tokenizer, [generation for _, generation in chunk])
            for (index, generation), text in zip(chunk, texts):
                position = shares[engine].start + index
                done[position] = (generation, text)
                missing[position // group] -= 1
            complete = [prompt for prompt, left in missing.items() if not left]
            for prompt in complete:
                del missing[prompt]
                samples = [(i, *done[prompt * group + i]) for i in range(group)]
                self._inputs.rewards.submit([RewardSample(prompts[prompt], i, g, text) for i, g, text in samples])
            scored += complete
        if len(done) != len(work):
            phase = self._calls.phase("eval")
            raise JobError(f"{phase}: the engines returned {len(done)} of {len(work)} responses")
        return Responses([done[i][0] for i in range(len(work))], [done[i][1] for i in range(len(work))], scored)

    def _collect(self, responses: Responses, group: int) -> list[RewardResult]:
        """Their rewards, in their order; StopRequested when the job was asked to stop.

        Ray's job API sends a stop signal to all of the driver's descendants, so that scores of a reward that was just
        ended by it may be those of an error.
        """
        seconds = self._calls.deadline(self._calls.phase("reward"))
        results = self._inputs.rewards.collect(time.monotonic() + seconds)
        if self._stop.is_set():
            raise StopRequested
        by_prompt = {prompt: results[i * group : (i + 1) * group] for i, prompt in enumerate(responses.scored)}
        return [result for prompt in sorted(by_prompt) for result in by_prompt[prompt]]
