"""Rewards by a column (`reward.by`): which parts score a row, and how many rows have each value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rljob_api.how_many import how_many
from rljob_api.rewards import BUILTIN_REWARDS, part_name
from rljob_api.spec import RewardPart, RewardSpec
from rljob_worker.data.columns import TableRows
from rljob_worker.data.labels import label_text
from rljob_worker.data.nested import value_at
from rljob_worker.data.rows import Row
from rljob_worker.data.sources import LoadedSource
from rljob_worker.errors import UserError

_SHOWN = 5
_LOOKED_AT = 100
"""Rows of a value whose columns are looked at."""


class RowRewards:
    """The reward of each row; one object for all rows that the same parts score."""

    def __init__(self, reward: RewardSpec) -> None:
        self._reward = reward
        self._by_value: dict[str | None, RewardSpec | None] = {}

    def of_row(self, row: Row) -> RewardSpec:
        """The reward with the parts that score this row. Raises ValueError where there is none."""
        by = self._reward.by
        if by is None:
            return self._reward
        value = value_text(value_at(row, by))
        found = self.of_value(value)
        if found is None:
            raise ValueError(no_reward(by, value, self._reward))
        return found

    def of_value(self, value: str | None) -> RewardSpec | None:
        """The same of a value of the column; None where no part scores its rows."""
        if self._reward.by is None:
            return self._reward
        if value not in self._by_value:
            parts = [part for part in self._reward.parts or [] if scores(part, value)]
            self._by_value[value] = self._reward.model_copy(update={"parts": parts, "by": None}) if parts else None
        return self._by_value[value]


def scores(part: RewardPart, value: str | None) -> bool:
    """Whether a part scores the rows of a value; None: rows that have none."""
    return part.rows is None or value in part.rows


def value_text(value: object) -> str | None:
    """A value as `rows` names it, None where a row has none. Raises ValueError for what is no name."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    raise ValueError(f"is {type(value).__name__}: text, a whole number or true or false is needed")


