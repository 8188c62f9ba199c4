"""A critic beside a policy on FSDP's and on Megatron's ranks, held to loops in float64 over transformers' own model."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critic_ranks import CRITIC, episodes
from safetensors.torch import load_file, save_file
from support.samples import unless_all, unless_drawn
from support.warm.protocol import TRAINER
from support.warm.scripts import run_script
from test_trainer import Results, write_model

from rljob_api.spec import TrainingBackend
from rljob_worker.errors import UserError
from rljob_worker.models.value_model import build_value_model, value_config
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.trainer.saved_state import open_rank_file
from rljob_worker.types import TrainBatch

pytestmark = [pytest.mark.slow, unless_drawn("a critic on ranks")]

GAMMA, LAMBDA = 0.97, 0.9
FEW = ["one", "two", "two_resumed", "two_to_one", "between", "fresh", "lora"]
FEW += ["tp2", "tp2_resumed", "tp2_to_fsdp", "two_to_pp2", "tp2_between", "pp2"]
MANY = ["two", "two_updates", "three", "two_to_three", "released"]
MANY += ["experts", "experts_tp2", "experts_ep2", "cp2", "fsdp_cp2", "megatron"]


def launch(folder: Path, ranks: int, cases: list[str]) -> Results:
    write_model(folder / "dense")
    write_model(folder / "moe", "qwen3_moe")
    for model in ("dense", "moe"):
        give_head(folder / model, folder / f"{model}_valued")
    script = Path(__file__).with_name("critic_ranks.py")
    run_script(TRAINER, script, *([rank, folder, *cases] for rank in range(ranks)))
    return Results(folder)


def give_head(folder: Path, target: Path) -> None:
    """A value model: the same layers, other weights, and a head of one row."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    tensors["score.weight"] = torch.randn(1, 64, generator=torch.Generator().manual_seed(5)) * 0.1
    save_file(tensors, target / "model.safetensors")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(tmp_path_factory.mktemp("critic"), 2, FEW)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(tmp_path_factory.mktemp("critic"), 3, MANY)


class Loops:
    """A critic in float64: one stream at a time, formulas as loops over tokens."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        self.model.get_input_embeddings().padding_idx = None
        self.head = torch.nn.Parameter(load_file(folder / "model.safetensors")["score.weight"].double())
        self.trained = [*self.model.model.parameters(), self.head]
        optimizer = CRITIC["optimizer"]
        assert isinstance(optimizer, dict)
        self.clip = optimizer["clipGrad"]
        self.adam = torch.optim.AdamW(self.trained, lr=optimizer["lr"], betas=(0.9, 0.98), eps=1e-6, weight_decay=0)

    def values(self, tokens: np.ndarray, sampled: np.ndarray) -> torch.Tensor:
        """Before each sampled token, of the tokens before it alone."""
        ids = torch.from_numpy(tokens)[None]
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        found: torch.Tensor = (hidden @ self.head[0])[torch.from_numpy(np.flatnonzero(sampled) - 1)]
        return found

    def step(self, batch: TrainBatch) -> dict[str, Any]:
        ends = np.cumsum(batch.lengths)[:-1]
        streams = list(zip(np.split(batch.tokens, ends), np.split(batch.sampled, ends), strict=True))
        with torch.no_grad():
            values = [self.values(*stream).tolist() for stream in streams]
        assert batch.rewards is not None
        estimated = [self.estimates(one, float(reward)) for one, reward in zip(values, batch.rewards, strict=True)]
        advantages = [a for one in estimated for a in one[0]]
        mean = math.fsum(advantages) / len(advantages)
        variance = math.fsum((a - mean) ** 2 for a in advantages) / (len(advantages) - 1)
        losses, norms = [], []
        count = len(streams) // 4
        for first in range(0, len(streams), count):
            part = range(first, first + count)
            loss = sum((self.loss(streams[i], values[i], estimated[i][1]) for i in part), torch.zeros(())) / count
            self.adam.zero_grad()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.trained, self.clip)))
            self.adam.step()
            losses.append(float(loss.detach()))
        return {
            "values": [v for one in values for v in one],
            "returns": [r for one in estimated for r in one[1]],
            "advantages": [(a - mean) / math.sqrt(variance + 1e-8) for a in advantages],
            "loss": math.fsum(losses) / 4,
            "norm": math.fsum(norms) / 4,
        }

    @staticmethod
    def estimates(values: list[float], reward: float) -> tuple[list[float], list[float]]:
        """The turns of a stream follow one another, whatever was observed between them."""
        advantages = []
        for place in range(len(values)):
            total = 0.0
            for later in range(place, len(values)):
                end = later + 1 == len(values)
                delta = (reward if end else GAMMA * values[later + 1]) - values[later]
                total += (GAMMA * LAMBDA) ** (later - place) * delta
            advantages.append(total)
        return advantages, [a + v for a, v in zip(advantages, values, strict=True)]

    def loss(self, stream: tuple[np.ndarray, np.ndarray], old: list[float], returns: list[float]) -> torch.Tensor:
        """The mean over a stream's tokens (SequenceMean)."""
        clip = float(str(CRITIC["valueClip"]))
        total = torch.zeros((), dtype=torch.float64)
        for value, before, target in zip(self.values(*stream), old, returns, strict=True):
            near = before + torch.clamp(value - before, -clip, clip)
            total = total + 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2)
        return total / len(old)


