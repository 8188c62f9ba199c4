"""`spec.data`, `spec.reward`, `spec.evaluation`: prompts and how responses are scored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from rljob_api.base import (
    ApiModel,
    FiniteFloat,
    Fraction,
    FreeForm,
    Name,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Quantity,
    SampleCount,
    Seed,
    Text,
    TokenCount,
    keyed_by,
)
from rljob_api.spec.episodes import PYTHON_OBJECT, SeedRows, TextEnvironmentSpec, VariableName
from rljob_api.spec.model import Hub

PromptRow = Annotated[
    Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=r"^(.*/)?[0-9]+$", max_length=300)],
    WithJsonSchema({"x-kubernetes-int-or-string": True}),
]
"""A row of the data: its number, or the number behind its source's name."""
_Path = Annotated[str, Field(pattern=r"^(/|~/|~$)", max_length=4096)]


class SyntheticData(ApiModel):
    """A generated data set whose right answer depends on the prompt."""

    task: Literal["RepeatLast", "Copy", "Reverse", "NameColor"] = "RepeatLast"
    """`RepeatLast`: repeat the prompt's last symbol; `Copy`: repeat the prompt; `Reverse`: the prompt backwards;
    `NameColor`: name the colour of a square in a picture, one of `symbols` (at most 13)."""
    rows: Annotated[int, Field(ge=1, le=10**7)] = 4096
    """Number of distinct rows generated (fewer when the symbols allow no more)."""
    symbols: Annotated[int, Field(ge=2, le=100000)] = 13
    """Alphabet size."""
    prompt_symbols: Annotated[int, Field(ge=1, le=4096)] = 4
    """Symbols in a prompt."""
    answer_symbols: Annotated[int, Field(ge=1, le=4096)] = 8
    """Symbols in the right answer."""
    seed: Seed = 0
    """Seed of the generator."""


class RewardFunction(ApiModel):
    """Scores a response: exactly one of `name` and `python`."""

    name: (
        Literal[
            "match", "exact", "regex", "math", "gsm8k", "format", "length", "overlong", "environment", "code", "judge"
        ]
        | None
    ) = None
    """Built in: `match` (share of the label's tokens that are right, position by position), `exact`, `regex`, `math`
    (the final answer), `gsm8k` (the number after `####`), `format` (tags such as `<think>`), `length` and `overlong`
    (penalties: 0 down to -1), `environment` (the sum of an episode's rewards), `code` (tests of a program), `judge` (a
    model's verdict)."""
    python: Annotated[str, Field(pattern=PYTHON_OBJECT, max_length=1024)] | None = None
    """`package.module:function`, or a file and its function, `./rewards.py:function`, relative to the manifest's folder
    (on a cluster an absolute path, in a volume or the image). Sync or async; takes one sample, or a list when `batch`
    is true."""
    batch: bool = False
    """Call `python` once with all samples of a prompt group instead of once per sample."""
    signature: Literal["RLJob", "Auto", "TRL", "Verl", "Slime"] = "RLJob"
    """Signature of `python`: RLJob's own names, or as TRL (and open-r1), verl or slime call it. `Auto`: by its
    parameters; a function that fits several is refused."""
    args: FreeForm = {}
    """Keyword arguments for the reward function (`regex` needs `pattern`, `overlong` needs `cache`, `code` needs
    `kind` and `tests`)."""


class RewardPart(RewardFunction):
    """One of several rewards that are added up: exactly one of `name` and `python`."""

    weight: FiniteFloat = 1.0
    """Factor of its score; a negative weight makes a penalty of it."""
    record_as: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=63)] | None = None
    """Its name in trajectories and metrics; default: `name`, or the function's."""
    rows: Annotated[list[Name], Field(min_length=1, max_length=256)] | None = None
    """Values of the column `by` whose rows it scores; default: all rows."""


class RewardSpec(RewardFunction):
    """Scoring of a response: exactly one of `name`, `python` and `parts`."""

    parts: Annotated[list[RewardPart], Field(min_length=1, max_length=8)] | None = None
    """Several rewards: the score is the sum of theirs, each times its weight. Each one's own score is recorded by its
    name, before the weight."""
    by: Name | None = None
    """Column that says which `parts` score a row, by their `rows`: `tag`, or `extra_info.source`."""
    timeout_seconds: PositiveFloat = 30.0
    """Deadline for one call."""
    on_error: Literal["Fail", "Score"] = "Fail"
    """`Fail`: an exception or time-out in a reward fails the step; `Score`: the sample gets `errorScore`."""
    error_score: FiniteFloat = 0.0
    """Score for a sample whose reward failed, with `onError: Score`."""
    memory: Quantity = "2Gi"
    """Memory that a process which runs the reward may use, with all that it starts and files that are nothing but
    memory; more ends it."""
    import_seconds: PositiveFloat = 60.0
    """Deadline for the import of `python`."""
    read_paths: Annotated[list[_Path], Field(max_length=64)] = []
    """Files and folders that the reward may read beside its own folder, the working directory, Python packages and the
    hub's cache; absolute, or below `~`. Kernels without Landlock (before Linux 5.13) let it read all."""
    write_paths: Annotated[list[_Path], Field(max_length=64)] = []
    """Files and folders that it may read and write beside its temporary folder (`TMPDIR`), which goes with its process;
    devices too. What it writes there is not counted in `memory`."""
    network: bool = True
    """False: the reward's processes get a network of their own, with nothing in it. Refused where the kernel or the
    container does not allow that."""
    environment: Annotated[list[VariableName], Field(max_length=64)] = []
    """Variables of the driver that the reward sees beside `environment.variables`: others are not passed on, since a
    reward may run what a model wrote."""


