"""Ways on for a run that died of a row or a reward: a mended row, one that is left out, other fields of a manifest."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_groups import PROMPT, begun, part
from test_run_folder import job, used

from rljob_api.rules import CHANGES, immutable_changes
from rljob_api.wire.run_status import ResumeChanges
from rljob_api.wire.step_record import Changed, StepRecord
from rljob_worker.checkpoints.recovery import Recovery
from rljob_worker.checkpoints.run_folder import RunFolder
from rljob_worker.cli.run import _row
from rljob_worker.cli.sweep import without_rows
from rljob_worker.data.dataset import PromptSource
from rljob_worker.data.row_store import RowStore, most_mended
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.errors import UserError
from rljob_worker.flow import GroupPool
from rljob_worker.flow.pool import still_good
from rljob_worker.records.audit import audit_prompts, changes_of
from rljob_worker.records.run_files import require_run_folder
from rljob_worker.types import Picture

ROWS = 40


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., PromptSource]:
    """A source over a file of 40 rows, some of which have another label."""
    path = tmp_path / "sums.jsonl"

    def source(other: dict[int, str] | None = None, rows: int = ROWS, **data: Any) -> PromptSource:
        labels = {i: str(i) for i in range(rows)} | (other or {})
        path.write_text("".join(json.dumps({"prompt": f"p{i}", "label": labels[i]}) + "\n" for i in range(rows)))
        model = {"random": {"config": {"model_type": "qwen3"}}}
        spec = job(data={"path": str(path), "shuffle": False, **data}, model=model).spec
        return PromptSource(spec, load_tokenizer(prepare_tokenizer(spec, tmp_path / "tokenizer")))

    return source


def test_a_mended_row_is_the_same_data_and_is_named(make: Callable[..., PromptSource], tmp_path: Path) -> None:
    store, first = RowStore(tmp_path), make()
    first.next_prompts(3)
    state = first.state()
    with pytest.raises(UserError, match=r"other content.*single rows may be mended, at most 16 of these"):
        make({9: "mended"}).restore(state)
    make().remember_rows(store)
    mended = make({9: "mended"})
    mended.compare_rows(store)
    mended.restore(state)
    assert mended.mended == ("sums/9",)
    assert mended.next_prompts(7)[-1].label == "mended"
    unchanged = make()
    unchanged.compare_rows(store)
    unchanged.restore(state)
    assert unchanged.mended == ()


@pytest.mark.parametrize("other", [dict.fromkeys(range(17), "x"), {"rows": ROWS + 1}])
def test_other_data_is_no_mended_row(other: dict[Any, Any], make: Callable[..., PromptSource], tmp_path: Path) -> None:
    store, first = RowStore(tmp_path), make()
    first.remember_rows(store)
    source = make(**other) if "rows" in other else make(other)
    source.compare_rows(store)
    with pytest.raises(UserError, match=r"spec\.data: the data of source 'sums' .* changed"):
        source.restore(first.state())


def test_another_template_is_no_mended_row(make: Callable[..., PromptSource], tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    chat = {"applyChatTemplate": True, "chat": {"templateFile": str(tmp_path / "chat.jinja")}}
    store, first = RowStore(tmp_path), make(**chat)
    first.remember_rows(store)
    (tmp_path / "chat.jinja").write_text(template + "!")
    source = make(**chat)
    source.compare_rows(store)
    with pytest.raises(UserError, match="another chat template"):
        source.restore(first.state())


def test_how_many_rows_may_be_mended() -> None:
    assert [most_mended(rows) for rows in (1, 2, 16, 40, 1600, 10_000)] == [0, 1, 8, 16, 16, 100]


def test_a_skipped_row_has_its_number_and_is_closed_as_such(make: Callable[..., PromptSource]) -> None:
    pool = GroupPool(make(skip=[2, "sums/3", 2]))
    drawn = pool.draw(4)
    assert [(one.ordinal, one.prompt.uid) for one in drawn] == [
        (0, "sums/0"), (1, "sums/1"), (4, "sums/4"), (5, "sums/5")
    ]  # fmt: skip
    pool.settle([0, 1, 4], [])
    assert (pool.take_skipped(), pool.take_skipped(), pool.open_ordinals()) == ([2, 3], [], [5])
    state = json.loads(json.dumps(pool.saved.cursor))
    assert state["ledger"]["skipped"] == 2
    again = GroupPool(make(skip=[2, "sums/3"]))
    again.restore(state, ())
    assert [one.ordinal for one in again.draw(2)] == [5, 6]


def test_labels_of_skipped_rows_are_not_judged(make: Callable[..., PromptSource]) -> None:
    (scored,) = make(skip=[2, "sums/3"]).scored()
    assert (scored.count, scored.left_out) == (ROWS, {2, 3})


def test_a_row_that_was_open_is_skipped_at_the_resume(make: Callable[..., PromptSource]) -> None:
    pool = GroupPool(make())
    pool.draw(4)
    pool.settle([0, 3], [])
    again = GroupPool(make(skip=[1]))
    again.restore(json.loads(json.dumps(pool.saved.cursor)), ())
    assert again.open_ordinals() == [2]
    assert [one.ordinal for one in again.draw(3)] == [2, 4, 5]
    assert again.take_skipped() == [1]
    again.settle([2, 4, 5], [])
    assert (again.saved.cursor["ledger"]["skipped"], again.open_ordinals()) == (1, [])


@pytest.mark.parametrize(
    ("skip", "message"),
    [([40], r"spec\.data\.skip\[0\]: 40: there is no such row; there are sums/0 to sums/39"),
     (["other/1"], "there is no such row"), (list(range(ROWS)), r"spec\.data\.skip leaves no row of")],
)  # fmt: skip
def test_a_row_that_is_not_there_is_named(skip: list[Any], message: str, make: Callable[..., PromptSource]) -> None:
    with pytest.raises(UserError, match=message):
        make(skip=skip)


def test_rows_of_the_command_line() -> None:
    given = without_rows(job(data={"path": "a", "skip": [3]}), [_row("9"), _row("sums/4"), 3])
    assert given.spec.data.skip == [3, 9, "sums/4"]
    with pytest.raises(Exception, match="'x' is no row"):
        _row("x")


def test_an_audit_knows_skipped_prompts(make: Callable[..., PromptSource]) -> None:
    from rljob_api.wire.prompts_of_step import PromptsOfStep

    def record(step: int, prompts: PromptsOfStep, changed: Changed | None = None) -> StepRecord:
        one = StepRecord(step, 1, 0.0, 0.1, {"rollout": 0.1}, 0.0, 0.0, {}, prompts=prompts, changed=changed)
        return StepRecord.parse({**one.to_json(), "index": step - 1, "rerun": False})

    changed = Changed(("spec.training.recompute",), ("spec.data.skip",), ("sums/9",))
    records = [
        record(1, PromptsOfStep.of(4, [0, 1], [2], [3])),
        record(2, PromptsOfStep.of(7, [4, 6], [], [], [3, 5]), changed),
    ]
    audit = audit_prompts(records)
    assert (audit.findings, audit.trained, audit.filtered, audit.skipped) == ([], 4, 1, 2)
    audit.check_checkpoint(2, {"ledger": {"next": 7, "open": [], "consumed": 4, "filtered": 1, "skipped": 2}})
    assert audit.findings == []
    assert audit.notes == changes_of(records[1]) == [
        "step 2: bits may differ from here on: spec.training.recompute changed at a resume",
        "step 2: some samples may differ from here on: spec.data.skip changed",
        "step 2: rows of the data were mended before it: sums/9",
    ]  # fmt: skip
    lost = audit_prompts([records[0], record(2, PromptsOfStep.of(7, [4, 6], [], [], [3]))])
    assert lost.findings == ["step 2: prompts [5] were drawn, and neither trained, filtered, skipped nor left open"]


def test_groups_of_rows_that_are_others_do_not_go_on() -> None:
    grown = [begun(ordinal).extended({0: part([7])}, 4) for ordinal in (3, 4, 5)]
    grown[1] = replace(grown[1], deferred_at=2)
    waiting = {3: PROMPT, 4: replace(PROMPT, token_ids=(5, 6, 7))}
    kept, renewed = still_good(grown, waiting, whole=False)
    assert kept is grown[0]
    assert (renewed.ordinal, renewed.seed, renewed.num_sampled, renewed.deferred_at) == (4, 100, 0, 2)
    assert renewed.requests()[0][1].prompt_token_ids == (5, 6, 7)
    assert still_good(grown, waiting, whole=True) == ()
    assert still_good(grown[:1], waiting, whole=True) == (grown[0],)


def test_a_group_of_a_row_with_another_picture_does_not_go_on() -> None:
    seen = replace(PROMPT, pictures=(Picture(np.zeros((4, 12), np.uint8), (1, 2, 2), "a", (2, 2), b""),))
    grown = [begun(3).extended({0: part([7])}, 4)]
    assert still_good(grown, {3: seen}, whole=False) == tuple(grown)
    # Of another picture of that size the tokens are the same.
    (renewed,) = still_good(grown, {3: seen}, (seen.uid,), whole=False)
    assert renewed.num_sampled == 0
    assert still_good(grown, {3: PROMPT}, (seen.uid,), whole=False) == tuple(grown)


@pytest.mark.parametrize(
    ("change", "rounding", "fields"),
    [
        ({"reward": {"name": "match", "onError": "Score"}}, [], ["spec.reward.onError"]),
        ({"data": {"path": "/data/train.jsonl", "skip": [3]}}, [], ["spec.data.skip"]),
        ({"training": {"recompute": "Full"}}, ["spec.training.recompute"], []),
        ({"rollout": {"kvCacheBytes": 2**20}}, ["spec.rollout.kvCacheBytes"], []),
        ({"training": {"tensorParallel": 2}}, ["spec.training.tensorParallel"], []),
        ({"reward": {"name": "match", "memory": "1Gi"}, "timeouts": {"phaseSeconds": 9}}, [], []),
    ],
)
def test_a_resume_notes_what_it_changes(
    change: dict[str, Any], rounding: list[str], fields: list[str], tmp_path: Path
) -> None:
    used(tmp_path, job())
    RunFolder(tmp_path, job(**change), resume=True).close()
    folder = RunFolder(tmp_path, job(**change), resume=True)
    folder.close()
    expected = (ResumeChanges(2, rounding, fields),) if rounding or fields else ()
    assert tuple(folder.changes) == tuple(require_run_folder(tmp_path).changes) == expected


def test_what_makes_another_job_is_refused_still(tmp_path: Path) -> None:
    used(tmp_path, job())
    for change in ({"reward": {"name": "exact"}}, {"data": {"path": "/data/train.jsonl", "shuffle": False}}):
        with pytest.raises(UserError, match="belongs to another job"):
            RunFolder(tmp_path, job(**change), resume=True)


def test_api_server_and_resume_have_one_list() -> None:
    before = job(training={"recompute": "None"}, reward={"name": "match", "onError": "Score"})
    after = job(training={"recompute": "Full"}, reward={"name": "match", "errorScore": 1.0, "onError": "Score"})
    assert immutable_changes(before.spec, after.spec) == []
    assert immutable_changes(before.spec, job(training={"precision": "fp32"}).spec) == ["training"]
    assert all(change.reason for change in CHANGES)


def test_the_first_step_after_a_change_says_so_whoever_writes_it() -> None:
    """The change was made by attempt 2, which died before it wrote a step: attempt 3 marks it."""
    said: list[Any] = []
    changes = (ResumeChanges(2, ("spec.training.recompute",)), ResumeChanges(3, (), ("spec.data.skip",)))
    nobody: Any = None
    recovery = Recovery(
        job().spec, nobody, nobody, nobody, nobody,
        SimpleNamespace(changed=said.append), SimpleNamespace(mended=("sums/9",)), nobody, 3,
        SimpleNamespace(write=lambda event, **more: said.append((event, more))), changes,
    )  # type: ignore[arg-type]  # fmt: skip
    recovery._note_changes(7, 1)
    changed, event = said
    assert changed == Changed(["spec.training.recompute"], ["spec.data.skip"], ("sums/9",))
    assert event[0] == "changed_at_resume"
    assert event[1]["restored"] == 7
    said.clear()
    recovery._pool = SimpleNamespace(mended=())  # type: ignore[assignment]
    recovery._note_changes(8, 3)
    assert said == []
