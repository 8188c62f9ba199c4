"""The environments of a job: their hosts, what they say, and how that becomes tokens."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from rljob_api import RLJobSpec, derived
from rljob_api.quantities import to_number
from rljob_api.spec import DataSource, Mode, TextEnvironmentSpec, ToolSpec
from rljob_api.spec.episodes import EpisodeError
from rljob_worker.data.chat import ChatTemplate, read_template
from rljob_worker.data.sources import data_sources, evaluation_sources
from rljob_worker.data.turns import OBSERVED_BY, TOOL, Message, Render, Schema, TurnRenderer
from rljob_worker.environments.base import AgentSource, Began, EnvironmentFailure, Stepped
from rljob_worker.environments.check import Checked, check_environment, failure_error
from rljob_worker.environments.host_process import Deadlines
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.environments.load import Source
from rljob_worker.environments.place import environment_place
from rljob_worker.environments.tools import ToolSource
from rljob_worker.errors import UserError
from rljob_worker.flow.turns import Budget
from rljob_worker.models.generation_config import end_tokens
from rljob_worker.rollouts.observations import Observations, check_room
from rljob_worker.rollouts.world import World
from rljob_worker.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_PROCESSES = 4
_LISTENED = 64
"""Episodes of which a trained tokenizer has its words."""
_LISTENED_STEPS = 8
_PATIENCE_SECONDS = 0.5
_IMPORT_SECONDS = 300.0
"""For the import of vLLM or of an agent's packages, several at once on a busy machine."""


