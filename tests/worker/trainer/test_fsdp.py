"""FSDP on gloo, held to Megatron: equal on any number of ranks, nothing left asleep, resumed bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.samples import unless_all
from support.warm.protocol import TRAINER
from support.warm.scripts import run_script
from test_trainer import Results, whole_tensors, write_model

pytestmark = pytest.mark.slow

FEW = [
    "megatron",
    "one",
    "two",
    "two_resumed",
    "two_to_one",
    "two_to_megatron",
    "megatron_to_two",
    "stop",
    "non_finite",
]
FEW += ["one_recompute", "one_offload", "two_blocks", "two_kept", "context"]
MANY = ["megatron", "megatron_moe", "megatron_fillers", "two", "two_moe", "two_fillers", "two_bf16", "two_released"]
MANY += ["three", "three_moe", "two_to_three", "three_to_one", "tp", "tp_to_three"]
MANY += ["context_four", "context_copies", "context_released", "context_stop", "context_copies_stop"]
MANY += ["two_by_two", "two_by_two_resumed", "two_by_two_moe", "two_by_two_stop"]
LONG = unless_all("three and four ranks")


def launch(folder: Path, ranks: int, cases: list[str]) -> Results:
    write_model(folder / "dense")
    write_model(folder / "moe", "qwen3_moe")
    for model in ("dense", "moe"):
        # A policy samples the padding token as any other.
        config = json.loads((folder / model / "config.json").read_text())
        (folder / model / "config.json").write_text(json.dumps(config | {"pad_token_id": 3}))
    change_one_weight(folder / "dense", folder / "other")
    script = Path(__file__).with_name("fsdp_ranks.py")
    run_script(TRAINER, script, *([rank, folder, *cases] for rank in range(ranks)))
    return Results(folder)


def change_one_weight(folder: Path, target: Path) -> None:
    """A model of the same shape, of which one number is another."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][100, 3] += 1
    save_file(tensors, target / "model.safetensors")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(tmp_path_factory.mktemp("fsdp"), 2, FEW)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(tmp_path_factory.mktemp("fsdp"), 4, MANY)


def equal(results: Results, case: str, megatron: str) -> None:
    expected = results[megatron]
    for result in results.ranks(case):
        for got, want in zip([*result["metrics"], result["last"]], [*expected["metrics"], expected["last"]]):
            assert got.keys() == want.keys()
            assert got["train/loss"] == pytest.approx(want["train/loss"], abs=1e-6)
            assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=1e-6)
            assert got == pytest.approx(want, rel=1e-4, abs=1e-5)
        for got_scores, want_scores in zip(result["scores"], expected["scores"], strict=True):
            np.testing.assert_allclose(got_scores, want_scores, atol=1e-5)
    weights, expected_weights = results.weights(case), results.weights(megatron)
    assert weights.keys() == expected_weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected_weights[name], atol=1e-5, rtol=0)