def test_values_advantages_and_updates_are_those_of_float64_loops(few: Results) -> None:
    loops = Loops(few.folder / "dense_valued")
    expected = [loops.step(episodes(seed)) for seed in range(2)]
    for case in ("one", "two", "tp2", "pp2"):
        for result in few.ranks(case):
            for got, want in zip(result["steps"], expected, strict=True):
                np.testing.assert_allclose(got["values"], want["values"], atol=2e-5)
                np.testing.assert_allclose(got["returns"], want["returns"], atol=2e-5)
                np.testing.assert_allclose(got["advantages"], want["advantages"], atol=2e-4)
                metrics = got["metrics"]
                assert metrics["critic/value_loss"] == pytest.approx(want["loss"], rel=1e-4)
                assert metrics["critic/grad_norm"] == pytest.approx(want["norm"], rel=1e-4)
                residual = np.subtract(want["returns"], want["values"])
                explained = 1 - residual.var() / np.var(want["returns"])
                assert metrics["critic/explained_variance"] == pytest.approx(explained, abs=1e-3)
                assert metrics["critic/value_mean"] == pytest.approx(np.mean(want["values"]), abs=1e-5)
                assert metrics["critic/return_mean"] == pytest.approx(np.mean(want["returns"]), abs=1e-5)
                assert 0 < metrics["critic/value_clip_fraction"] < 1


def test_a_value_of_the_next_token_would_be_seen(few: Results) -> None:
    """The check above holds values to the state before a token: those of the state after it are far away."""
    loops, batch = Loops(few.folder / "dense_valued"), episodes(0)
    shifted = np.roll(np.asarray(loops.step(batch)["values"]), -1)
    assert np.abs(shifted - np.asarray(few["one"]["steps"][0]["values"])).max() > 0.01


def test_both_models_sleep_without_a_resident_byte(few: Results) -> None:
    for case in ("one", "two", "lora", "tp2", "pp2"):
        for result in few.ranks(case):
            assert result["naps"] == [(0, True)] * 2


@pytest.mark.parametrize("case", ["two", "tp2"])
def test_a_resumed_run_is_bit_equal(few: Results, case: str) -> None:
    for rank, (expected, got) in enumerate(zip(few.ranks(case), few.ranks(f"{case}_resumed"), strict=True)):
        assert expected["files"] == [f"rank-{rank:05d}.safetensors", f"critic-{rank:05d}.safetensors"]
        assert got["resharded"] == ""
        assert got["last"] == expected["last"]
        assert all(torch.equal(a, b) for a, b in zip(got["state"], expected["state"], strict=True))


def continues(results: Results, case: str, before: str = "two", cut: str = "shards 2") -> None:
    want = results[before]
    for got in results.ranks(case):
        assert cut in got["resharded"]
        np.testing.assert_allclose(got["last_seen"]["values"], want["last_seen"]["values"], atol=1e-6)
        assert got["last"] == pytest.approx(want["last"], rel=1e-4, abs=1e-5)


def test_a_run_continues_on_fewer_ranks(few: Results) -> None:
    continues(few, "two_to_one")


def test_a_run_continues_with_the_other_backend(few: Results) -> None:
    continues(few, "two_to_pp2")
    continues(few, "tp2_to_fsdp", "tp2", "tensor 2")


