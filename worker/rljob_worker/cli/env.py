"""`rljob env`."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api.json_types import Json
from rljob_worker.cli.env_shown import Played, Silent, Text, Turn
from rljob_worker.cli.manifest import bytes_of, folder_name
from rljob_worker.errors import UserError

if TYPE_CHECKING:
    from rljob_worker.cli.env_tokens import EpisodeTokens
    from rljob_worker.environments.base import Answer
    from rljob_worker.environments.hosts import EnvironmentHosts
    from rljob_worker.environments.load import Source

_DESCRIPTION = """Play an environment, or try whether it can be trained on: what a policy would see and get, with you in
its place. It runs as in a run: in a confined process of its own, with the same deadlines, memory and network.

Built in are FrozenLake and Sokoban; your own is FILE.py:Class or package.module:Class with gymnasium's methods
(reset(seed=..., options=...), step(action), close()) and text for observations and actions; gymnasium:ID is one of
gymnasium's, openenv:URL that of an OpenEnv server. Actions come from --actions, else line by line from standard input.

Exit code 1 where the environment fails.

examples:
  rljob env FrozenLake --seed 3
  rljob env Sokoban --args '{"size": [8, 8], "boxes": 2, "form": "Think"}' --seed 1
  rljob env my_game.py:Game --actions left left up
  rljob env my_game.py:Game --check
  rljob env openenv:http://localhost:8000 --args '{"action": "message"}' --actions hello"""
