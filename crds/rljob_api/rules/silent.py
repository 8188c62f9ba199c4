"""Fields that would be passed over without a word: where they stand, nothing reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pydantic.alias_generators import to_camel

from rljob_api.algorithms import ALGORITHMS
from rljob_api.base import ApiModel
from rljob_api.derived import data_sources, held_out_sources, judge_model, pictures
from rljob_api.how_many import how_many
from rljob_api.rules.findings import Check, Finding
from rljob_api.rules.places import parts_of, rewards_of
from rljob_api.spec import (
    DataSpec,
    EpisodesSpec,
    EvaluationSpec,
    FailurePolicy,
    KlSpec,
    LrSchedule,
    OptimizerSpec,
    OversamplingSpec,
    RecordsSpec,
    RewardSpec,
    RLJobSpec,
    SyntheticData,
    TisSpec,
    TrackerSpec,
    TuningSpec,
    VerdictSpec,
    WeightSyncSpec,
)


def _unless(block: type[ApiModel], read: Callable[[Any], bool], wrong: str, allowed: str, *fields: str) -> Check:
    """A value other than the default says that something is wanted which does not come."""

    def check(given: Any) -> Iterator[Finding]:
        for name in () if read(given) else fields:
            if getattr(given, name) != block.model_fields[name].get_default(call_default_factory=True):
                yield Finding((to_camel(name),), f"has no effect {wrong}", allowed)

    return check


def _rules(policy: Any) -> Iterator[Finding]:
    """Rules behind one that matches every failure."""
    for index, rule in enumerate(policy.rules[:-1]):
        if not rule.exit_codes and not rule.reasons:
            yield Finding(("rules", index), "matches every failure, and those behind it none", "the last of the rules")
            return
    for index, rule in enumerate(policy.rules):
        if rule.exit_codes == [0]:
            wrong = "is that of a job which succeeded: no failure matches"
            yield Finding(("rules", index, "exitCodes"), wrong, "codes from 1 on")
        for earlier, other in enumerate(policy.rules[:index]):
            if rule.name is not None and rule.name == other.name:
                yield Finding(("rules", index, "name"), f"is the name of rules[{earlier}]", "a name of its own")


def _judged(reward: Any) -> Iterator[Finding]:
    functions = reward.parts or [reward]
    if all(one.name == "judge" for one in functions) and reward.timeout_seconds != _default(
        RewardSpec, "timeout_seconds"
    ):
        yield Finding(("timeoutSeconds",), "has no effect on a judge", "timeoutSeconds of the judge")
    if reward.parts and all(part.weight == 0 for part in reward.parts):
        yield Finding(("parts",), "all have the weight 0: every reward would be 0", "another weight for one of them")


def _verdict(verdict: Any) -> Iterator[Finding]:
    if verdict.values and len(set(verdict.values.values())) == 1:
        yield Finding(("values",), "are all the same: every response would have the same score", "scores that differ")


def _python_alone(spec: Any) -> Iterator[Finding]:
    """Paths and time of a reward's own code, where there is none."""
    for at, reward in rewards_of(spec):
        functions = reward.parts or [reward]
        shared = at == ("reward",) and spec.rollout.oversampling is not None and spec.rollout.oversampling.function
        if shared or any(function.python is not None for function in functions):
            continue
        for name in ("import_seconds", "read_paths", "write_paths"):
            if getattr(reward, name) != _default(RewardSpec, name):
                yield Finding((*at, to_camel(name)), "has no effect on a built-in reward", "only beside python")


def _around_observations(spec: Any) -> Iterator[Finding]:
    """Texts around observations, where chat templates have their own."""
    sources = [one for many in (data_sources(spec), held_out_sources(spec)) for _, one in many]
    if spec.episodes is None or not all(one.apply_chat_template for one in sources if one.environment is not None):
        return
    for name in ("before", "after"):
        if getattr(spec.episodes, name) != _default(EpisodesSpec, name):
            wrong = "has no effect: each environment's observations are messages of a chat template"
            yield Finding(("episodes", name), wrong, "leave it out with applyChatTemplate: true")


def _bounds_of_episodes(spec: Any) -> Iterator[Finding]:
    """Bounds that episodes.maxTokens is within."""
    episodes, most = spec.episodes, spec.data.max_prompt_tokens
    if episodes is None:
        return
    seen = episodes.max_observation_tokens
    if seen != _default(EpisodesSpec, "max_observation_tokens") and seen >= episodes.max_tokens:
        wrong = "has no effect: no observation as long has room in an episode"
        yield Finding(
            ("episodes", "maxObservationTokens"), wrong, f"less than episodes.maxTokens, {episodes.max_tokens}"
        )
    if most is not None and most >= episodes.max_tokens and all(s.environment for _, s in data_sources(spec)):
        wrong = "leaves no room for an answer in an episode"
        yield Finding(("data", "maxPromptTokens"), wrong, f"less than episodes.maxTokens, {episodes.max_tokens}")


def _unspoken(spec: Any) -> Iterator[Finding]:
    """A system prompt beside an agent, which sends messages of its own."""
    for sources in (data_sources(spec), held_out_sources(spec)):
        for place, source in sources:
            agent = source.environment is not None and source.environment.agent is not None
            if agent and source.chat is not None and source.chat.system is not None:
                wrong = "has no effect: the policy reads the messages of the agent alone"
                yield Finding((*parts_of(place), "chat", "system"), wrong, "leave it out with environment.agent")


def _pixels(spec: Any) -> Iterator[Finding]:
    if spec.model.max_pixels is not None and next(pictures(spec), None) is None:
        yield Finding(("model", "maxPixels"), "has no effect: no data have pictures", "only with data.imageKey")


