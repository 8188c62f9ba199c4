"""Rules about models that score responses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rljob_api import derived
from rljob_api.how_many import how_many
from rljob_api.rules.core import Rule, exactly_one
from rljob_api.rules.findings import Check, Finding, address_fault, one_line
from rljob_api.rules.places import reward_functions
from rljob_api.rules.variables import NEVER_GIVEN
from rljob_api.spec import JudgeEndpoint, JudgeKind, JudgeSpec, Mode, RLJobSpec, VerdictSpec

_OF_REQUESTS = ("concurrency", "request_seconds", "timeout_seconds")
"""Fields of a judge that say how a server is asked."""
_OF_CHAT = ("system", "verdict", "max_tokens", "temperature")
"""Fields that say how it is asked to answer in words."""
_FUZZY = re.compile(r"(?<!\\)\{[\s\d<=+]*[eids]\s*[<=+,:}]")
"""A brace that `re` takes for text, and `regex` for a number of errors."""
_MODELS = "self.judges.exists(judge, has(judge.model))"


def _asked(spec: Any) -> Iterator[Finding]:
    """Rewards that ask no judge, and judges that nobody asks."""
    names = [judge.name for judge in spec.judges]
    for name, count in Counter(names).items():
        if count > 1:
            index = len(names) - 1 - names[::-1].index(name)
            yield Finding(("judges", index, "name"), "is the name of another judge", "a name of its own for each judge")
    asked, seen = set[str](), set()
    for (place, function), _ in reward_functions(spec):
        if function.name != "judge":
            continue
        named = function.args.get("judge")
        asked |= {named} if isinstance(named, str) else set(names)
        if place in seen:
            continue
        seen.add(place)
        if not names:
            yield Finding((*place, "name"), "asks a judge, and there are none", "one in spec.judges, or another reward")
        elif named is None and len(names) > 1:
            yield Finding((*place, "args"), "does not say which judge is asked", f"judge: {' or '.join(names)}")
        elif isinstance(named, str) and named not in names:
            yield Finding((*place, "args", "judge"), "there is no judge of this name", ", ".join(names))
    for index, name in enumerate(names):
        if name not in asked:
            yield Finding(("judges", index), "has no effect: no reward asks it", "leave it out")


def _held_out(spec: Any) -> Iterator[Finding]:
    """Held-out prompts that a model of the job's own is to score: it has its turn in a training step alone."""
    model = derived.judge_model(spec)
    if model is None:
        return
    for (place, function), (at, _) in reward_functions(spec):
        if at[0] == "evaluation" and function.name == "judge" and function.args.get("judge") in (None, model.name):
            wrong = f"judge {model.name} is a model of the job's own, which scores in training steps alone"
            where = place if place[0] == "evaluation" else ("evaluation",)
            yield Finding(where, wrong, "a reward of their own for held-out prompts, or a judge with an endpoint")
            return


def _network(spec: Any) -> Iterator[Finding]:
    """Rewards whose processes have no network, and that ask a judge by it."""
    served = [judge.name for judge in spec.judges if judge.endpoint is not None]
    seen = set()
    for (place, function), (_, source) in reward_functions(spec):
        where = place[: place.index("reward") + 1]
        named = function.args.get("judge") if function.name == "judge" else ""
        if (
            not (source.reward or spec.reward).network
            and where not in seen
            and (served if named is None else named in served)
        ):
            seen.add(where)
            yield Finding((*where, "network"), "false keeps a judge from being asked", "true")


def _endpoint(endpoint: Any) -> Iterator[Finding]:
    if wrong := address_fault(endpoint.url):
        yield Finding(("url",), wrong, "like http://judge:8000/v1")
    elif endpoint.url.rstrip("/").endswith("/completions"):
        yield Finding(("url",), "is that of one request", "the address before it, like http://judge:8000/v1")


def _is_default(value: Any, default: Any) -> bool:
    """Whether a value, of a manifest that may say all defaults as a run's record does, is the default."""
    if isinstance(default, VerdictSpec):
        return all(getattr(value, name) == getattr(default, name) for name in VerdictSpec.model_fields)
    return bool(value == default)


