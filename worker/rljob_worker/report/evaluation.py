"""An evaluation without training: its results as JSON, as a table and as `report.html`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rljob_api.how_many import how_many
from rljob_api.json_types import JsonObject
from rljob_api.safe_text import visible_line
from rljob_worker.errors import UserError
from rljob_worker.host.files import read_file, this_thread, write_whole
from rljob_worker.host.sealed_json import sealed, unsealed
from rljob_worker.records.run_files import EVALUATION_FILE, require_run_folder
from rljob_worker.records.steps import read_steps
from rljob_worker.records.trajectories import read_trajectories
from rljob_worker.report.page import Heading, Part, Place, Table, document, sample_table
from rljob_worker.report.page_data import sample_data
from rljob_worker.report.text import aligned, number
from rljob_worker.rewards.trial import Count, Distribution, counts

_DIGITS = 4


@dataclass(frozen=True, slots=True)
class EvaluatedSet:
    """The results of one evaluation set."""

    name: str
    prompts: int
    responses: int
    mean: float
    deviation: float
    truncated: float
    """Share of the responses that were cut at the token limit."""
    pass_at: dict[str, float]
    """k -> pass@k."""
    errors: int
    """Responses whose reward failed, and have `reward.errorScore`."""
    parts: dict[str, float] = field(default_factory=dict)
    """Part of the reward -> its mean."""
    distribution: Sequence[Count] = ()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Subject of an evaluation, and the results."""

    weights: str
    seconds: float
    sets: Sequence[EvaluatedSet]

    def to_json(self) -> dict[str, Any]:
        """Content of `evaluation.json`."""
        return asdict(self)


def evaluation_of(run_folder: Path, weights: str) -> Evaluation:
    """The results of an evaluation that just ended, from its record and its responses.

    Args:
        run_folder: of the evaluation.
        weights: which were evaluated, for people.
    """
    record = read_steps(run_folder)[-1]
    _, rows = read_trajectories(run_folder, 0)
    names = dict.fromkeys(str(row["source"]) for row in rows)
    sets = [_set(name, record.metrics, [row for row in rows if row["source"] == name]) for name in names]
    return Evaluation(weights, record.step_seconds, sets)


def _set(name: str, metrics: Any, rows: Sequence[dict[str, Any]]) -> EvaluatedSet:
    scores = [float(row["reward"]) for row in rows]
    parts: dict[str, list[float]] = {}
    for row in rows:
        for part, value in row["reward_parts"].items():
            if value is not None:
                parts.setdefault(part, []).append(value)
    before = f"eval/{name}/pass@"
    return EvaluatedSet(
        name=name,
        prompts=len({row["prompt_uid"] for row in rows}),
        responses=len(rows),
        mean=metrics[f"eval/{name}"],
        deviation=Distribution.of(scores).deviation,
        truncated=metrics[f"eval/{name}/truncated_ratio"],
        pass_at={metric.removeprefix(before): value for metric, value in metrics.items() if metric.startswith(before)},
        errors=sum(row["reward_error"] is not None for row in rows),
        parts={part: Distribution.of(values).mean for part, values in parts.items()},
        distribution=counts(scores),
    )


def write_evaluation(run_folder: Path, evaluation: Evaluation) -> None:
    """Write `evaluation.json`."""
    write_whole(run_folder / EVALUATION_FILE, sealed(evaluation.to_json(), indent=1) + "\n", writer=this_thread())


def read_evaluation(run_folder: Path) -> Evaluation:
    """The content of `evaluation.json`; UserError where it is not what `rljob eval` wrote."""
    path = run_folder / EVALUATION_FILE
    try:
        content = unsealed(read_file(path).decode())
        sets = [
            EvaluatedSet(**one | {"distribution": [Count(**count) for count in one["distribution"]]})
            for one in content["sets"]
        ]
        return Evaluation(content["weights"], content["seconds"], sets)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{path}: damaged: {error!r}; `rljob eval` writes it anew in another folder") from None


def evaluation_text(evaluation: Evaluation) -> str:
    """A table for the terminal: a line for each set."""
    about = visible_line(f"weights {evaluation.weights}")
    return "\n".join([about, *aligned(*_table(evaluation)), *_failures(evaluation)])


def _failures(evaluation: Evaluation) -> list[str]:
    return [
        visible_line(f"{one.name}: the reward of {how_many(one.errors, 'response')} failed; `rljob samples` shows why")
        for one in evaluation.sets
        if one.errors
    ]


def _table(evaluation: Evaluation) -> tuple[list[str], list[list[str]]]:
    ks = sorted({k for one in evaluation.sets for k in one.pass_at}, key=int)
    parts = sorted({part for one in evaluation.sets for part in one.parts})
    head = ["set", "prompts", "responses", "mean", "std", *(f"pass@{k}" for k in ks), "truncated", "errors", *parts]
    rows = [
        [
            one.name,
            str(one.prompts),
            str(one.responses),
            number(one.mean, _DIGITS),
            number(one.deviation, _DIGITS),
            *(number(one.pass_at.get(k), _DIGITS) for k in ks),
            number(one.truncated, _DIGITS),
            str(one.errors),
            *(number(one.parts.get(part), _DIGITS) for part in parts),
        ]
        for one in evaluation.sets
    ]
    return head, rows


def write_evaluation_page(run_folder: Path) -> Path:
    """Write `report.html` of an evaluation; returns it.

    Raises:
        UserError: not the folder of an evaluation, or a file of it is damaged.
    """
    run, evaluation = require_run_folder(run_folder), read_evaluation(run_folder)
    _, samples = read_trajectories(run_folder, 0)
    facts = [["weights", evaluation.weights], ["seconds of the evaluation", number(evaluation.seconds)]]
    parts: list[Part] = [Table([], facts), Heading("Sets"), Table(*_table(evaluation))]
    for one in evaluation.sets:
        values = [[_range(count), str(count.count)] for count in one.distribution]
        parts += [Heading(f"Rewards of {one.name}"), Table(["reward", "responses"], values)]
        parts += [Heading(f"Worst and best samples of {one.name}")]
        parts += [sample_table([row for row in samples if row["source"] == one.name])]
    parts += [Heading("All samples"), Place("samples")]
    data: JsonObject = {"runs": [], "live": False, "samples": sample_data(run_folder)}
    page = run_folder / "report.html"
    # The manifest in it may name keys among its variables.
    write_whole(page, document(f"{run.name}: evaluation", parts, run.job, data), writer=this_thread(), private=True)
    return page


def _range(count: Count) -> str:
    return f"{count.low:.6g}" if count.low == count.high else f"{count.low:.4g} to {count.high:.4g}"
