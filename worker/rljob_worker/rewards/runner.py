"""Scores responses while others are still being generated."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.quantities import to_number
from rljob_api.rewards import BUILTIN_REWARDS, SANDBOX_SHARE, function_file, token_limit
from rljob_api.spec import RewardSpec, RLJobSpec, SandboxSpec
from rljob_api.spec.sandbox import Isolation
from rljob_worker.confined.access import files_of
from rljob_worker.confined.bounds import Bounds, environment, network_can_be_closed, sweep
from rljob_worker.confined.files import Files
from rljob_worker.confined.kernel import Kernel
from rljob_worker.confined.process import Place
from rljob_worker.data.reward_rows import RoutedRows
from rljob_worker.data.sources import TURNS, data_sources, evaluation_sources
from rljob_worker.data.tokenizer import decode_responses
from rljob_worker.errors import UserError
from rljob_worker.flow.turns import total_reward
from rljob_worker.host.paths import home_expanded
from rljob_worker.models.judge_model import Said
from rljob_worker.rewards.builtin import (
    check_args,
    exact,
    gsm8k,
    length_penalty,
    make_format,
    overlong_penalty,
)
from rljob_worker.rewards.busy_clock import BusyClock
from rljob_worker.rewards.functions import RewardFailure, Sample, Score
from rljob_worker.rewards.judge import JudgeSetup, judge_of
from rljob_worker.rewards.judge_texts import TRIES, seed_of
from rljob_worker.rewards.match import Match
from rljob_worker.rewards.model_judge import ModelJudge, Questions
from rljob_worker.rewards.pool import ASYNC_GRACE_SECONDS, WorkerPool
from rljob_worker.rewards.process import check_function
from rljob_worker.rewards.score_calls import RewardSample, ScoreCall, ScoreCalls
from rljob_worker.rewards.weighted_parts import Part, parts_of
from rljob_worker.rewards.worker import Calling, Setup
from rljob_worker.sandbox.kernel import refuse
from rljob_worker.sandbox.limits import BESIDE_MEMORY, SandboxSetup, ServiceSetup
from rljob_worker.sandbox.server import beside
from rljob_worker.sandbox.servers import servers
from rljob_worker.types import RewardResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
MAX_PROCESSES = 4
MAX_ASYNC_CALLS = 256
"""Calls of one async reward that run at once."""
_ITSELF_SECONDS = 5.0
"""Past a judge's deadline, which it keeps itself."""


