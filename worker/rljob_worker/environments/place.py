"""Place of environment hosts, and their bounds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from rljob_api.rewards import function_file
from rljob_worker.confined.access import files_of
from rljob_worker.confined.bounds import Bounds, environment, network_can_be_closed, sweep
from rljob_worker.confined.process import Place
from rljob_worker.environments.load import Source
from rljob_worker.errors import UserError


def environment_place(
    source: Source,
    *,
    memory: int,
    network: bool,
    workdir: Path,
    variables: Mapping[str, str] | None = None,
    private: Iterable[Path] = (),
) -> Place:
    """The bounds of an environment's hosts, which are those of scoring processes.

    Args:
        source: of the environment.
        memory: bytes of one host, with all that it starts.
        network: whether it sees the machine's network.
        workdir: working directory, which it may read.
        variables: `spec.environment.variables`.
        private: folders that no environment reads.

    Raises:
        UserError: the file of the environment is not there, or the network cannot be closed here.
    """
    if not network and not network_can_be_closed():
        raise UserError(
            "environment.network: false needs a network namespace, which this kernel or container does not allow; "
            "leave it out, and close the network from outside (a NetworkPolicy)"
        )
    sweep()
    around = [workdir]
    tools = source.tools
    agent = None if source.agent is None else source.agent.python
    code = [("environment.python", source.python), ("environment.agent.python", agent)]
    for place, tool in enumerate(() if tools is None else tools.tools):
        if isinstance(tool, str):
            code.append((f"environment.tools[{place}].python", tool))
        else:
            # A server and the script that it runs; what they are not is found by the kernel.
            around += [Path(part).resolve().parent for part in tool if os.path.isabs(part) and os.path.exists(part)]
    for field, path in code:
        if named := function_file(path):
            file = (workdir / named[0]).resolve()
            if not file.is_file():
                raise UserError(f"{field}: {named[0]}: there is no file {file}")
            around.append(file.parent)
    tokenizer = [tools.tokenizer] if tools is not None and tools.tokenizer is not None else []
    given = environment(variables or {}, ())
    return Place(
        workdir, given, Bounds(memory, files_of(around, tokenizer, (), private, given), network, source="environment")
    )