class JobEnvironments:
    """The environments of a job's sources, in hosts that those of equal settings share.

    In mode `Async` those of evaluations have hosts of their own: training's episodes are open meanwhile.

    Construction tries each of them, in processes that end at once.

    Args:
        spec: the job.
        private: folders of the job that no environment reads.
        fields: places in the manifest of the sources that are meant; None: all.
        here: whether the job runs on this machine, whose cores are then its own.

    Raises:
        UserError: an environment cannot be used, or has too few places.
    """

    def __init__(
        self,
        spec: RLJobSpec,
        private: Iterable[Path] = (),
        *,
        fields: Container[str] | None = None,
        here: bool = True,
    ) -> None:
        self._spec, self._private, self._here = spec, tuple(private), here
        self._sources = [
            (field, source) for field, source in environment_sources(spec) if fields is None or field in fields
        ]
        self._hosts: dict[tuple[str, bool], EnvironmentHosts] = {}
        """By the environment's settings, and whether they are apart from those of training."""
        self._schemas: dict[str, list[Schema]] = {}
        """Schemas of tools, by the settings alone."""
        self._parsing: set[str] = set()
        """Tools whose hosts read calls."""
        self._checked: dict[str, Checked] = {}
        self._trained = {field for field, _ in data_sources(spec)}
        for field, source in self._sources:
            assert source.environment is not None
            if _key(source) not in self._checked:
                try:
                    self._check(source)
                except UserError as error:
                    raise type(error)(_placed(field, error)) from None
            key = _key(source), self._apart(field)
            hosts = self._hosts[key] = self._hosts.get(key) or self._made(source.environment)
            if field in self._trained:
                self._check_places(field, source.environment, hosts)

    @property
    def hosts(self) -> list[EnvironmentHosts]:
        """All of them; none has a process yet."""
        return list(self._hosts.values())

    def spoken(self) -> list[str]:
        """Texts that environments say and take in some episodes, for a tokenizer that is trained; the same each
        time."""
        texts: list[str] = []
        # Those of an environment in training come first.
        listened: dict[str, tuple[str, DataSource]] = {}
        for field, source in self._sources:
            listened.setdefault(_key(source), (field, source))
        for field, source in listened.values():
            assert source.environment is not None
            examples = self._checked[_key(source)].examples
            if source.seeds is None:
                texts += [*examples, *(self._tool_names(source) if source.environment.tools is not None else [])]
                continue
            seeds = range(source.seeds.first, source.seeds.first + min(source.seeds.count, _LISTENED))
            with self._made(source.environment, per_process=_LISTENED, processes=1) as hosts:
                texts += [*examples, *_said(hosts, seeds, examples, field)]
        return texts

    def tools(self) -> dict[str, list[Schema]]:
        """Schemas of the tools that a policy may call, by the place in the manifest of the source."""
        return {field: self._schemas[key] for field, source in self._sources if (key := _key(source)) in self._schemas}

    def openings(self) -> dict[str, tuple[int, Began]]:
        """Seed and first observation with which each environment was tried, by the first source that has it."""
        found: dict[str, tuple[int, Began]] = {}
        for key, checked in self._checked.items():
            field, source = next(one for one in self._sources if _key(one[1]) == key)
            if source.seeds is None:
                continue
            began = checked.answers[0]
            assert isinstance(began, Began)
            found[field] = source.seeds.first, began
        return found

    def worlds(
        self, tokenizer: PreTrainedTokenizerBase, model_folder: Path, first: Mapping[str, Prompt] | None = None
    ) -> dict[str, World]:
        """Each source's environment and how its turns become tokens, by the source's place in the manifest.

        Tools get the parser of their calls here, which reads by the model's tokenizer.

        Args:
            tokenizer: from the folder of the job's.
            model_folder: with the model's generation config.
            first: a prompt of each source with tools, by its place: they are tried with its row.

        Raises:
            UserError: a chat template is one that a stream cannot follow, what environments said when they were
                tried leaves no room for answers, or calls of tools cannot be read.
        """
        episodes = self._spec.episodes
        if not self._sources or episodes is None:
            return {}
        assert tokenizer.eos_token_id is not None
        stops = [int(tokenizer.eos_token_id), *end_tokens(model_folder), *self._spec.rollout.stop_token_ids]
        budget = Budget(episodes.max_turns, derived.max_tokens_per_turn(self._spec), episodes.max_tokens)
        found = {}
        for field, source in self._sources:
            key = _key(source)
            role = TOOL if key in self._schemas else OBSERVED_BY
            render = self._render(field, source, tokenizer)
            renderer = TurnRenderer(render, tokenizer, stops, _where(field, source), role)
            system = None if source.chat is None else source.chat.system
            observations = Observations(renderer, tokenizer, episodes.max_observation_tokens, system)
            if key in self._schemas:
                self._read_calls(field, source, str(tokenizer.name_or_path), (first or {}).get(field))
            elif source.seeds is None:
                self._try_agent(field, source, observations, budget, (first or {}).get(field))
            else:
                check_room(field, observations, budget, self._checked[key].answers)
            found[field] = World(
                self._hosts[key, self._apart(field)],
                observations,
                budget,
                episodes.error_reward if episodes.on_error is EpisodeError.END else None,
                episodes.max_error_share,
            )
        return found

    def _render(self, field: str, source: DataSource, tokenizer: PreTrainedTokenizerBase) -> Render:
        if source.apply_chat_template:
            tools = self._schemas.get(_key(source), ())
            return ChatTemplate(source, field, tokenizer, read_template(source, field), tools).conversation
        assert self._spec.episodes is not None
        return plain(self._spec.episodes.before, self._spec.episodes.after)

    def _apart(self, field: str) -> bool:
        return self._spec.mode is Mode.ASYNC and field not in self._trained

    def _check(self, source: DataSource) -> None:
        environment, seeds = source.environment, source.seeds
        assert environment is not None
        if seeds is None:
            self._check_tools(_key(source), environment)
            return
        checked = check_environment(
            # Two episodes are played beside each other, also where a process of the job holds one.
            lambda: self._made(environment, processes=1, per_process=max(2, environment.per_process), retries=0),
            (seeds.first, seeds.first + 1),
        )
        if derived.is_deterministic(environment) and not checked.repeats:
            raise UserError(
                "environment.deterministic: the same seed and actions give other answers each time; allowed: false"
            )
        self._checked[_key(source)] = checked

    def _check_tools(self, key: str, environment: TextEnvironmentSpec) -> None:
        """Import an agent, or tools and have their schemas; no answer can be read before there is a tokenizer."""
        with self._made(environment, processes=1, retries=0) as hosts:
            hosts.start()
            self._checked[key] = Checked(False, tuple(hosts.examples))
            if environment.tools is not None:
                self._schemas[key] = hosts.schemas

    def _tool_names(self, source: DataSource) -> list[str]:
        return [str(schema["function"]["name"]) for schema in self._schemas[_key(source)]]

    def _read_calls(self, field: str, source: DataSource, tokenizer: str, prompt: Prompt | None) -> None:
        """Give tools the parser of their calls, and begin an episode with them."""
        key, environment = _key(source), source.environment
        assert environment is not None
        if key not in self._parsing:
            with self._made(environment, processes=1, retries=0, tokenizer=tokenizer) as hosts:
                try:
                    hosts.start()
                except UserError as error:
                    raise type(error)(_placed(field, error)) from None
            for place in [place for place in self._hosts if place[0] == key]:
                self._hosts[place] = self._made(environment, tokenizer=tokenizer)
            self._parsing.add(key)
        if prompt is not None:
            # Without the parser, whose import takes seconds.
            self._begun(field, environment, prompt)

    def _try_agent(
        self, field: str, source: DataSource, observations: Observations, budget: Budget, prompt: Prompt | None
    ) -> None:
        """Begin an episode of an agent, and refuse a first call that would be cut, or leaves no room for an answer."""
        if prompt is None:
            return
        assert source.environment is not None
        began = self._begun(field, source.environment, prompt)
        assert began.call is not None
        for place, (role, text) in enumerate(began.call.messages):
            if found := observations.too_long(text):
                assert self._spec.episodes is not None
                raise UserError(
                    f"spec.episodes.maxObservationTokens: {self._spec.episodes.max_observation_tokens}, and messages"
                    f"[{place}] ({role}) of the first call of {field}.environment.agent with row {prompt.uid} has "
                    f"{found} tokens: its middle would be left out; allowed: {found} or more"
                )
        try:
            first = len(observations.conversation(began.call.messages))
        except ValueError as error:
            raise UserError(f"{field}.environment.agent: row {prompt.uid}: {error}") from None
        if first + budget.max_answer > budget.max_tokens:
            raise UserError(
                f"spec.episodes.maxTokens: {budget.max_tokens}, and the first call of {field}.environment.agent with "
                f"row {prompt.uid} has {first} tokens, which leaves no room for an answer of {budget.max_answer}; "
                f"allowed: {first + budget.max_answer} or more"
            )

    def _begun(self, field: str, environment: TextEnvironmentSpec, prompt: Prompt) -> Began:
        """Begin of an episode with a row; UserError where it fails."""
        with self._made(environment, processes=1, retries=0) as hosts:
            hosts.begin(0, prompt.seed, prompt.options)
            while True:
                for _, answer in hosts.take(_PATIENCE_SECONDS):
                    if isinstance(answer, EnvironmentFailure):
                        raise failure_error(answer, f"{field}.environment: row {prompt.uid}: {answer.text}")
                    assert isinstance(answer, Began)
                    return answer

    def _made(
        self,
        environment: TextEnvironmentSpec,
        *,
        tokenizer: str | None = None,
        processes: int | None = None,
        per_process: int | None = None,
        retries: int | None = None,
    ) -> EnvironmentHosts:
        source = source_of(environment)
        if source.tools is not None and tokenizer is not None and self._spec.episodes is not None:
            parser = self._spec.episodes.tool_parser
            source = replace(source, tools=replace(source.tools, parser=parser, tokenizer=tokenizer))
        variables = dict(self._spec.environment.variables)
        variables |= {name: os.environ[name] for name in environment.environment if name in os.environ}
        place = environment_place(
            source,
            memory=int(to_number(environment.memory)),
            network=environment.network,
            workdir=Path.cwd(),
            variables=variables,
            private=self._private,
        )
        if retries is None:
            retries = 2 if self._spec.episodes is None else self._spec.episodes.retries
        return EnvironmentHosts(
            source,
            place,
            processes=processes or environment.processes or min(MAX_PROCESSES, os.cpu_count() or 1),
            per_process=per_process or environment.per_process,
            deadlines=Deadlines(
                environment.reset_seconds,
                environment.step_seconds,
                *([_IMPORT_SECONDS] if environment.tools is not None or environment.agent is not None else []),
            ),
            deterministic=derived.is_deterministic(environment),
            retries=retries,
        )

    def _check_places(self, field: str, environment: TextEnvironmentSpec, hosts: EnvironmentHosts) -> None:
        if environment.processes is None and not self._here:
            return
        needed = derived.prompts_open(self._spec) * self._spec.rollout.samples_per_prompt
        if needed > hosts.places:
            raise UserError(
                f"{field}.environment.perProcess: {needed} episodes are open at once, and its processes hold "
                f"{hosts.places} environments together; allowed: more of them in each, or more processes"
            )