class RewardRunner:
    """Runs the rewards of a job's sources.

    Built-in rewards that take linear time are scored at once in the caller's thread. `regex`, `math` and Python
    functions run in processes of their own, so that a hung one can be killed: sync functions one call at a time in each
    of up to `processes`, async ones up to 256 at once in one. The working directory is on `sys.path` for them.

    Construction checks every reward and imports Python functions, in processes that end at once: no code of a user runs
    in the driver. UserError says what is wrong, and nothing was started. Use as a context manager, or `close()`. One
    thread submits and one collects; they may be two.
    """

    def __init__(
        self,
        spec: RLJobSpec,
        tokenizer: PreTrainedTokenizerBase,
        *,
        columns: Mapping[str, frozenset[str]] | None = None,
        routed: Mapping[str, RoutedRows] | None = None,
        workdir: Path | None = None,
        processes: int | None = None,
        private: Iterable[Path] = (),
        judge: ModelJudge | None = None,
    ):
        """Check all rewards.

        Args:
            spec: the job.
            tokenizer: of the model.
            columns: by a source's place in the manifest, those that a reward is given beside prompt and label.
            routed: by a source's place, its rows by the value that chooses their reward.
            workdir: working directory of the rewards; default: this process's.
            processes: how many score at once.
            private: folders of the job that no reward reads, wherever they are.
            judge: the judge whose model the job runs; `questions` has what it is asked.
        """
        sweep()
        self._judge = judge
        self._asked: list[_Question] = []
        self._private = tuple(private)
        self._tokenizer = tokenizer
        self._workdir = (workdir or Path.cwd()).resolve()
        self._variables = dict(spec.environment.variables)
        self._sandbox = spec.sandbox or SandboxSpec()
        self._judges, self._seed = spec.judges, spec.seed
        self._max_response_tokens = spec.rollout.max_response_tokens
        self._callings: dict[str, Calling] = {}
        """By Python function with its arguments: how it is called."""
        self._processes = processes or min(MAX_PROCESSES, os.cpu_count() or 1)
        self._calls = ScoreCalls(self._forget_queued)
        self._clock = BusyClock()
        self._scorers: dict[str, _Scorer] = {}
        self._known: dict[int, tuple[RewardSpec, list[tuple[Part, _Scorer]]]] = {}
        for where, source, reward, label_key in _rewards(spec):
            for index, part in enumerate(parts_of(reward)):
                given = None if columns is None else columns.get(source)
                needed = label_key is None
                if part.rows is not None:
                    # Its own rows tell its columns; whether they have labels was looked at.
                    rows, needed = (routed or {}).get(source), False
                    given = None if rows is None else rows.columns_of(index)
                try:
                    self._check(part.reward, label_key, given, lacks_label=needed)
                except UserError as error:
                    raise type(error)(f"{where}{part.place}{str(error).removeprefix('reward')}") from error
            self._scorers_of(reward)

        if any(isinstance(scorer, _Isolated) for scorer in self._scorers.values()):
            for open_ in Kernel.here().remains():
                logger.warning("rewards run in processes of their own, but on this kernel %s", open_)

    def start(self) -> None:
        """Start the scoring processes ahead of the first `submit`."""
        for scorer in self._scorers.values():
            if isinstance(scorer, _Isolated):
                scorer.pool.start()

    def submit(self, samples: Sequence[RewardSample]) -> None:
        """Begin to score, without waiting. Samples of one prompt that share a batch reward are one call: submit a
        prompt's group whole."""
        now = time.monotonic()
        parts = [
            [ScoreCall(sample, part, now) for part, _ in self._scorers_of(sample.prompt.reward)] for sample in samples
        ]
        self._calls.begin(parts)
        with self._clock:
            for _, group in groupby(parts, key=lambda calls: id(calls[0].sample.prompt.reward)):
                calls = list(group)
                for index, (_, scorer) in enumerate(self._scorers_of(calls[0][0].sample.prompt.reward)):
                    members = [of_sample[index] for of_sample in calls]
                    if isinstance(scorer, _Inline):
                        self._score_inline(scorer, members)
                    elif isinstance(scorer, ModelJudge):
                        self._ask(scorer, members)
                    else:
                        self._score_isolated(scorer, members)

    def take_all(self, deadline: float) -> list[tuple[RewardSample, RewardResult]]:
        """The results of all samples that were submitted and not taken, each with its sample, in that order.

        Waits until `deadline` (`time.monotonic()`) at most. Raises RewardError when a reward failed under
        `onError: Fail` (at once, without waiting for the others) or when the deadline passed; it names the sample,
        and what was submitted is forgotten.
        """
        return self._calls.take_all(deadline)

    def take(self, patience: float, seconds: float) -> list[tuple[RewardSample, RewardResult]]:
        """The results that have come since the last time, each with its sample, in the order of their submission.

        Args:
            patience: seconds to wait for one where none has come; none may come in that time.
            seconds: that a reward may take from its submission on.

        Raises:
            RewardError: as `take_all`.
        """
        return self._calls.take(patience, seconds)

    @property
    def outstanding(self) -> int:
        """Calls that were begun and have not ended; those of which `take_all` or `take` raised do not count."""
        return self._calls.outstanding

    def score(self, samples: Sequence[RewardSample], deadline: float) -> list[RewardResult]:
        """`submit`, then `take_all`: the results in the order of the samples."""
        self.submit(samples)
        return [result for _, result in self.take_all(deadline)]

    def questions(self) -> Questions | None:
        """Texts for the judge's model of all that was submitted, in the order of prompts and samples; None:
        nothing. Called by the thread that submits; nothing is asked twice."""
        asked, self._asked = sorted(self._asked, key=lambda one: one.place), []
        return self._questions(asked, 0)

    def _questions(self, asked: Sequence[_Question], count: int) -> Questions | None:
        """These, of which the judge was asked so many times before."""
        judge, round_ = self._judge, self._calls.round
        if judge is None or not asked:
            return None

        def answer(answers: Sequence[float | Said]) -> Questions | None:
            found = [judge.verdict(said, last=count + 1 == TRIES) for said in answers]
            pairs = list(zip(asked, found, strict=True))
            self._calls.end(
                [
                    (one.call, _outcome(one.call, score) if isinstance(score, Score) else score)
                    for one, score in pairs
                    if score is not None
                ],
                round_,
            )
            return self._questions([one for one, score in pairs if score is None], count + 1)

        seeds = [seed_of(self._seed, judge.spec.name, one.key, count) for one in asked]
        return Questions([one.tokens for one in asked], seeds, judge.writes, answer)

    def take_busy_seconds(self) -> float:
        """Wall-clock seconds, since the last call, during which at least one sample was being scored."""
        return self._clock.take()

    def close(self) -> None:
        """End the scoring processes."""
        for scorer in self._scorers.values():
            if isinstance(scorer, _Isolated):
                scorer.pool.close()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _scorers_of(self, reward: RewardSpec) -> list[tuple[Part, _Scorer]]:
        known = self._known.get(id(reward))
        if known is None:
            found = []
            for part in parts_of(reward):
                key = part.reward.canonical_json()
                if key not in self._scorers:
                    self._scorers[key] = self._make_scorer(part.reward)
                found.append((part, self._scorers[key]))
            # The spec is kept with it: its id stays taken.
            known = self._known[id(reward)] = reward, found
        return known[1]

    def _make_scorer(self, reward: RewardSpec) -> _Scorer:
        if self._asks_model(reward):
            assert self._judge is not None
            return self._judge
        if reward.name == "match":
            match = Match(self._tokenizer)
            return _alone(lambda sample, _: match(sample.generation.token_ids, _label(sample)), needs_text=False)
        if (inline := _inline(reward, self._max_response_tokens)) is not None:
            return inline
        calling = self._callings.get(reward.canonical_json())
        asynchronous = calling is not None and calling.asynchronous
        at_once = MAX_ASYNC_CALLS
        if reward.name == "judge":
            at_once = judge_of(self._judges, reward).concurrency
        elif reward.name == "code" and self._sandbox.service is not None:
            at_once = self._sandbox.service.concurrency
        pool = WorkerPool(
            self._setup(reward),
            processes=1 if asynchronous else self._processes,
            in_flight=at_once if asynchronous else 1,
            grace=ASYNC_GRACE_SECONDS if asynchronous else 0.0,
            place=self.place(reward),
        )
        return _Isolated(pool, calling is not None and calling.grouped)

    def _asks_model(self, reward: RewardSpec) -> bool:
        return reward.name == "judge" and judge_of(self._judges, reward).model is not None

    def place(self, reward: RewardSpec) -> Place:
        """Place of code with the bounds of this reward; UserError where a path that it names is not there."""
        endpoint = judge_of(self._judges, reward).endpoint if reward.name == "judge" else None
        key = None if endpoint is None else endpoint.key_variable
        variables = environment(self._variables, [*reward.environment, *([key] if key else [])])
        files = self._files(reward, variables)
        memory = int(to_number(reward.memory))
        if reward.name == "code" and self._sandbox.service is None:
            # Its tests may run beside the program.
            memory += 2 * (int(to_number(self._sandbox.memory)) + BESIDE_MEMORY)
        server = None
        if reward.name == "code" and self._sandbox.isolation == Isolation.NAMESPACE:
            server = beside(tests=reward.args["kind"] == "Pytest")
        return Place(self._workdir, variables, Bounds(memory, files, reward.network, beside=server))

    def _files(self, reward: RewardSpec, variables: Mapping[str, str]) -> Files:
        paths: dict[str, list[str]] = {}
        for field, named in (("readPaths", reward.read_paths), ("writePaths", reward.write_paths)):
            paths[field] = [str(home_expanded(path)) for path in named]
            for path in paths[field]:
                if not os.path.exists(path):
                    raise UserError(f"reward.{field}: {path}: there is no such file or folder")
        function = function_file(reward.python)
        code = [self._workdir, *([Path(function[0]).parent] if function else [])]
        return files_of(code, paths["readPaths"], paths["writePaths"], self._private, variables)

    def _check(
        self, reward: RewardSpec, label_key: str | None, columns: frozenset[str] | None, *, lacks_label: bool
    ) -> None:
        """UserError, which begins with `reward`, when the reward cannot be used."""
        if reward.python is None:
            assert reward.name is not None
            check_args(reward.name, reward.args)
            needs_label = BUILTIN_REWARDS[reward.name].compares or reward.args.get("compare") is True
            if needs_label and lacks_label:
                raise UserError(f"reward.name: {reward.name} compares with a label, but the source's labelKey is null")
        if not reward.network and not network_can_be_closed():
            raise UserError(
                "reward.network: false needs a network namespace, which this kernel or container does not allow; "
                "leave it out, and close the network from outside (a NetworkPolicy)"
            )
        if self._asks_model(reward):
            if self._judge is None:
                name = judge_of(self._judges, reward).name
                raise UserError(
                    f"reward.name: judge {name} is a model on the job's own devices, which this command does not "
                    "start: leave it out here, or give it an endpoint"
                )
            self._judge.check(columns)
        elif reward.python is not None or reward.name == "judge":
            self._callings[reward.canonical_json()] = check_function(
                self._setup(reward, columns, label_key, tried=True), self.place(reward)
            )
        if reward.name == "code":
            self._check_sandbox(reward, label_key, columns)

    def _check_sandbox(self, reward: RewardSpec, label_key: str | None, columns: frozenset[str] | None) -> None:
        """UserError where no program can be run here, or the columns of its tests are not there."""
        there = {*(columns or ()), *([label_key] if label_key else [])}
        for key in ("tests", "prefix"):
            name = reward.args.get(key)
            if name is not None and columns is not None and not {name, name.partition(".")[0]} & there:
                known = ", ".join(sorted(there))
                raise UserError(f"reward.args.{key}: {name!r} is no column of the data; there are {known}")
        if self._sandbox.service is None:
            refuse(Kernel.here(), self._sandbox)
        self._callings[reward.canonical_json()] = check_function(self._setup(reward, tried=True), self.place(reward))

    def _setup(
        self,
        reward: RewardSpec,
        columns: frozenset[str] | None = None,
        label_key: str | None = None,
        *,
        tried: bool = False,
    ) -> Setup:
        judge = None
        if reward.name == "judge":
            judge = JudgeSetup(judge_of(self._judges, reward), self._seed, columns, tried)
        return Setup(
            reward.name,
            reward.python,
            reward.batch,
            dict(reward.args),
            self._seconds(reward),
            reward.import_seconds,
            columns,
            signature=reward.signature,
            label_key=label_key,
            sandbox=self._sandbox_setup(reward, tried) if reward.name == "code" else None,
            judge=judge,
        )

    def _seconds(self, reward: RewardSpec) -> float:
        """Deadline of a call; past that of what asks others, which keeps its own."""
        if reward.name == "judge":
            return judge_of(self._judges, reward).timeout_seconds + _ITSELF_SECONDS
        if reward.name == "code" and self._sandbox.service is not None:
            return reward.timeout_seconds + self._sandbox.service.wait_seconds + _ITSELF_SECONDS
        return reward.timeout_seconds

    def _sandbox_setup(self, reward: RewardSpec, tried: bool) -> SandboxSetup:
        service = self._sandbox.service
        return SandboxSetup(
            int(to_number(self._sandbox.memory)),
            self._sandbox.seconds,
            self._sandbox.isolation == Isolation.NAMESPACE,
            None
            if service is None
            else ServiceSetup(
                tuple(servers(self._sandbox)),
                service.concurrency,
                service.wait_seconds,
                SANDBOX_SHARE * reward.timeout_seconds,
                tried,
            ),
        )

    def _score_inline(self, scorer: _Inline, calls: list[ScoreCall]) -> None:
        texts = self._texts(calls) if scorer.needs_text else [""] * len(calls)
        outcomes: list[tuple[ScoreCall, RewardResult | RewardFailure]] = []
        for call, text in zip(calls, texts):
            try:
                outcomes.append((call, RewardResult(*scorer.score(call.sample, text))))
            except Exception as error:
                outcomes.append((call, RewardFailure(f"{type(error).__name__}: {error}")))
        self._calls.end(outcomes, self._calls.round)

    def _ask(self, judge: ModelJudge, calls: list[ScoreCall]) -> None:
        failed: list[tuple[ScoreCall, RewardResult | RewardFailure]] = []
        for call, text in zip(calls, self._texts(calls)):
            try:
                payload = _payload(call.sample, text)
                self._asked.append(_Question(call, judge.tokens(payload), payload["key"]))
            except ValueError as error:
                failed.append((call, judge.lacks(str(error))))
        self._calls.end(failed, self._calls.round)

    def _score_isolated(self, scorer: _Isolated, calls: list[ScoreCall]) -> None:
        texts = self._texts(calls)
        pairs = list(zip(calls, texts))
        tasks: Iterable[list[tuple[ScoreCall, str]]] = ([pair] for pair in pairs)
        if scorer.batch:
            tasks = (list(group) for _, group in groupby(pairs, key=lambda pair: pair[0].sample.prompt.uid))
        for task in tasks:
            self._clock.enter()
            samples: list[Sample] = [_payload(call.sample, text) for call, text in task]
            scorer.pool.submit(samples, self._receiver([call for call, _ in task]))

    def _receiver(self, calls: list[ScoreCall]) -> Callable[[list[Score] | RewardFailure], None]:
        round_ = self._calls.round

        def done(scores: list[Score] | RewardFailure) -> None:
            self._clock.exit()
            if isinstance(scores, RewardFailure):
                self._calls.end([(call, scores) for call in calls], round_)
            else:
                self._calls.end([(call, _outcome(call, score)) for call, score in zip(calls, scores)], round_)

        return done

    def _texts(self, calls: list[ScoreCall]) -> list[str]:
        known = [call.sample.text for call in calls]
        if None in known:
            return decode_responses(self._tokenizer, [call.sample.generation for call in calls])
        return [text for text in known if text is not None]

    def _forget_queued(self) -> None:
        self._asked = []
        for scorer in self._scorers.values():
            if isinstance(scorer, _Isolated):
                for _ in range(scorer.pool.cancel_queued()):
                    self._clock.exit()


