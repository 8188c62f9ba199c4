"""Rows against the rewards that score them: the column that chooses a reward, and the tests of programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from rljob_api import RLJobSpec
from rljob_api.spec import DataSource
from rljob_worker.data.evaluate import held_out_settings
from rljob_worker.data.renderer import ScoredRows
from rljob_worker.data.reward_rows import RowRewards
from rljob_worker.data.rows import Row
from rljob_worker.data.sources import LoadedSource, check_head, prompt_and_label
from rljob_worker.errors import UserError
from rljob_worker.rewards.code_tests import call_cases, column, stdin_cases, test_file
from rljob_worker.rewards.source_check import check_columns
from rljob_worker.rewards.weighted_parts import Part, parts_of

CHECK_SECONDS = 5.0
"""Seconds for the check of the rows of one job; what is found after it is drawn is an error of the reward."""
_SHOWN = 5
_CHUNK = 64


def check_first_rows(spec: RLJobSpec, source: DataSource, field: str) -> frozenset[str] | None:
    """Look at the rows of a small local file, or generated ones, before anything is imported that takes seconds.

    Returns:
        The columns that a reward is given beside prompt and label; None where the rows are not looked at.

    Raises:
        UserError: a row is none, lacks a column, has no reward, or tests that cannot be read; a function asks for a
            column that there is not.
    """
    loaded = check_head(source, field)
    if loaded is None:
        return None
    scored = scored_rows(spec, loaded)
    place = f"{field}.reward" if source.reward is not None else "spec.reward"
    for part in parts_of(scored.reward):
        if part.reward.python is not None:
            check_columns(f"{place}{part.place}", part.reward, loaded.reward_columns(), prompt_and_label(source))
    check_tests([scored])
    return loaded.reward_columns()


def scored_rows(spec: RLJobSpec, loaded: LoadedSource) -> ScoredRows:
    """The rows of a source that are used, and what scores them. Raises UserError where one has no reward."""
    if spec.evaluation is not None and loaded.field.startswith("spec.evaluation"):
        most = held_out_settings(spec.evaluation, loaded.source.name).max_prompts
        return ScoredRows.of(loaded, spec.reward, most)
    own = [row for row in spec.data.skip if str(row).rpartition("/")[0] in ("", loaded.name)]
    return ScoredRows.of(loaded, spec.reward, left_out=frozenset(int(str(row).rpartition("/")[2]) for row in own))


def check_tests(sources: Sequence[ScoredRows], seconds: float = CHECK_SECONDS) -> None:
    """Refuse rows whose programs could not be tested, as far as time allows.

    Raises:
        UserError: no row has a column that the reward `code` names, or one has tests in no known form while
            `onError` is `Fail`.
    """
    until = time.monotonic() + seconds
    for scored in sources:
        if not any(part.reward.name == "code" for part in parts_of(scored.reward)):
            continue
        found: list[tuple[str, str, int]] = []
        looked_at = 0
        for row, content in enumerate(islice(scored.loaded.rows, scored.count)):
            if row in scored.left_out:
                continue
            if looked_at % _CHUNK == 0 and time.monotonic() > until:
                break
            looked_at += 1
            found += [(place, wrong, row) for place, wrong in _faults(scored, content)]
        _refuse(scored, found, looked_at)


def _faults(scored: ScoredRows, row: Row) -> Iterator[tuple[str, str]]:
    """(argument in the manifest, what is wrong) of one row."""
    for part in parts_of(RowRewards(scored.reward).of_row(row)):
        if part.reward.name == "code":
            yield from _faults_of_code(part, row)


def _faults_of_code(part: Part, row: Row) -> Iterator[tuple[str, str]]:
    args = part.reward.args
    for name in ("tests", "prefix"):
        try:
            if name in args:
                value = column(row, str(args[name]))
                if name == "tests":
                    _READERS[str(args["kind"])](value, args)
        except ValueError as error:
            yield f"args.{name}", str(error)


_READERS: Mapping[str, Callable[[object, Mapping[str, object]], object]] = {
    "Stdin": lambda tests, args: stdin_cases(tests),
    "Calls": lambda tests, args: call_cases(tests, None if args.get("function") is None else str(args["function"])),
    "Pytest": lambda tests, args: test_file(tests),
}


def _refuse(scored: ScoredRows, found: Sequence[tuple[str, str, int]], looked_at: int) -> None:
    loaded, reward = scored.loaded, scored.reward
    field = f"{loaded.field}.reward" if loaded.source.reward else "spec.reward"
    rows = sorted({row for _, _, row in found})
    if not rows or (reward.on_error == "Score" and len(rows) < looked_at):
        return
    shown = [f"  {loaded.place(row)}: {wrong} ({place})" for place, wrong, row in found[:_SHOWN]]
    if len(found) > _SHOWN:
        shown.append(f"  and {len(found) - _SHOWN} more")
    there = ", ".join(sorted(loaded.reward_columns()))
    raise UserError(
        "\n".join(
            [
                f"{field}: {len(rows)} of {looked_at} rows of {loaded.field} cannot be tested by the reward code:",
                *shown,
                f"the columns there are: {there}",
                "correct these rows or args, leave rows of the training data out with spec.data.skip, or set "
                "reward.onError: Score, with which their samples get reward.errorScore",
            ]
        )
    )