def continues(results: Results, case: str, before: str, from_to: tuple[str, str]) -> None:
    """The loaded state is the saved one, and the next step is that of the run that went on."""
    saved = whole_tensors(result["pieces"] for result in results.ranks(before))
    loaded = whole_tensors(result["loaded"] for result in results.ranks(case))
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())
    want = results[before]["last"]
    for result in results.ranks(case):
        there, _, here = result["resharded"].partition(", to ")
        assert from_to[0] in there, result["resharded"]
        assert from_to[1] in here, result["resharded"]
        assert result["last"]["train/loss"] == pytest.approx(want["train/loss"], abs=1e-6)
        assert result["last"]["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=1e-6)
    after = [whole_tensors(result["last_pieces"] for result in results.ranks(which)) for which in (before, case)]
    # Moments as well: without them the step goes elsewhere.
    assert all(torch.allclose(tensor, after[1][name], atol=2e-6, rtol=0) for name, tensor in after[0].items())


@pytest.mark.parametrize("case", ["one", "two", "two_blocks", "two_kept", "context"])
def test_any_number_of_ranks_and_blocks_is_megatron(few: Results, case: str) -> None:
    equal(few, case, "megatron")


@LONG
@pytest.mark.parametrize("case", ["two", "three", "two_by_two"])
def test_many_ranks_copies_and_experts_are_megatron(many: Results, case: str) -> None:
    equal(many, case, "megatron")
    equal(many, f"{case}_moe", "megatron_moe")


@LONG
@pytest.mark.parametrize(
    ("case", "megatron"),
    [("context_four", "megatron_moe"), ("context_copies", "megatron"), ("context_released", "megatron")],
)
def test_ranks_that_divide_rows_are_megatron(many: Results, case: str, megatron: str) -> None:
    equal(many, case, megatron)


@LONG
def test_a_rank_with_fillers_alone_is_in_step(many: Results) -> None:
    equal(many, "two_fillers", "megatron_fillers")


def test_nothing_is_resident_asleep_and_no_bit_changes(few: Results) -> None:
    for case in ("one", "two"):
        for result in few.ranks(case):
            assert result["naps"] == [(0, True)] * 2


def test_recompute_and_offload_change_no_bit(few: Results) -> None:
    expected = few["one"]
    for case in ("one_recompute", "one_offload"):
        assert few[case]["metrics"] == expected["metrics"]
        assert all(torch.equal(a, b) for a, b in zip(few[case]["state"], expected["state"], strict=True))


def test_a_resumed_run_is_bit_equal(few: Results) -> None:
    for expected, got in zip(few.ranks("two"), few.ranks("two_resumed"), strict=True):
        assert got["resharded"] == ""
        assert got["last"] == expected["last"]
        assert all(torch.equal(a, b) for a, b in zip(got["state"], expected["state"], strict=True))


@pytest.mark.parametrize(
    ("case", "before", "from_to"),
    [
        ("two_to_one", "two", ("shards 2", "1 trainer:")),
        ("megatron_to_two", "megatron", ("1 trainer:", "shards 2")),
        ("two_to_megatron", "two", ("shards 2", "1 trainer:")),
    ],
)
def test_a_run_continues_on_other_ranks(few: Results, case: str, before: str, from_to: tuple[str, str]) -> None:
    continues(few, case, before, from_to)


@LONG
@pytest.mark.parametrize(
    ("case", "before", "from_to"),
    [
        ("two_to_three", "two", ("shards 2", "shards 3")),
        ("three_to_one", "three", ("shards 3", "1 trainer:")),
        ("tp_to_three", "tp", ("tensor 2", "shards 3")),
    ],
)
def test_a_run_continues_on_more_or_fewer(many: Results, case: str, before: str, from_to: tuple[str, str]) -> None:
    continues(many, case, before, from_to)


@LONG
def test_copies_resume_bit_for_bit_and_save_once(many: Results) -> None:
    sizes = [path.stat().st_size for path in sorted((many.folder / "from_copies").iterdir())]
    assert max(sizes[2:]) < min(sizes[:2]) / 10, "a copy saves its generators alone"
    for expected, got in zip(many.ranks("two_by_two"), many.ranks("two_by_two_resumed"), strict=True):
        assert got["last"] == expected["last"]
        assert all(torch.equal(a, b) for a, b in zip(got["state"], expected["state"], strict=True))


@LONG
def test_groups_that_go_asleep_change_no_bit(many: Results) -> None:
    for expected, got in zip(many.ranks("two"), many.ranks("two_released"), strict=True):
        assert got["metrics"] == expected["metrics"]


@LONG
def test_bf16_computes_with_rounded_weights(many: Results) -> None:
    """Its first step is that of fp32 but for rounding, and its weights stay fp32."""
    got, want = many["two_bf16"]["metrics"][0], many["two"]["metrics"][0]
    assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=0.05)
    assert got["train/grad_norm"] != pytest.approx(want["train/grad_norm"], rel=1e-5)
    assert {piece[4].dtype for piece in many["two_bf16"]["pieces"]} == {torch.float32}


def stopped(results: Results, case: str) -> None:
    for result in results.ranks(case):
        assert result["stopped"]
        assert result["unchanged"]
    assert results[case]["computed"] <= 3 < results[case]["micro_batches"]


def test_a_stop_in_the_middle_of_a_pass(few: Results) -> None:
    stopped(few, "stop")


@LONG
@pytest.mark.parametrize("case", ["two_by_two_stop", "context_stop", "context_copies_stop"])
def test_a_stop_with_copies_or_divided_rows(many: Results, case: str) -> None:
    stopped(many, case)


def test_values_that_are_not_finite_are_not_applied(few: Results) -> None:
    result = few["non_finite"]
    assert [report.applied for report in result["reports"]] == [False, False]
    assert "loss of micro-batch" in result["reports"][0].detail["reason"]
    assert "gradient of model.norm.weight" in result["reports"][1].detail["reason"]
    assert result["unchanged"]
