"""`spec.episodes`, and the environment of a data source: answers turn by turn."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import (
    INT64_MAX,
    ApiModel,
    FiniteFloat,
    Fraction,
    FreeForm,
    Name,
    NonNegativeFloat,
    PositiveFloat,
    Quantity,
    Seed,
    Text,
    TokenCount,
)
from rljob_api.environments import AgentField, BuiltIn, Form

PYTHON_OBJECT = r"^([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^:]+\.py):[A-Za-z_]\w*$"
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=253)]


class SeedRows(ApiModel):
    """Rows that are seeds of an environment: row N of the data is the seed `first` + N."""

    first: Annotated[Seed, Field(le=INT64_MAX - 10**7)] = 0
    """The first seed. A held-out set has seeds that training does not have."""
    count: Annotated[int, Field(ge=1, le=10**7)]
    """Number of seeds."""


class GymnasiumSpec(ApiModel):
    """An environment of gymnasium, and the policy's view of it."""

    id: Name
    """Id as `gymnasium.make` takes it; `module:id` imports the module first."""
    made_with: Annotated[FreeForm, Field(alias="kwargs")] = {}
    """Arguments of `gymnasium.make`. An observation that is no text is replaced by the output of `render`:
    `{render_mode: ansi}`."""
    actions: Annotated[dict[str, int], Field(max_length=64)] = {}
    """Names of numbered actions; none: the environment takes text."""
    form: Form = Form.PLAIN
    """Form in which a policy writes one of `actions`. `Plain`: a word, of which the last that is an action counts.
    `Answer`: `<answer>Left</answer>`, the last of them. `Think`: `<think>...</think> <answer>...</answer>`, and
    nothing else."""
    format_penalty: Annotated[FiniteFloat, Field(le=0)] = -0.1
    """Reward of an answer that is none of `actions`; the environment is not asked then."""


class OpenEnvSpec(ApiModel):
    """An OpenEnv server; each episode is a session of its own."""

    url: Annotated[str, Field(pattern=r"^(https?|wss?)://[^\s/?#@]+(/[^\s?#]*)?$", max_length=2048)]
    """Address of the server; `/ws` is added to it."""
    action: Name
    """Field of an action that gets the policy's answer."""
    observation: Name | None = None
    """Field of an observation that is shown to the policy; default: all of it, as JSON."""
    wait_seconds: NonNegativeFloat = 30.0
    """Seconds for which a reset asks a server again that is not there, or has no session left."""


class McpServer(ApiModel):
    """A server of the Model Context Protocol that is started beside each environment host, within its bounds."""

    command: Annotated[list[Text], Field(min_length=1, max_length=64)]
    """Program and arguments; it speaks over its standard input and output, and is run in the working directory."""


class ToolSpec(ApiModel):
    """Tools that a policy may call: exactly one of `python` and `mcp`."""

    python: Annotated[str, Field(pattern=PYTHON_OBJECT, max_length=1024)] | None = None
    """`package.module:NAME` or `./tools.py:NAME`, as with `data.environment.python`. A function is a tool. A class is
    made for each episode, without arguments: its public methods are tools, and its `reset(**row)` gets the row's
    columns. Types come from hints, descriptions from a docstring with `Args:`."""
    mcp: McpServer | None = None
    """All tools of an MCP server over stdio; all episodes of a process share it."""


class AgentSpec(ApiModel):
    """A program that calls the policy."""

    python: Annotated[str, Field(max_length=1024)]
    """`package.module:function` or `./agent.py:function`; called with `base_url`, `token`, `row` and `args`."""
    ignore: Annotated[list[AgentField], Field(max_length=8)] = []
    """Fields of its requests that are left alone and not refused."""