class ChatSpec(ApiModel):
    """Input of a chat template beside the prompt; only with `applyChatTemplate`."""

    system: Annotated[str, Field(min_length=1, max_length=32768)] | None = None
    """System prompt before each prompt's messages; a row that begins with a system message of its own keeps that."""
    template_file: Text | None = None
    """Jinja file instead of the tokenizer's own template, relative to the manifest's folder (on a cluster an absolute
    path, in a volume or the image)."""
    template_args: FreeForm = {}
    """Variables of the template, such as `enable_thinking: false`; one that it does not use is refused."""


class WeightFrom(ApiModel):
    """A source's weight from a step on."""

    first_step: Annotated[NonNegativeInt, Field(alias="from")]
    """The first step that it holds for. Steps are counted by their prompts, `rollout.promptsPerStep` each: where a step
    draws more, the weights of later steps come sooner."""
    value: Annotated[FiniteFloat, Field(ge=0)]
    """The weight; 0 draws nothing from the source."""


class DataSource(ApiModel):
    """One data set: exactly one of `path`, `synthetic` and `seeds`."""

    name: Name | None = None
    """Name in metrics; default: the file's or folder's name."""
    path: Text | None = None
    """`.jsonl` or `.parquet` file, Hugging Face dataset folder (`save_to_disk`), or hub id."""
    hub: Hub = Hub.HUGGING_FACE
    """Hub of a `path` that is not local."""
    subset: Name | None = None
    """Configuration of a hub data set that has several, such as `main` of gsm8k."""
    split: Name = "train"
    """Split of a dataset folder or hub data set."""
    synthetic: SyntheticData | None = None
    """A generated data set instead of a file."""
    seeds: SeedRows | None = None
    """Seeds of `environment` instead of a file: an episode's prompt is the environment's first observation."""
    environment: TextEnvironmentSpec | None = None
    """Answers the policy turn by turn: with `seeds`, or beside rows the `tools` that it may call or the `agent` that
    calls it."""
    prompt_key: Name = "prompt"
    """Column with the prompt: a string, or a list of chat messages; `a.b` names field `b` of a column of mappings."""
    label_key: Name | None = "label"
    """Column with the reference answer, like `reward_model.ground_truth`; null when the reward needs none."""
    image_key: Name | None = None
    """Column with a row's pictures: paths below the data's folder or bytes, one or a list; null: none."""
    apply_chat_template: bool = False
    """Render the prompt through the tokenizer's chat template (a plain string becomes one user message)."""
    chat: ChatSpec | None = None
    """System prompt, own template and template arguments."""
    weight: PositiveFloat = 1.0
    """Share of prompts drawn from this source, relative to the other sources' weights."""
    weights: Annotated[list[WeightFrom], Field(min_length=1, max_length=8)] | None = None
    """Weights that change over the steps, the first from step 0; excludes `weight`."""
    reward: RewardSpec | None = None
    """Reward for this source; default: `spec.reward`."""


class DataSpec(DataSource):
    """The prompts: one data set written in place, or several under `sources`."""

    sources: Annotated[list[DataSource], Field(max_length=32)] = []
    """Several data sets, mixed by `weight`; excludes `path`, `synthetic` and `seeds` beside it. Each has its own
    keys, template switch and environment."""
    shuffle: bool = True
    """Shuffle each epoch with the job's seed."""
    skip: Annotated[list[PromptRow], Field(max_length=1024)] = []
    """Rows that are left out, recorded as `skipped`: numbers from 0, as messages have them (`row 9`), or with several
    sources `NAME/9`. A resumed run may have others: a way on where it died of a row."""
    max_prompt_tokens: TokenCount | None = None
    """Longer prompts are reported and skipped; default: model length less `rollout.maxResponseTokens`."""


class EvaluationSet(DataSource):
    """One of several held-out data sets, with settings of its own where they are given."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=63)]
    """Name in metrics: `eval/NAME`."""
    max_prompts: PositiveInt | None = None
    """Default: the evaluation's."""
    samples_per_prompt: SampleCount | None = None
    """Default: the evaluation's."""
    pass_at: Annotated[list[PositiveInt], Field(min_length=1, max_length=16)] | None = None
    """Default: the evaluation's."""


class EvaluationSpec(ApiModel):
    """Scoring on held-out data, as a phase of its own: exactly one of `data` and `sets`."""

    data: DataSource | None = None
    """The held-out data set."""
    sets: (
        Annotated[list[EvaluationSet], Field(min_length=1, max_length=16, json_schema_extra=keyed_by("name"))] | None
    ) = None
    """Several held-out data sets, each with metrics by its name."""
    every_steps: PositiveInt = 50
    """Evaluate after every N steps."""
    at_start: bool = False
    """Evaluate once before training too; recorded as step 0."""
    max_prompts: PositiveInt | None = None
    """Use only the first N prompts."""
    samples_per_prompt: SampleCount = 1
    """Responses for each prompt."""
    pass_at: Annotated[list[PositiveInt], Field(min_length=1, max_length=16)] = [1]
    """k values for pass@k (unbiased estimator, arXiv 2107.03374); each at most `samplesPerPrompt`."""
    pass_threshold: FiniteFloat = 1.0
    """A response passes when its reward is at least this."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[Fraction, Field(gt=0)] = 1.0
    """Nucleus mass."""
    max_response_tokens: TokenCount | None = None
    """Default: `rollout.maxResponseTokens`."""