def no_reward(by: str, value: str | None, reward: RewardSpec) -> str:
    """A sentence that says so, with the values that have one."""
    known = sorted({name for part in reward.parts or [] for name in part.rows or []})
    if value is None:
        return f"has no {by!r}, and each part is for some of its values: {', '.join(known)}"
    near = difflib.get_close_matches(value, known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{by} is {value!r}, which is in no part's rows{hint}; there are {', '.join(known)}"


@dataclass(frozen=True, slots=True)
class ValueRows:
    """The rows of one value of the column."""

    count: int
    columns: frozenset[str]
    """Columns of the first of them."""


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """One source's rows by the value that chooses their reward."""

    field: str
    """The reward's place in the manifest."""
    source: str
    """Name in messages."""
    reward: RewardSpec
    values: Mapping[str | None, ValueRows]

    def columns_of(self, index: int) -> frozenset[str] | None:
        """Columns of the rows that a part scores; None where it scores none."""
        assert self.reward.parts is not None
        part = self.reward.parts[index]
        found = [rows.columns for value, rows in self.values.items() if scores(part, value)]
        return frozenset().union(*found) if found else None

    def lines(self) -> Iterator[str]:
        """A line for each value: the number of its rows, and the rewards that score them."""
        assert self.reward.parts is not None
        for value, rows in sorted(self.values.items(), key=lambda item: (item[0] is None, item[0] or "")):
            names = [part_name(part) for part in self.reward.parts if scores(part, value)]
            said = f"without {self.reward.by}" if value is None else f"with {self.reward.by} {value}"
            yield f"{self.source}: {how_many(rows.count, 'row')} {said}: {' + '.join(names)}"


def route(loaded: LoadedSource, reward: RewardSpec, count: int, left_out: frozenset[int]) -> RoutedRows | None:
    """Look at the column in the first `count` rows but those that are left out; None without `reward.by`.

    Raises:
        UserError: there is no such column, a row has a value that no part scores, or a label that its part cannot use.
    """
    if reward.by is None:
        return None
    field = f"{loaded.field}.reward" if loaded.source.reward else "spec.reward"
    label_key = loaded.source.label_key
    rewards = RowRewards(reward)
    counts: dict[str | None, int] = {}
    columns: dict[str | None, set[str]] = {}
    faults: dict[str, tuple[int, int]] = {}
    for row, (given, label, names) in enumerate(_values(loaded.rows, reward.by, label_key, count)):
        if row in left_out:
            continue
        try:
            value = value_text(given)
            own = rewards.of_value(value)
            wrong = no_reward(reward.by, value, reward) if own is None else _misfit(loaded, own, label)
        except ValueError as error:
            wrong = f"{reward.by} {error}"
        if wrong:
            first, so_far = faults.get(wrong, (row, 0))
            faults[wrong] = first, so_far + 1
            continue
        counts[value] = counts.get(value, 0) + 1
        if counts[value] <= _LOOKED_AT:
            columns.setdefault(value, set()).update(names)
    if set(counts) <= {None} and not _has_column(loaded.rows, reward.by, count):
        there = ", ".join(map(repr, sorted({name for one in loaded.rows[:_LOOKED_AT] for name in one})))
        raise UserError(
            f"{field}.by: {loaded.origin} ({loaded.field}) has no column {reward.by!r}; the columns there are: {there}"
        )
    if faults:
        raise UserError(_refusal(loaded, field, faults))
    without_prompt = {loaded.source.prompt_key, label_key}
    values = {value: ValueRows(found, frozenset(columns[value] - without_prompt)) for value, found in counts.items()}
    return RoutedRows(field, f"{loaded.field} ({loaded.name})", reward, values)


def unused_parts(routed: Iterable[RoutedRows]) -> list[str]:
    """A sentence for each part, and each value of its rows, that no row of any source has."""
    rewards: dict[str, RewardSpec] = {}
    seen: dict[str, set[str | None]] = {}
    for one in routed:
        rewards[one.field] = one.reward
        seen.setdefault(one.field, set()).update(one.values)
    said = []
    for field, reward in rewards.items():
        for index, part in enumerate(reward.parts or []):
            absent = [value for value in part.rows or [] if value not in seen[field]]
            if absent and len(absent) == len(part.rows or []):
                said.append(f"{field}.parts[{index}] ({part_name(part)}) scores nothing: no row has {_one_of(absent)}")
            elif absent:
                said.append(f"{field}.parts[{index}].rows: no row has {_one_of(absent)}")
    return said


def _one_of(values: Sequence[str]) -> str:
    more = f" and {len(values) - _SHOWN} others" if len(values) > _SHOWN else ""
    return ", ".join(map(repr, values[:_SHOWN])) + more


def _refusal(loaded: LoadedSource, field: str, faults: Mapping[str, tuple[int, int]]) -> str:
    shown = [
        f"  {loaded.place(row)}: {wrong}" + (f" ({how_many(count, 'row')})" if count > 1 else "")
        for wrong, (row, count) in list(faults.items())[:_SHOWN]
    ]
    if len(faults) > _SHOWN:
        shown.append(f"  and {len(faults) - _SHOWN} more")
    rows = sum(count for _, count in faults.values())
    return "\n".join(
        [
            f"{field}.by: {how_many(rows, 'row')} of {loaded.field} cannot be scored:",
            *shown,
            "name the value in a part's rows, add a part without rows, which scores every row, or leave rows of the "
            "training data out with spec.data.skip",
        ]
    )


def _misfit(loaded: LoadedSource, reward: RewardSpec, label: object) -> str:
    """The part of a row that does not fit the built-in rewards that score it; empty where all fits."""
    for part in reward.parts or []:
        if part.name is None:
            continue
        if part.name == "environment" and loaded.source.environment is None:
            return f"the reward environment scores it, and {loaded.field} has no environment"
        if BUILTIN_REWARDS[part.name].compares and loaded.source.label_key is None:
            return f"the reward {part.name} compares with a label, and {loaded.field}.labelKey is null"
        if BUILTIN_REWARDS[part.name].compares and not label_text(label).strip():
            return f"the reward {part.name} compares with the label, which is empty"
    return ""


def _values(
    rows: Sequence[Row], by: str, label_key: str | None, count: int
) -> Iterator[tuple[object, object, Iterable[str]]]:
    """(value, label, names of the columns) of the first rows."""
    if isinstance(rows, TableRows):
        names = rows.names
        values, labels = rows.values(by, count), rows.values(label_key, count)
        for value, label in zip(values, labels):
            yield value, label, names
        return
    for row in rows[:count]:
        yield value_at(row, by), None if label_key is None else row.get(label_key), row.keys()


def _has_column(rows: Sequence[Row], by: str, count: int) -> bool:
    if isinstance(rows, TableRows):
        return rows.has(by)
    return any(value_at(row, by) is not None or by in row for row in rows[:count])