@dataclass(frozen=True, slots=True)
class _Inline:
    score: Callable[[RewardSample, str], tuple[float, dict[str, float]]]
    """Score of a response and its text, and the values recorded beside it."""
    needs_text: bool


@dataclass(frozen=True, slots=True)
class _Isolated:
    pool: WorkerPool
    batch: bool


_Scorer = _Inline | _Isolated | ModelJudge


@dataclass(frozen=True, slots=True)
class _Question:
    call: ScoreCall
    tokens: list[int]
    key: str
    """Name of the sample, for the seed of an answer."""

    @property
    def place(self) -> tuple[int, int, str]:
        """By prompt, sample and part: in whatever order groups were complete, a judge sees them in this one."""
        sample = self.call.sample
        return -1 if sample.ordinal is None else sample.ordinal, sample.index, self.call.part.place


def _inline(reward: RewardSpec, max_response_tokens: int) -> _Inline | None:
    """A built-in reward whose time is linear in the response, whatever that is: it needs no process to be ended."""
    args = reward.args
    limit = token_limit(args, max_response_tokens)
    if reward.name == "exact":
        return _alone(lambda sample, text: exact(text, _label(sample)), needs_text=True)
    if reward.name == "gsm8k":
        return _alone(lambda sample, text: gsm8k(text, _label(sample), **args), needs_text=True)
    if reward.name == "format":
        fits = make_format(**args)
        return _alone(lambda _, text: fits(text), needs_text=True)
    if reward.name == "length":
        target = args.get("target", 0)
        return _alone(lambda sample, _: length_penalty(_tokens(sample), limit, target), needs_text=False)
    if reward.name == "overlong":
        return _alone(lambda sample, _: overlong_penalty(_tokens(sample), limit, args["cache"]), needs_text=False)
    if reward.name == "environment":
        return _Inline(_of_environment, needs_text=False)
    return None