def _columns(spec: Any) -> Iterator[Finding]:
    """Rewards that read a column of rows, beside seeds, which have none."""
    for sources in (data_sources(spec), held_out_sources(spec)):
        for place, source in sources:
            reward = source.reward or spec.reward
            if source.seeds is None or reward is None:
                continue
            at = (*parts_of(place), "reward") if source.reward is not None else ("reward",)
            if reward.by is not None:
                yield Finding((*at, "by"), f"names a column, and the seeds of {place} have none", "parts without rows")
            for index, function in enumerate(reward.parts or [reward]):
                if function.name == "code":
                    where = (*at, "parts", index, "name") if reward.parts else (*at, "name")
                    yield Finding(
                        where, f"reads tests in a column, and the seeds of {place} have none", "another reward"
                    )


def _steps(spec: Any) -> Iterator[Finding]:
    """Weights that no step of the job comes to."""
    for index, source in enumerate(spec.data.sources):
        for k, weight in enumerate(source.weights or []):
            if k and weight.first_step >= spec.steps:
                at = ("data", "sources", index, "weights", k, "from")
                yield Finding(
                    at, f"is behind the last of the job's {how_many(spec.steps, 'step')}", f"less than {spec.steps}"
                )


def _phases(spec: Any) -> Iterator[Finding]:
    """Deadlines of phases that no step of the job has."""
    algorithm = ALGORITHMS[spec.algorithm.name]
    lacking = {
        **dict.fromkeys(("judge_wake", "judge", "judge_sleep"), ("a judge with a model", judge_model(spec) is None)),
        **dict.fromkeys(("values", "critic_train"), ("a critic", not algorithm.needs_critic)),
        "teacher_log_probs": ("a teacher", spec.algorithm.distill is None),
        "eval": ("an evaluation", spec.evaluation is None),
    }
    for name in spec.timeouts.phases:
        what, lacks = lacking.get(name, ("", False))
        if lacks:
            yield Finding(("timeouts", "phases", name), f"has no effect without {what}", "leave it out")


def _skipped(data: Any) -> Iterator[Finding]:
    """Rows that a source whose size stands in the manifest does not have."""
    for index, value in enumerate(data.skip):
        name, _, number = str(value).rpartition("/")
        named = [one for one in data.sources if one.name == name] if name else data.sources
        for source in named if len(named) == 1 else [] if data.sources else [data]:
            rows = source.seeds.count if source.seeds is not None else source.synthetic and source.synthetic.rows
            if rows is not None and int(number) >= rows:
                yield Finding(("skip", index), "there is no such row", f"0 to {rows - 1}")


def _default(block: type[ApiModel], name: str) -> Any:
    return block.model_fields[name].get_default(call_default_factory=True)


SILENT_CHECKS: dict[type, tuple[Check, ...]] = {
    DataSpec: (
        _unless(DataSpec, lambda d: bool(d.sources), "on the only source", "leave it out", "weight"),
        _skipped,
    ),
    SyntheticData: (
        _unless(SyntheticData, lambda d: d.task != "NameColor", "on pictures", "leave it out", "prompt_symbols"),
    ),
    RewardSpec: (_judged,),
    VerdictSpec: (_verdict,),
    RLJobSpec: (
        *(_python_alone, _around_observations, _bounds_of_episodes, _unspoken, _pixels, _columns, _steps, _phases),
    ),
    EvaluationSpec: (
        _unless(EvaluationSpec, lambda e: e.temperature > 0, "with temperature 0", "a temperature above 0", "top_p"),
    ),
    TisSpec: (
        _unless(
            TisSpec, lambda t: t.enabled, "with enabled: false", "enabled: true", "level", "outside", "low", "high"
        ),
    ),
    KlSpec: (
        _unless(
            KlSpec,
            lambda k: k.coefficient > 0 or k.monitor,
            "where no KL is computed",
            "a coefficient above 0, or monitor: true",
            *("estimator", "unbiased"),
        ),
    ),
    OptimizerSpec: (
        _unless(
            OptimizerSpec,
            lambda o: o.schedule != LrSchedule.CONSTANT,
            "on a constant rate",
            "schedule: linear or cosine",
            *("min_lr", "decay_steps"),
        ),
    ),
    OversamplingSpec: (
        _unless(OversamplingSpec, lambda o: o.factor <= o.limit, "above limit", "at most limit", "factor"),
    ),
    WeightSyncSpec: (
        _unless(
            WeightSyncSpec,
            lambda w: w.probe_every_steps > 0,
            "without a probe",
            "a probeEverySteps above 0",
            "probe_tolerance",
        ),
    ),
    TuningSpec: (
        _unless(
            TuningSpec,
            lambda t: t.compile_cache,
            "without a cache of operators",
            "compileCache: true",
            *("compile_cache_path", "compile_cache_mib"),
        ),
    ),
    TrackerSpec: (
        _unless(TrackerSpec, lambda t: t.samples > 0, "without tables", "samples above 0", "samples_every_steps"),
    ),
    RecordsSpec: (
        _unless(
            RecordsSpec,
            lambda r: r.trajectories_every_steps > 0,
            "without trajectories",
            "a trajectoriesEverySteps above 0",
            "trajectories_per_step",
        ),
        _unless(
            RecordsSpec,
            lambda r: r.http_port is not None,
            "without an endpoint",
            "an httpPort",
            *("http_host", "linger_seconds"),
        ),
    ),
    FailurePolicy: (_rules,),
}