_GYMNASIUM, _OPENENV = "gymnasium:", "openenv:"
_KEY = 0
_PATIENCE_SECONDS = 0.5


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "env",
        help="play an environment in the terminal, or try it",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("environment", metavar="NAME|FILE.py:CLASS", help="the environment")
    command.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the reset (default: 0)")
    command.add_argument("--args", type=_object, default={}, metavar="JSON", help="the environment's arguments")
    does = command.add_mutually_exclusive_group()
    does.add_argument("--actions", nargs="+", metavar="TEXT", help="what the policy answers, turn by turn")
    does.add_argument(
        "--check",
        action="store_true",
        help="try it: does it answer, does it repeat itself by its seed, do two episodes disturb each other",
    )
    command.add_argument(
        "--tokenizer",
        type=folder_name,
        metavar="FOLDER",
        help="show the tokens that each turn adds to a stream, by the tokenizer and chat template of this model folder",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    command.add_argument("--step-seconds", type=_seconds, default=30.0, metavar="S", help="for a step (default: 30)")
    command.add_argument("--reset-seconds", type=_seconds, default=60.0, metavar="S", help="for a reset (default: 60)")
    command.add_argument("--memory", default="2Gi", metavar="SIZE", help="of its process (default: 2Gi)")
    command.add_argument("--no-network", action="store_true", help="without the machine's network")
    command.set_defaults(run=run, reads_standard_input=True)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; use 0 or more")
    return int(text)


def _object(text: str) -> dict[str, Json]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('a JSON object is needed, like {"size": 4}')
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds; use more than 0, and 86400 at most")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Play, or try."""
    from rljob_api.wire.exit_codes import ExitCode

    source = _source(arguments.environment, arguments.args)
    if arguments.check:
        return _check(source, arguments)
    tokens = None if arguments.tokenizer is None else _tokens(arguments.tokenizer)
    shown = Silent() if arguments.json else Text(tokens)
    played = Played(source.title(), arguments.seed)
    with _hosts(source, arguments) as hosts:
        _started(hosts, source)
        actions = _lines(arguments.json) if arguments.actions is None else iter(arguments.actions)
        _play(hosts, actions, played, shown, tokens)
    if arguments.json:
        print(json.dumps(played.as_json(), indent=2))
    else:
        shown.end(played)
    return ExitCode.FAILED if played.failure else ExitCode.OK


def _source(name: str, args: dict[str, Json]) -> Source:
    from rljob_worker.environments.load import Source

    if name.startswith(_GYMNASIUM):
        return Source(gymnasium={**args, "id": name.removeprefix(_GYMNASIUM)})
    if name.startswith(_OPENENV):
        # Who plays is told at once that nothing is there.
        return Source(openenv={"waitSeconds": 0, **args, "url": name.removeprefix(_OPENENV)})
    return Source(python=name, args=args) if ":" in name else Source(name=name, args=args)


def _hosts(source: Source, arguments: argparse.Namespace) -> EnvironmentHosts:
    from rljob_worker.environments.host_process import Deadlines
    from rljob_worker.environments.hosts import EnvironmentHosts
    from rljob_worker.environments.place import environment_place

    memory = bytes_of(arguments.memory, "--memory")
    place = environment_place(source, memory=memory, network=not arguments.no_network, workdir=Path.cwd())
    # Nothing is tried again: what goes wrong is to be seen.
    deadlines = Deadlines(arguments.reset_seconds, arguments.step_seconds)
    return EnvironmentHosts(source, place, deadlines=deadlines, retries=0)


def _tokens(folder: Path) -> EpisodeTokens:
    from rljob_worker.waiting import waiting_for

    with waiting_for("transformers to be imported"):
        from rljob_worker.cli.env_tokens import EpisodeTokens

        return EpisodeTokens(folder)


def _started(hosts: EnvironmentHosts, source: Source) -> None:
    from rljob_worker.waiting import waiting_for

    with waiting_for(f"{source.title()} to be imported"):
        hosts.start()


def _check(source: Source, arguments: argparse.Namespace) -> int:
    from rljob_api.safe_text import visible_line
    from rljob_api.wire.exit_codes import ExitCode
    from rljob_worker.environments.check import check_environment
    from rljob_worker.waiting import waiting_for

    with waiting_for(f"{source.title()} to be tried"):
        checked = check_environment(lambda: _hosts(source, arguments))
    if arguments.json:
        found = {"environment": source.title(), "repeats": checked.repeats, "examples": list(checked.examples)}
        print(json.dumps(found, indent=2))
        return ExitCode.OK
    print(visible_line(f"{source.title()}: answers resets and steps, also texts that are no action"))
    if checked.repeats:
        print("the same seed and actions give the same answers, alone and beside another episode")
    else:
        print(
            "the same seed and actions give other answers each time: an episode whose process is lost cannot be made "
            "anew, and whether two episodes disturb each other cannot be told"
        )
    return ExitCode.OK


def _play(
    hosts: EnvironmentHosts, actions: Iterable[str], played: Played, shown: Silent, tokens: EpisodeTokens | None
) -> None:
    """Play until it ends, fails, or no action is left."""
    from rljob_worker.environments.base import MAX_ACTION_BYTES, Began, EnvironmentFailure

    hosts.begin(_KEY, played.seed)
    answer = _answer(hosts)
    if isinstance(answer, Began):
        played.began = answer
        played.prompt_tokens = None if tokens is None else tokens.turns.first([_message(answer.observation)])
        shown.began(played, answer)
        for action in actions:
            if len(action) > MAX_ACTION_BYTES:
                raise UserError(f"an action of {len(action)} characters: {MAX_ACTION_BYTES} at most")
            hosts.step(_KEY, action)
            answer = _answer(hosts)
            if isinstance(answer, Began | EnvironmentFailure):
                break
            added = None if tokens is None else tokens.turn(action, None if answer.done else answer.observation)
            played.turns.append(Turn(action, answer, added))
            shown.stepped(played)
            if answer.done:
                break
    if isinstance(answer, EnvironmentFailure):
        played.failure = answer.text


def _message(observation: str) -> dict[str, str]:
    return {"role": "user", "content": observation}


def _answer(hosts: EnvironmentHosts) -> Answer:
    """The one that is awaited: each has a deadline."""
    while not (found := hosts.take(_PATIENCE_SECONDS)):
        pass
    return found[0][1]


def _lines(quiet: bool) -> Iterator[str]:
    """Actions of standard input, asked for where somebody types them."""
    asks = sys.stdin.isatty() and not quiet
    if isinstance(sys.stdin, io.TextIOWrapper):
        # What a policy writes is always a text.
        sys.stdin.reconfigure(errors="replace")
    while True:
        if asks:
            print("action> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            if asks:
                print()
            return
        yield line.removesuffix("\n")