def _alone(score: Callable[[RewardSample, str], float], *, needs_text: bool) -> _Inline:
    """A score with nothing beside it."""
    return _Inline(lambda sample, text: (score(sample, text), {}), needs_text)


def _of_environment(sample: RewardSample, _: str) -> tuple[float, dict[str, float]]:
    """The reward of an episode, and the numbers that came with its last turn."""
    if not sample.turns:
        raise ValueError("the prompt has no environment")
    return total_reward(sample.turns), dict(sample.turns[-1].values)


def _outcome(call: ScoreCall, score: Score) -> RewardResult | RewardFailure:
    """Outcome of a call; a part may leave a sample to the others."""
    if score.value is not None:
        notes = {} if score.note is None else {call.part.name or "judge": score.note}
        return RewardResult(score.value, score.parts, notes=notes)
    if call.part.name is None:
        return RewardFailure("the reward returned None, which is no score, and there is no other")
    return RewardResult(0.0, absent=True)


def _tokens(sample: RewardSample) -> int:
    return len(sample.generation.token_ids)


def _label(sample: RewardSample) -> str:
    if sample.prompt.label is None:
        raise ValueError("the prompt has no label")
    return sample.prompt.label


def _payload(sample: RewardSample, text: str) -> dict[str, Any]:
    return {
        "prompt": sample.prompt.text,
        "response": text,
        "label": sample.prompt.label,
        "finish_reason": sample.generation.finish_reason,
        "metadata": _metadata(sample),
        "row": sample.prompt.row,
        "raw_label": sample.prompt.row.get(sample.prompt.label_key, sample.prompt.label)
        if sample.prompt.label_key
        else None,
        "messages": sample.prompt.messages,
        "source": sample.prompt.source,
        "response_tokens": _tokens(sample),
        "key": f"{sample.prompt.uid if sample.ordinal is None else sample.ordinal}/{sample.index}",
    }


def _metadata(sample: RewardSample) -> Mapping[str, object]:
    """The row's other columns, and of an episode its turns."""
    if not sample.turns:
        return sample.prompt.metadata
    turns = [
        {"action": turn.action, "observation": turn.observation, "reward": turn.reward, "values": dict(turn.values)}
        for turn in sample.turns
    ]
    return {**sample.prompt.metadata, TURNS: turns}


def _rewards(spec: RLJobSpec) -> Iterator[tuple[str, str, RewardSpec, str | None]]:
    """Each source's reward with its place in the manifest, the source's, and the source's label key."""
    for field_, source in data_sources(spec) + evaluation_sources(spec):
        reward = source.reward or spec.reward
        if reward is None:
            raise UserError(f"{field_}.reward: neither this source nor spec.reward says how responses are scored")
        yield f"{field_}.reward" if source.reward else "spec.reward", field_, reward, source.label_key