def environment_sources(spec: RLJobSpec) -> list[tuple[str, DataSource]]:
    """Sources of data and evaluation that have an environment, each with its place in the manifest."""
    return [one for one in data_sources(spec) + evaluation_sources(spec) if one[1].environment]


def _key(source: DataSource) -> str:
    """The settings of a source's environment."""
    assert source.environment is not None
    return source.environment.canonical_json()


def source_of(environment: TextEnvironmentSpec) -> Source:
    """Name of an environment, for its hosts."""
    gymnasium = environment.gymnasium
    settings = None if gymnasium is None else gymnasium.model_dump(mode="json", by_alias=True)
    tools = None if environment.tools is None else ToolSource(tuple(map(_tool, environment.tools)))
    openenv = None if environment.openenv is None else environment.openenv.model_dump(mode="json", by_alias=True)
    given = environment.agent
    agent = None if given is None else AgentSource(given.python, tuple(map(str, given.ignore)), environment.args)
    return Source(environment.name, environment.python, settings, openenv, tools, agent, environment.args)


def _tool(spec: ToolSpec) -> str | tuple[str, ...]:
    if spec.python is not None:
        return spec.python
    assert spec.mcp is not None
    return tuple(spec.mcp.command)


def _placed(field: str, error: UserError) -> str:
    """A message of an environment with the place of its source, unless it names another field."""
    return str(error) if str(error).startswith("spec.") else f"{field}.{error}"


