"""Checks the rewards of a job's sources, and makes what scores them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api.quantities import to_number
from rljob_api.rewards import BUILTIN_REWARDS, SANDBOX_SHARE, function_file
from rljob_api.spec import DataSource, RewardSpec, RLJobSpec, SandboxSpec
from rljob_api.spec.sandbox import Isolation
from rljob_worker.confined.access import files_of
from rljob_worker.confined.bounds import Bounds, environment, network_can_be_closed, sweep
from rljob_worker.confined.files import Files
from rljob_worker.confined.kernel import Kernel
from rljob_worker.confined.process import Place
from rljob_worker.data.reward_rows import RoutedRows
from rljob_worker.data.sources import data_sources, evaluation_sources, prompt_and_label
from rljob_worker.errors import UserError
from rljob_worker.host.paths import home_expanded
from rljob_worker.rewards.builtin import check_args
from rljob_worker.rewards.inline import Inline, inline
from rljob_worker.rewards.judge import JudgeSetup, judge_of
from rljob_worker.rewards.model_judge import ModelJudge
from rljob_worker.rewards.pool import ASYNC_GRACE_SECONDS, WorkerPool
from rljob_worker.rewards.process import check_function
from rljob_worker.rewards.signatures import TOKENS_GIVEN
from rljob_worker.rewards.weighted_parts import Part, parts_of
from rljob_worker.rewards.worker import Calling, Setup
from rljob_worker.sandbox.kernel import refuse
from rljob_worker.sandbox.limits import BESIDE_MEMORY, SandboxSetup, ServiceSetup
from rljob_worker.sandbox.server import beside
from rljob_worker.sandbox.servers import servers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
MAX_PROCESSES = 4
MAX_ASYNC_CALLS = 256
"""Calls of one async reward that run at once."""
_ITSELF_SECONDS = 5.0
"""Past a judge's deadline, which it keeps itself."""


@dataclass(frozen=True, slots=True)
class Isolated:
    """A reward that processes of its own compute."""

    pool: WorkerPool
    batch: bool
    """Whether a call has all samples of a prompt."""
    tokens: bool = False
    """Whether it is given token ids."""


Scorer = Inline | Isolated | ModelJudge


class Scorers:
    """Scorers of the parts of a job's rewards; equal parts share one.

    Construction checks every reward and imports Python functions, in processes that end at once. UserError says what is
    wrong, and nothing was started.

    Args:
        spec: the job.
        tokenizer: of the model.
        columns: by a source's place in the manifest, those that a reward is given beside prompt and label.
        routed: by a source's place, its rows by the value that chooses their reward.
        workdir: working directory of the rewards; default: this process's.
        processes: how many score at once.
        private: folders of the job that no reward reads, wherever they are.
        judge: the judge whose model the job runs.
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
    ) -> None:
        sweep()
        self.judge = judge
        self._private = tuple(private)
        self.tokenizer = tokenizer
        self._workdir = (workdir or Path.cwd()).resolve()
        self._variables = dict(spec.environment.variables)
        self._sandbox = spec.sandbox or SandboxSpec()
        self._judges, self.seed = spec.judges, spec.seed
        self._max_response_tokens = spec.rollout.max_response_tokens
        self._callings: dict[str, Calling] = {}
        """By Python function with its arguments: how it is called."""
        self._processes = processes or min(MAX_PROCESSES, os.cpu_count() or 1)
        self._scorers: dict[str, Scorer] = {}
        self._known: dict[int, tuple[RewardSpec, list[tuple[Part, Scorer]]]] = {}
        for where, place, reward, source in _rewards(spec):
            for index, part in enumerate(parts_of(reward)):
                given = None if columns is None else columns.get(place)
                needed = source.label_key is None
                if part.rows is not None:
                    # Its own rows tell its columns; whether they have labels was looked at.
                    rows, needed = (routed or {}).get(place), False
                    given = None if rows is None else rows.columns_of(index)
                try:
                    self._check(part.reward, source, given, lacks_label=needed)
                except UserError as error:
                    raise type(error)(f"{where}{part.place}{str(error).removeprefix('reward')}") from error
            self.of(reward)

        if any(self.isolated()):
            for open_ in Kernel.here().remains():
                logger.warning("rewards run in processes of their own, but on this kernel %s", open_)

    def isolated(self) -> Iterator[Isolated]:
        """Scorers, made so far, that have processes of their own."""
        return (scorer for scorer in self._scorers.values() if isinstance(scorer, Isolated))

    def of(self, reward: RewardSpec) -> list[tuple[Part, Scorer]]:
        """A reward's parts, each with what scores it; made at the first call."""
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

    def _make_scorer(self, reward: RewardSpec) -> Scorer:
        if self._asks_model(reward):
            assert self.judge is not None
            return self.judge
        if (at_once := inline(reward, self.tokenizer, self._max_response_tokens)) is not None:
            return at_once
        calling = self._callings.get(reward.canonical_json())
        asynchronous = calling is not None and calling.asynchronous
        calls = MAX_ASYNC_CALLS
        if reward.name == "judge":
            calls = judge_of(self._judges, reward).concurrency
        elif reward.name == "code" and self._sandbox.service is not None:
            calls = self._sandbox.service.concurrency
        pool = WorkerPool(
            self._setup(reward),
            processes=1 if asynchronous else self._processes,
            in_flight=calls if asynchronous else 1,
            grace=ASYNC_GRACE_SECONDS if asynchronous else 0.0,
            place=self.place(reward),
        )
        if calling is None:
            return Isolated(pool, batch=False)
        return Isolated(pool, calling.grouped, calling.signature in TOKENS_GIVEN)

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
        self, reward: RewardSpec, source: DataSource, columns: frozenset[str] | None, *, lacks_label: bool
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
            if self.judge is None:
                name = judge_of(self._judges, reward).name
                raise UserError(
                    f"reward.name: judge {name} is a model on the job's own devices, which this command does not "
                    "start: leave it out here, or give it an endpoint"
                )
            self.judge.check(columns)
        elif reward.python is not None or reward.name == "judge":
            self._callings[reward.canonical_json()] = check_function(
                self._setup(reward, columns, prompt_and_label(source), tried=True), self.place(reward)
            )
        if reward.name == "code":
            self._check_sandbox(reward, source.label_key, columns)

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
        keys: frozenset[str] = frozenset(),
        *,
        tried: bool = False,
    ) -> Setup:
        judge = None
        if reward.name == "judge":
            judge = JudgeSetup(judge_of(self._judges, reward), self.seed, columns, tried)
        return Setup(
            reward.name,
            reward.python,
            reward.batch,
            dict(reward.args),
            self._seconds(reward),
            reward.import_seconds,
            columns,
            signature=reward.signature,
            keys=keys,
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


def _rewards(spec: RLJobSpec) -> Iterator[tuple[str, str, RewardSpec, DataSource]]:
    """Each source's reward with its place in the manifest, the source's, and the source."""
    for field_, source in data_sources(spec) + evaluation_sources(spec):
        reward = source.reward or spec.reward
        if reward is None:
            raise UserError(f"{field_}.reward: neither this source nor spec.reward says how responses are scored")
        yield f"{field_}.reward" if source.reward else "spec.reward", field_, reward, source