@pytest.mark.parametrize("case", ["between", "tp2_between"])
def test_a_step_that_does_not_end_leaves_both_models_as_they_were(few: Results, case: str) -> None:
    for result in few.ranks(case):
        assert result["moved"]
        assert result["saved"], "a checkpoint between the critic's updates and the policy's is of the step before"
        assert not result["policy"].applied
        assert result["after_policy"]
        assert result["stopped"]
        assert result["after_stop"]
        assert not result["critic"].applied
        assert "of the critic: not finite: rank" in result["critic"].detail["reason"]
        assert result["after_critic"]


@pytest.mark.parametrize("case", ["between", "tp2_between"])
def test_while_it_warms_up_the_critic_alone_changes(few: Results, case: str) -> None:
    for result in few.ranks(case):
        assert result["alone"].applied
        assert result["policy_kept"]
        assert result["critic_kept"]


def test_a_critic_of_the_policys_folder_begins_with_zero(few: Results) -> None:
    result = few["fresh"]
    assert not result["values"].any()
    assert result["then"].abs().min() > 0
    assert result["metrics"]["critic/explained_variance"] == 0


def test_adapters_are_trained_beside_a_whole_critic(few: Results) -> None:
    metrics = few["lora"]["last"]
    assert metrics["critic/grad_norm"] > 0
    assert metrics["train/grad_norm"] > 0


LONG = unless_all("three ranks")


@LONG
def test_more_ranks_and_more_updates(many: Results) -> None:
    want = many["two"]["steps"]
    for case in ("two_updates", "three"):
        for result in many.ranks(case):
            # The first values do not depend on how a step is cut.
            np.testing.assert_allclose(result["steps"][0]["values"], want[0]["values"], atol=1e-6)
            np.testing.assert_allclose(result["steps"][0]["advantages"], want[0]["advantages"], atol=1e-5)
            assert result["naps"] == [(0, True)] * 2
    for result in many.ranks("two_updates"):
        for got, expected in zip(result["steps"], want, strict=True):
            assert got["metrics"]["critic/value_loss"] == pytest.approx(
                expected["metrics"]["critic/value_loss"], rel=1e-4
            )


@LONG
@pytest.mark.parametrize(
    ("case", "other"),
    [("cp2", "two"), ("fsdp_cp2", "two"), ("megatron", "two"), ("experts_tp2", "experts"), ("experts_ep2", "experts")],
)
def test_megatrons_ranks_and_divided_rows_agree_with_fsdps(many: Results, case: str, other: str) -> None:
    for got, want in zip(many[case]["steps"], many[other]["steps"], strict=True):
        np.testing.assert_allclose(got["values"], want["values"], atol=1e-4)
        for name in ("critic/value_loss", "critic/grad_norm"):
            assert got["metrics"][name] == pytest.approx(want["metrics"][name], rel=1e-4)


@LONG
def test_a_run_continues_on_more_ranks(many: Results) -> None:
    continues(many, "two_to_three")


@LONG
def test_groups_that_go_asleep_change_no_bit(many: Results) -> None:
    for expected, got in zip(many.ranks("two"), many.ranks("released"), strict=True):
        assert [one["metrics"] for one in got["steps"]] == [one["metrics"] for one in expected["steps"]]


def test_a_checkpoint_without_the_critic_is_refused(few: Results, tmp_path: Path) -> None:
    shutil.copy(few.folder / "from_two" / "rank-00000.safetensors", tmp_path)
    layout = ParallelLayout(2, rank=0, shards=2)
    with pytest.raises(ValueError, match=r"critic-00000\.safetensors"):
        open_rank_file(str(tmp_path), TrainingBackend.FSDP, layout, "fp32", stem="critic")


def test_what_is_no_value_model_is_named(few: Results, tmp_path: Path) -> None:
    built = build_value_model(few.folder / "dense_valued")
    assert {"score.weight"} == {view.name for view in built.views if view.shape == (1, 64)}
    assert "lm_head.weight" not in {view.name for view in built.views}
    for name, tensor, match in (
        ("score.weight", torch.zeros(2, 64), r"score\.weight has shape \(2, 64\), the model's is \(1, 64\)"),
        ("other.weight", torch.zeros(1), r"other\.weight .*is not part of th"),
    ):
        folder = tmp_path / name
        shutil.copytree(few.folder / "dense", folder)
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {name: tensor}, folder / "model.safetensors")
        for reads in (build_value_model, value_config):
            with pytest.raises(UserError, match=match):
                reads(folder)
    assert json.loads((few.folder / "dense" / "config.json").read_text())["tie_word_embeddings"]
