"""Rules about models that score responses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rljob_api.rules.findings import Check, Finding, address_fault
from rljob_api.rules.texts import NEVER_GIVEN, reward_functions
from rljob_api.spec import JudgeEndpoint, JudgeSpec, RewardSpec, RLJobSpec, VerdictSpec


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


def _network(reward: Any) -> Iterator[Finding]:
    if not reward.network and any(function.name == "judge" for function in reward.parts or [reward]):
        yield Finding(("network",), "false keeps a judge from being asked", "true")


def _endpoint(endpoint: Any) -> Iterator[Finding]:
    if wrong := address_fault(endpoint.url):
        yield Finding(("url",), wrong, "like http://judge:8000/v1")
    elif endpoint.url.rstrip("/").endswith("/completions"):
        yield Finding(("url",), "is that of one request", "the address before it, like http://judge:8000/v1")


def _judge(judge: Any) -> Iterator[Finding]:
    if judge.request_seconds > judge.timeout_seconds:
        wrong = "is more than timeoutSeconds, in which the verdict has to come"
        yield Finding(("requestSeconds",), wrong, f"at most {judge.timeout_seconds:g}")
    if judge.prompt is None and (judge.verdict.pattern != VerdictSpec().pattern or judge.verdict.values):
        wrong = "is needed: the default asks for a number in the form of verdict.pattern's default"
        yield Finding(("prompt",), wrong, "a template that says how the verdict is written")
    if judge.endpoint.key_variable in NEVER_GIVEN:
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
            yield Finding(("pattern",), f"has {groups} groups", "one group, which is the verdict")
    if verdict.min >= verdict.max:
        yield Finding(("min",), "is not less than max, so that no number or one alone is a verdict", "min < max")
    if verdict.values and (verdict.min, verdict.max) != (VerdictSpec().min, VerdictSpec().max):
        yield Finding(("values",), "leave min and max without effect", "either values, or min and max")
    folded = Counter(word.strip().casefold() for word in verdict.values)
    for word in verdict.values:
        if not word.strip() or folded[word.strip().casefold()] > 1:
            yield Finding(("values", word), "is empty, or the same word as another", "words that differ")


JUDGE_CHECKS: dict[type, tuple[Check, ...]] = {
    RLJobSpec: (_asked,),
    RewardSpec: (_network,),
    JudgeEndpoint: (_endpoint,),
    JudgeSpec: (_judge,),
    VerdictSpec: (_verdict,),
}
