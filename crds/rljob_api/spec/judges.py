"""`spec.judges`: models that score what a policy wrote."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.base import (
    ApiModel,
    FiniteFloat,
    Fraction,
    GroupSize,
    NonNegativeFloat,
    PositiveFloat,
    Text,
    TokenCount,
)
from rljob_api.spec.episodes import VariableName

JudgeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=63)]


class JudgeEndpoint(ApiModel):
    """A server with OpenAI's interface for chat completions, such as `vllm serve`."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$", max_length=2048)]
    """Base address of its interface: `http://judge:8000/v1`."""
    model: Text
    """Name of the model there."""
    key_variable: VariableName | None = None
    """Variable of the driver that holds the key of the server; the key itself never stands in a manifest."""


class JudgeKind(StrEnum):
    """Ways of a judge to score a response."""

    CHAT = "Chat"
    SCORE = "Score"


class JudgeModel(ApiModel):
    """A model that the job runs itself: by turns with trainers and engines, or on devices of its own."""

    path: Text
    """Its checkpoint: a folder, or an id on `model.hub`. It has a tokenizer of its own, and for `Score` one label."""
    max_tokens: TokenCount = 8192
    """Tokens of the longest text, an answer included; a longer one is never cut, but an error of the reward."""
    devices_per_node: GroupSize | None = None
    """Devices on each node for it alone, beside `resources.devicesPerNode`; default: it takes turns on those."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of device memory it may use while awake (npu, cuda)."""
    kv_cache_bytes: Annotated[int, Field(ge=2**20, le=2**44, json_schema_extra={"format": "int64"})] | None = None
    """Cache on each device, in bytes; default: 1 GiB on `cpu`, else what `memoryFraction` leaves."""


class VerdictSpec(ApiModel):
    """The part of a judge's answer that is its verdict, and the numbers that are one."""

    pattern: Annotated[str, Field(min_length=1, max_length=1024)] = r"Score:\s*(-?[0-9]+(?:\.[0-9]+)?)"
    """Regular expression of Python with one group, the verdict. The last match in the answer counts; what stands before
    `</think>` is not looked at."""
    values: Annotated[dict[str, FiniteFloat], Field(max_length=64)] = {}
    """Scores of verdicts that are words, `{good: 1, bad: 0}`; upper and lower case are one. None: the verdict is a
    number."""
    min: FiniteFloat = 0.0
    """The least number that is a verdict."""
    max: FiniteFloat = 10.0
    """The greatest number that is a verdict."""


class JudgeSpec(ApiModel):
    """A model that scores responses, called by the reward `judge`."""

    name: JudgeName
    """Name in rewards: `args: {judge: NAME}`."""
    kind: JudgeKind = JudgeKind.CHAT
    """`Chat`: it answers in words, of which `verdict` is looked for. `Score`: it is a model that gives a number."""
    endpoint: JudgeEndpoint | None = None
    """A server that runs it, for `Chat`."""
    model: JudgeModel | None = None
    """Model that the job runs itself, in the place of a server; for `Score` a sequence classification model."""
    system: Annotated[str, Field(min_length=1, max_length=32768)] | None = None
    """System message."""
    prompt: Annotated[str, Field(min_length=1, max_length=32768)] | None = None
    """Jinja template of the user message: it has `prompt`, `messages`, `response`, `label`, `finish_reason`, the other
    columns of the row, `min` and `max`, and the filter `tojson`, which quotes a text. Default: asks for a number from
    `min` to `max` in the form of the default pattern. With `Score` it is the whole text; default: prompt and response
    by the model's chat template."""
    verdict: VerdictSpec = VerdictSpec()
    """Form of its verdicts."""
    max_tokens: TokenCount = 512
    """Tokens of an answer at most; one that is cut has no verdict."""
    temperature: Annotated[NonNegativeFloat, Field(le=2)] = 0.0
    """Sampling temperature."""
    concurrency: Annotated[int, Field(ge=1, le=1024, json_schema_extra={"format": "int32"})] = 64
    """Requests that run at once."""
    request_seconds: PositiveFloat = 60.0
    """Deadline of one request; it is sent again then."""
    timeout_seconds: PositiveFloat = 300.0
    """Deadline of a verdict, in the place of the reward's `timeoutSeconds`. An endpoint that is away, overloaded or
    slow is asked again until then, at growing intervals; later the step fails, whatever `onError` says."""
    max_error_share: Fraction = 0.2
    """The step fails when more of a judge's last 100 answers have no verdict, 10 of them or more; fewer are errors of
    the reward, for which `onError` holds. An answer without one is asked for a second time first."""