class TextEnvironmentSpec(ApiModel):
    """Answers the policy turn by turn: exactly one of `name`, `gymnasium`, `python`, `openenv`, `tools` and `agent`."""

    name: BuiltIn | None = None
    """Built in."""
    gymnasium: GymnasiumSpec | None = None
    """One that is registered with gymnasium."""
    python: Annotated[str, Field(pattern=PYTHON_OBJECT, max_length=1024)] | None = None
    """`package.module:Class`, or a file and its class, `./game.py:Game`, relative to the manifest's folder (on a
    cluster an absolute path, in a volume or the image). It has gymnasium's methods, with text for observations and
    actions."""
    openenv: OpenEnvSpec | None = None
    """One that an OpenEnv server has; it needs as many sessions as episodes are open at once."""
    tools: Annotated[list[ToolSpec], Field(min_length=1, max_length=32)] | None = None
    """Tools that the policy may call; needs `applyChatTemplate`, whose template shows them, and
    `episodes.toolParser`."""
    agent: AgentSpec | None = None
    """A program that calls the policy."""
    args: FreeForm = {}
    """Arguments of the built-in environment, the class or the agent."""
    processes: Annotated[int, Field(ge=1, le=1024, json_schema_extra={"format": "int32"})] | None = None
    """Processes that hold environments, on the driver's node; default: 4, or as many as it has cores."""
    per_process: Annotated[int, Field(ge=1, le=4096, json_schema_extra={"format": "int32"})] = 16
    """Environments that one of them holds at most, and steps one after the other. A slow one makes its neighbours
    wait."""
    deterministic: bool | None = None
    """Whether the same seed and actions give the same answers: an episode whose process was lost is then made anew by
    them. Default: true, with `python`, `openenv`, `tools` and `agent` false."""
    reset_seconds: PositiveFloat = 60.0
    """Deadline of a reset; its process is ended then."""
    step_seconds: PositiveFloat = 30.0
    """Deadline of a step; its process is ended then."""
    memory: Quantity = "2Gi"
    """Memory that one of the processes may use, with all that it starts; more ends it."""
    network: bool = True
    """False: the processes get a network of their own, with nothing in it. Refused where the kernel or the container
    does not allow that."""
    environment: Annotated[list[VariableName], Field(max_length=64)] = []
    """Variables of the driver that they see beside `environment.variables`."""


class Pace(StrEnum):
    """When the next turn of an episode begins."""

    TOGETHER = "Together"
    FREE = "Free"


class EpisodeError(StrEnum):
    """Treatment of an episode whose environment raised, or returned what is no answer."""

    END = "End"
    FAIL = "Fail"


class EpisodesSpec(ApiModel):
    """Turns of a policy and the environment of a data source."""

    max_turns: Annotated[int, Field(ge=1, le=4096, json_schema_extra={"format": "int32"})]
    """Answers in an episode at most."""
    max_tokens: TokenCount
    """Tokens of an episode at most: prompt, answers and observations. One that has no room for another answer ends."""
    max_tokens_per_turn: TokenCount | None = None
    """Tokens of an answer at most; a longer one is cut, and given to the environment as it is. Default:
    `rollout.maxResponseTokens`."""
    max_observation_tokens: TokenCount = 1024
    """Longer observations are cut in their middle, and say so there."""
    pace: Pace = Pace.TOGETHER
    """`Together`: engines get the next turn of all episodes when all environments have answered; bits do not depend on
    their speed. `Free`: of each episode as soon as its own has; log-probabilities round with their neighbours."""
    before: Annotated[str, Field(max_length=1024)] = "\n"
    """Text before each observation but the first, where the data source has no chat template."""
    after: Annotated[str, Field(max_length=1024)] = "\n"
    """Text behind each observation, where the data source has no chat template."""
    tool_parser: Annotated[str, Field(pattern=r"^[a-z0-9_-]+$", max_length=63)] | None = None
    """Name of vLLM's parser that reads calls of `data.environment.tools` out of answers, such as `hermes` (Qwen),
    `llama3_json` or `mistral`."""
    retries: Annotated[int, Field(ge=0, le=100, json_schema_extra={"format": "int32"})] = 2
    """Number of retries of a request to an environment after its process died, or was ended."""
    on_error: EpisodeError = EpisodeError.END
    """`End`: an episode whose environment raised, or returned what is no answer, ends with `errorReward` and is trained
    on. `Fail`: it fails the job."""
    error_reward: FiniteFloat = 0.0
    """Reward of an episode that ended so."""
    max_error_share: Fraction = 0.2
    """More of a step's episodes, and two of them or more, fail the job."""