def _judge(judge: Any) -> Iterator[Finding]:
    unused = {} if judge.model is None else dict.fromkeys(_OF_REQUESTS, "no server is asked")
    if judge.kind == JudgeKind.SCORE:
        unused |= dict.fromkeys(_OF_CHAT, "a model that gives a number is not asked for words")
    for name, why in unused.items():
        if not _is_default(getattr(judge, name), JudgeSpec.model_fields[name].get_default()):
            yield Finding((JudgeSpec.model_fields[name].alias or name,), f"has no effect: {why}", "leave it out")
    if judge.kind == JudgeKind.SCORE:
        return
    if judge.model is not None and judge.max_tokens >= judge.model.max_tokens:
        wrong = "leaves no room for a text: model.maxTokens are of both"
        yield Finding(("maxTokens",), wrong, f"less than {judge.model.max_tokens}")
    if judge.request_seconds > judge.timeout_seconds:
        wrong = "is more than timeoutSeconds, in which the verdict has to come"
        yield Finding(("requestSeconds",), wrong, f"at most {judge.timeout_seconds:g}")
    if judge.prompt is None and (judge.verdict.pattern != VerdictSpec().pattern or judge.verdict.values):
        wrong = "is needed: the default asks for a number in the form of verdict.pattern's default"
        yield Finding(("prompt",), wrong, "a template that says how the verdict is written")
    if judge.endpoint is not None and judge.endpoint.key_variable in NEVER_GIVEN:
        yield Finding(
            ("endpoint", "keyVariable"), f"{judge.endpoint.key_variable} is a secret of the job itself", "another"
        )


def _verdict(verdict: Any) -> Iterator[Finding]:
    try:
        groups = re.compile(verdict.pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        yield Finding(("pattern",), f"is no regular expression: {error}", "as Python's re takes it")
    else:
        if groups != 1:
            yield Finding(("pattern",), f"has {how_many(groups, 'group')}", "one group, which is the verdict")
        if found := _FUZZY.search(verdict.pattern):
            wrong = f"{found.group()!r} asks the package regex, which searches, for near matches"
            yield Finding(("pattern",), wrong, "a brace of the text as \\{")
    if verdict.min >= verdict.max:
        yield Finding(("min",), "is not less than max, so that no number or one alone is a verdict", "min < max")
    if verdict.values and (verdict.min, verdict.max) != (VerdictSpec().min, VerdictSpec().max):
        yield Finding(("values",), "leave min and max without effect", "either values, or min and max")
    folded = Counter(word.strip().casefold() for word in verdict.values)
    for word in verdict.values:
        if not word.strip() or folded[word.strip().casefold()] > 1:
            yield Finding(("values", word), "is empty, or the same word as another", "words that differ")


def _has_model(spec: Any) -> bool:
    return derived.judge_model(spec) is not None


def _without(field: str, wrong: str) -> Rule:
    """A way of generating that a judge with a model cannot have."""
    return Rule(
        on=RLJobSpec,
        field=f"rollout.{field}",
        wrong=wrong,
        allowed="leave it out with a judge that has a model",
        check=lambda spec: getattr(spec.rollout, field) is None or not _has_model(spec),
        cel=f"!has(self.rollout.{field}) || !{_MODELS}",
    )


JUDGES = (
    exactly_one(JudgeSpec, "endpoint", "model"),
    Rule(
        on=JudgeSpec,
        field="kind",
        wrong="a server answers in a chat; what gives a number is a model of the job's own",
        allowed="Chat, or model in the place of endpoint",
        check=lambda judge: judge.kind != JudgeKind.SCORE or judge.model is not None,
        cel="!has(self.kind) || self.kind != 'Score' || has(self.model)",
    ),
    Rule(
        on=RLJobSpec,
        field="judges",
        wrong="more than one judge has a model, and a job runs one",
        allowed="one with model",
        check=lambda spec: sum(judge.model is not None for judge in spec.judges) <= 1,
        cel="self.judges.filter(judge, has(judge.model)).size() <= 1",
    ),
    Rule(
        on=RLJobSpec,
        field="mode",
        wrong="a judge with a model scores while trainers and engines take turns on devices that they share",
        allowed=f"{Mode.COLOCATED.value}, or judges with an endpoint",
        check=lambda spec: spec.mode == Mode.COLOCATED or not _has_model(spec),
        cel=f"self.mode == '{Mode.COLOCATED.value}' || !{_MODELS}",
    ),
    *(
        _without(field, why)
        for field, why in (
            ("oversampling", "samples again after scores, and a judge with a model scores once in a step"),
            ("partial", "carries responses over, and a judge with a model scores all of a step's"),
            ("tail", "carries groups over, and a judge with a model scores all of a step's"),
        )
    ),
)


JUDGE_CHECKS: dict[type, tuple[Check, ...]] = {
    RLJobSpec: (_asked, _held_out, _network),
    JudgeEndpoint: (one_line("model"), _endpoint),
    JudgeSpec: (_judge,),
    VerdictSpec: (_verdict,),
}
