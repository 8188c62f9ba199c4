"""Adapters on gloo: the same on any number of ranks, and to the bit what engines get."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.samples import unless_all
from test_fsdp import continues, launch
from test_trainer import Results, whole_tensors

pytestmark = pytest.mark.slow

FEW = ["lora", "lora_two", "lora_blocks", "lora_bf16", "lora_resumed", "lora_to_one"]
APART = ["lora_eight", "lora_apart", "lora_apart_resumed"]
REFUSED = ["lora_elsewhere", "lora_rank", "lora_none", "lora_megatron"]
MANY = ["lora", "lora_two", "lora_three", "lora_released", "lora_two_by_two", "lora_two_by_two_moe", "lora_context"]
LONG = unless_all("three and four ranks")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(tmp_path_factory.mktemp("lora"), 2, FEW + APART + REFUSED)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(tmp_path_factory.mktemp("lora"), 4, MANY)


def equal_to_one_rank(results: Results, case: str, one: str = "lora") -> None:
    expected = results[one]
    for result in results.ranks(case):
        for got, want in zip([*result["metrics"], result["last"]], [*expected["metrics"], expected["last"]]):
            assert got["train/loss"] == pytest.approx(want["train/loss"], abs=1e-6)
            assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=1e-6)
        for got_scores, want_scores in zip(result["scores"], expected["scores"], strict=True):
            np.testing.assert_allclose(got_scores, want_scores, atol=1e-5)
        assert result["naps"] == [(0, True)] * 2


def handed_over_as_computed(results: Results, case: str) -> None:
    """Each merged weight of a pass is, in all its bits, what the ranks hand over."""
    whole = whole_tensors(result["last_pieces"] for result in results.ranks(case))
    for result in results.ranks(case):
        assert len(result["computed_with"]) >= 8
        for name, tensor in result["computed_with"].items():
            assert torch.equal(whole[name], tensor.float()), name


def reference_is_the_beginning(results: Results, case: str) -> None:
    for result in results.ranks(case):
        for first, trained, off in zip(result["first_scores"], result["scores"], result["reference_scores"]):
            assert np.array_equal(first, off)
            assert not np.allclose(first, trained, atol=1e-3)


@pytest.mark.parametrize("case", ["lora", "lora_two", "lora_bf16"])
def test_engines_get_the_bits_that_are_computed_with(few: Results, case: str) -> None:
    handed_over_as_computed(few, case)
    reference_is_the_beginning(few, case)
    dtypes = {piece[4].dtype for piece in few[case]["pieces"]}
    assert dtypes == {torch.bfloat16 if case == "lora_bf16" else torch.float32}


@pytest.mark.parametrize("case", ["lora_two", "lora_blocks"])
def test_two_ranks_are_one(few: Results, case: str) -> None:
    equal_to_one_rank(few, case)


def test_adapters_beside_weights_are_those_within(few: Results) -> None:
    """In fp32 it makes no difference which is added up first; what is handed over is A, and B with its scale."""
    equal_to_one_rank(few, "lora_apart", "lora_eight")
    handed = whole_tensors(rank["last_pieces"] for rank in few.ranks("lora_apart"))
    parts = [rank["trained"] for rank in few.ranks("lora_apart")]
    assert handed.keys() == parts[0].keys()
    for name, tensor in handed.items():
        whole = torch.cat([part[name] for part in parts])
        assert torch.equal(tensor, whole * 3 if name.endswith("B") else whole), name
    for expected, got in zip(few.ranks("lora_apart"), few.ranks("lora_apart_resumed"), strict=True):
        assert got["last"] == expected["last"]


def test_lost_in_rounding(few: Results) -> None:
    """By bf16 a share of small changes, by fp32 next to nothing; both ranks' sums are parts of one."""
    bf16, fp32 = few["lora_bf16"]["rounding"], few["lora"]["rounding"]
    assert 1e-3 < bf16.lost / bf16.change < 0.5
    assert fp32.lost / fp32.change < 1e-5
    assert sum(rank["rounding"].change for rank in few.ranks("lora_two")) == pytest.approx(fp32.change, rel=1e-4)


def test_resumed_and_on_another_number_of_ranks(few: Results) -> None:
    for expected, got in zip(few.ranks("lora_two"), few.ranks("lora_resumed"), strict=True):
        assert got["last"] == expected["last"]
        assert all(torch.equal(a, b) for a, b in zip(got["state"], expected["state"], strict=True))
    continues(few, "lora_to_one", "lora_two", ("shards 2", "1 trainer:"))


def test_only_adapters_are_trained_and_saved(few: Results) -> None:
    size = sum(path.stat().st_size for path in (few.folder / "from_lora").iterdir())
    adapters = sum(rank["state"][index].nbytes for rank in few.ranks("lora_two") for index in range(28))
    assert 3 * adapters < size < 3 * adapters + 50_000
    names = {piece[0] for piece in few["lora"]["pieces"]}
    before, after = (whole_tensors(few[case]["pieces"] for case in [which]) for which in ("lora", "lora_two"))
    assert before.keys() == names >= after.keys()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "lora_elsewhere",
            r"on other weights than those of .*other: model.layers.1.mlp.up_proj.weight differs;",
        ),
        ("lora_rank", r"other adapters \(training.lora: .*'rank': 5.* there, .*'rank': 4.* here\)"),
        ("lora_none", r"other adapters \(training.lora: .*'rank': 5.* there, none here\)"),
        ("lora_megatron", r"other adapters \(training.lora: .*'rank': 5.* there, none here\)"),
    ],
)
def test_adapters_of_another_job_are_refused_by_name(few: Results, case: str, message: str) -> None:
    for result in few.ranks(case):
        assert result["unchanged"]
        with pytest.raises(ValueError, match=message):
            raise ValueError(result["message"])


@LONG
@pytest.mark.parametrize("case", ["lora_two", "lora_three", "lora_released", "lora_two_by_two", "lora_context"])
def test_more_ranks_and_copies(many: Results, case: str) -> None:
    equal_to_one_rank(many, case)
    handed_over_as_computed(many, case)


@LONG
def test_experts_stay_as_they_are(many: Results) -> None:
    handed_over_as_computed(many, "lora_two_by_two_moe")
    assert not any("expert" in name for name in many["lora_two_by_two_moe"]["computed_with"])
