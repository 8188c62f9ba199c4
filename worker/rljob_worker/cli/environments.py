"""Checks of a manifest's environments on the command line, before a job starts or without one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rljob_api import RLJobSpec
from rljob_api.profiles import PROFILES
from rljob_api.rewards import function_file
from rljob_api.spec import DataSource, TextEnvironmentSpec
from rljob_worker.confined.bounds import network_can_be_closed
from rljob_worker.confined.named_source import check_named, check_package
from rljob_worker.data.sources import data_sources
from rljob_worker.data.turns import Schema
from rljob_worker.environments.load import maker
from rljob_worker.errors import UserError
from rljob_worker.rewards.source_check import package_places
from rljob_worker.rollouts.worlds import JobEnvironments, environment_sources, source_of
from rljob_worker.waiting import waiting_for


def check_environment_code(spec: RLJobSpec) -> None:
    """Refuse a file of an environment that is none or has no such class, and a module that is nowhere: UserError."""
    for field, source in environment_sources(spec):
        assert source.environment is not None
        _check_code(field, source.environment, spec)


def _check_code(field: str, environment: TextEnvironmentSpec, spec: RLJobSpec) -> None:
    for place, tool in enumerate(environment.tools or []):
        if tool.python is not None:
            check_named(f"{field}.environment.tools[{place}].python", tool.python, package_places(spec))
    if environment.agent is not None:
        check_named(f"{field}.environment.agent.python", environment.agent.python, package_places(spec))
    if environment.python is not None:
        check_named(f"{field}.environment.python", environment.python, package_places(spec))
    if environment.name is not None:
        try:
            # Of ours, and light: nothing of it is a stranger's.
            maker(source_of(environment))
        except UserError as error:
            raise UserError(f"{field}.{error}") from None
    module, named, _ = ("" if environment.gymnasium is None else environment.gymnasium.id).partition(":")
    if named:
        check_package(f"{field}.environment.gymnasium.id", module.partition(".")[0], package_places(spec))


class TriedEnvironments:
    """The environments of a manifest that this machine has, each tried in the process that a job would give it.

    Args:
        spec: the job.

    Raises:
        UserError: one of them cannot be used.
    """

    def __init__(self, spec: RLJobSpec) -> None:
        self._spec = spec
        self._here = not PROFILES[spec.resources.profile].has_devices
        self._sources = environment_sources(spec)
        self._absent = {field: why for field, source in self._sources if (why := self._why_not(field, source))}
        with waiting_for("the environments of spec.data and spec.evaluation to be tried"):
            present = [field for field, _ in self._sources if field not in self._absent]
            self.tried = JobEnvironments(spec, fields=present, here=self._here)
            """Environments of this machine."""

    def lines(self) -> list[str]:
        """A sentence for each."""
        told = []
        for field, source in self._sources:
            assert source.environment is not None
            title = source_of(source.environment).title()
            if field in self._absent:
                told.append(f"{field}.environment: {title} is tried when the job starts: {self._absent[field]}")
            else:
                schemas = self.tried.tools().get(field)
                found = "it answers resets and steps" if schemas is None else f"they have {_listed(schemas)}"
                if source.environment.agent is not None:
                    found = "it is called with base_url, token and row"
                told.append(f"{field}.environment: {title} was tried: {found}")
        return told

    def spoken(self) -> list[str]:
        """Words for a tokenizer that is trained; none where that cannot be done here."""
        trained = self._spec.model.random is not None and not self._absent
        return self.tried.spoken() if trained else []

    def first_prompts(self) -> list[str]:
        """Lines that show the first prompt of each, by the tokenizer and chat template of the job.

        Raises:
            UserError: a tokenizer or a template cannot be used, or episodes have no room for answers.
        """
        if not self._sources or (self._absent and self._spec.model.random is not None):
            return []
        # Importing transformers takes seconds.
        from rljob_worker.data.dataset import PromptSource
        from rljob_worker.data.preview import Preview
        from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer

        spec = self._spec
        with tempfile.TemporaryDirectory(prefix="rljob-validate-") as name:
            folder = Path(name)
            tokenizer = load_tokenizer(prepare_tokenizer(spec, folder, self.spoken()))
            model_folder = folder if spec.model.path is None else Path(spec.model.path).expanduser()
            tools = self.tried.tools()
            from_rows = any(source.seeds is None for _, source in self._sources)
            here = from_rows and all(_is_here(source) for _, source in data_sources(spec))
            first = PromptSource(spec, tokenizer, tools=tools).first() if here else None
            worlds = self.tried.worlds(tokenizer, model_folder, first)
        lines: list[str] = []
        for field, (seed, began) in self.tried.openings().items():
            ids = list(worlds[field].observations.first(began.observation))
            tokens = tuple(zip(ids, map(str, tokenizer.convert_ids_to_tokens(ids))))
            shown = Preview(f"of seed {seed}, {field}", str(tokenizer.decode(ids)), tokens, None)
            # Without the line about its label, of which there is none.
            lines += list(shown.lines())[:-1]
        return lines

    def _why_not(self, field: str, source: DataSource) -> str | None:
        """Why an environment cannot be tried on this machine, where the job's machines may have it."""
        environment = source.environment
        assert environment is not None
        try:
            _check_code(field, environment, self._spec)
        except UserError as error:
            if _is_elsewhere(environment):
                return str(error)
            raise
        if not environment.network and not network_can_be_closed():
            return "it has network: false, and no network can be closed here"
        return None


def _is_here(source: DataSource) -> bool:
    """Whether rows can be read without a hub."""
    return source.path is None or Path(source.path).expanduser().exists()


def _is_elsewhere(environment: TextEnvironmentSpec) -> bool:
    """Whether its code may be another machine's: a file that is here has to be right."""
    agent = None if environment.agent is None else environment.agent.python
    paths = [environment.python, agent, *(tool.python for tool in environment.tools or [])]
    named = [function_file(path) for path in paths if path is not None]
    return not all(one is not None and Path(one[0]).expanduser().exists() for one in named)


def _listed(schemas: Sequence[Schema]) -> str:
    """Tools with their parameters."""
    functions = [schema["function"] for schema in schemas]
    return ", ".join(f"{one['name']}({', '.join(one['parameters'].get('properties', {}))})" for one in functions)