def plain(before: str, after: str) -> Render:
    """Renders without a chat template: what an environment says, between two texts; what was answered, as it is."""

    def render(messages: Sequence[Message], opened: bool) -> str:
        del opened
        parts = []
        for place, message in enumerate(messages):
            said = message["role"] == "user"
            parts.append(f"{before if said and place else ''}{message['content']}{after if said else ''}")
        return "".join(parts)

    return render


def _where(field: str, source: DataSource) -> str:
    return f"{field}.applyChatTemplate: the chat template" if source.apply_chat_template else f"{field}"


def _said(hosts: EnvironmentHosts, seeds: Sequence[int], examples: Sequence[str], field: str) -> list[str]:
    """Observations of some episodes, played by chance; UserError where one fails."""
    texts: dict[int, list[str]] = {}
    steps: dict[int, int] = {}
    for seed in seeds:
        hosts.begin(seed, seed)
        texts[seed], steps[seed] = [], 0
    while hosts.outstanding:
        for seed, answer in hosts.take(_PATIENCE_SECONDS):
            if isinstance(answer, EnvironmentFailure):
                raise failure_error(answer, f"{field}.environment: {answer.text}")
            assert isinstance(answer, Began | Stepped)
            texts[seed].append(answer.observation)
            ended = isinstance(answer, Stepped) and answer.done
            if examples and not ended and steps[seed] < _LISTENED_STEPS:
                steps[seed] += 1
                hosts.step(seed, Random(f"{seed} {steps[seed]}").choice(examples))
    return [text for seed in seeds for text in texts[seed]]
