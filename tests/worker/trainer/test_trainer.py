"""The trainer on real Megatron: layouts agree, faults change nothing, a resumed run continues bit for bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import SAMPLES, make_batch, with_experts
from safetensors.torch import save_file
from support.samples import SEED, drawn
from support.warm.protocol import TRAINER
from support.warm.scripts import run_script
from transformers import Qwen3MoeForCausalLM

from rljob_worker.models.config import ModelConfig
from rljob_worker.models.manifest import hf_manifest
from rljob_worker.types import StepMetrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
FAMILIES = {
    "terms": (["one"], ["tp", "pp", "dp"]),
    "moe": (["one"], ["ep", "tp", "tp_ep"]),
    "hybrid": (["one"], ["tp", "pp"]),
    "replay": (["one", "recompute", "selective", "kl", "rounded"], ["pp", "ep", "tp"]),
}
"""Cases of one rank and of two, whose names end with the family's."""
DRAWN = drawn("families of cases", list(FAMILIES), 2)
TOGETHER = ["tp", "pp", "dp", *(f"{case}_{name}" for name in DRAWN for case in FAMILIES[name][1])]
TOGETHER += ["stop_tp", "stop_pp", "stop_dp", "save_dp", "undisturbed_dp", "undisturbed_bf16"]
"""Cases of two ranks."""
ALONE = (
    ["one", "recompute", "offload", "no_saver", "save_fp32", "bf16", "offload_moved_bf16"],
    [
        *(f"{case}_{name}" for name in DRAWN for case in FAMILIES[name][0]),
        # Experts that no batch names, beside those that one does.
        *(["one_moe"] if "replay" in DRAWN and "moe" not in DRAWN else []),
        "offload_moved",
        "non_finite",
        "reference",
        "stop_one",
        "stop_after_update",
        "save_bf16",
        "undisturbed_moe",
    ],
)
AFTERWARDS = ["resume_dp", "dp_to_tp", "dp_to_pp", "moe_to_ep"]
ALONE_AFTERWARDS = (["resume_fp32", "dp_to_one"], ["resume_bf16", "refused_load", "bf16_to_one"])
"""Cases of one rank, run side by side by the two processes."""
LEFT_OUT = f"RLJOB_SEED={SEED} drew {DRAWN}: make test-faults runs it"
of_terms = pytest.mark.skipif("terms" not in DRAWN, reason=LEFT_OUT)
of_replay = pytest.mark.skipif("replay" not in DRAWN, reason=LEFT_OUT)
HYBRID = ["linear_attention", "full_attention"]


def write_model(folder: Path, kind: str = "qwen3", **sizes: int) -> None:
    moe = kind == "qwen3_moe"
    config: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": 31,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": not moe,
        "max_position_embeddings": 64,
    } | sizes
    if moe:
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    if kind == "qwen3_5":
        linear = {
            "linear_num_key_heads": config["num_key_value_heads"],
            "linear_num_value_heads": config["num_attention_heads"],
        }
        linear |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": HYBRID}
        config = {"model_type": kind, "text_config": config | linear | {"model_type": "qwen3_5_text"}}
        config["tie_word_embeddings"] = True
    generator = torch.Generator().manual_seed(1)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = hf_manifest(ModelConfig.from_hf(folder))
    tensors = {n: torch.ones(s) if len(s) == 1 else torch.randn(s, generator=generator) * 0.05 for n, s in shapes}
    if kind == "qwen3_5":
        # Norms of 1 + weight: at 1 the gradients are so large that their norm rounds further than the tolerance.
        tensors |= {n: torch.zeros(s) for n, s in shapes if n.endswith("norm.weight") and "linear_attn" not in n}
    save_file(tensors, folder / "model.safetensors")


@dataclass
class Results:
    folder: Path

    def __getitem__(self, case: str) -> dict[str, Any]:
        return self.of_rank(case, 0)

    def of_rank(self, case: str, rank: int) -> dict[str, Any]:
        return torch.load(self.folder / f"{case}.rank-{rank}.pt", weights_only=False)

    def ranks(self, case: str) -> list[dict[str, Any]]:
        return [self.of_rank(case, rank) for rank in range(len(list(self.folder.glob(f"{case}.rank-*.pt"))))]

    def weights(self, case: str) -> dict[str, torch.Tensor]:
        """Whole HF tensors, put together from the ranks' shares; NaN where no rank had a share."""
        return whole_tensors(result["pieces"] for result in self.ranks(case))


def whole_tensors(shares_of_ranks: Iterable[Any]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for shares in shares_of_ranks:
        for name, shape, dim, start, shard in shares:
            whole = tensors.setdefault(name, torch.full(shape, torch.nan))
            part = whole if dim is None else whole.narrow(dim, start, shard.shape[dim])
            part.copy_(torch.where(shard.isnan(), part, shard))
    return tensors


def launch(
    folder: Path,
    name: str,
    together: list[str],
    alone: tuple[list[str], list[str]],
    script: tuple[Path | str, ...] = (Path(__file__).with_name("cases.py"),),
    packages: Iterable[Path] = (),
) -> None:
    """Run cases in two processes: first those of two ranks, then each process its own of one rank.

    Args:
        folder: with the models; logs and results go there.
        name: of the launch, and of its logs.
        together: cases of two ranks.
        alone: cases of one rank, for each process.
        script: what runs them, with its first arguments.
        packages: further folders that it imports from, before anything else has imported Megatron.
    """
    arguments = [
        [*script[1:], rank, folder, name, *together, *(f"alone:{case}" for case in alone[rank])] for rank in range(2)
    ]
    if not packages:
        run_script(TRAINER, Path(script[0]), *arguments)
        return
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "crds", ROOT / "worker", *packages))),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    logs = [folder / f"{name}-{rank}.log" for rank in range(2)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, *map(str, (script[0], *arguments[rank]))]
        with open(log, "w") as output:
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("trainer")
    write_model(folder / "dense")
    write_model(folder / "moe", "qwen3_moe")
    write_model(folder / "hybrid", "qwen3_5")
    launch(folder, "first", TOGETHER, ALONE)
    launch(folder, "second", AFTERWARDS, ALONE_AFTERWARDS)
    return Results(folder)


@pytest.mark.parametrize(
    ("case", "alone"),
    [
        *[(layout, "one") for layout in ("tp", "pp", "dp", "recompute", "offload", "no_saver")],
        *[(f"{layout}_{name}", f"one_{name}") for name in DRAWN for layout in FAMILIES[name][1]],
        *[(f"{layout}_replay", "one_replay") for layout in ("recompute", "selective") if "replay" in DRAWN],
    ],
)
def test_layouts_agree(results: Results, case: str, alone: str) -> None:
    expected, expected_weights = results[alone], results.weights(alone)
    assert expected["micro_batches"] > 2
    for result in results.ranks(case):
        assert result["applied"] == [True] * 3
        for got, want in zip(result["metrics"], expected["metrics"], strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-5)
        for got_scores, want_scores in zip(result["scores"], expected["scores"], strict=True):
            np.testing.assert_allclose(got_scores, want_scores, atol=1e-5)
    weights = results.weights(case)
    assert weights.keys() == expected_weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected_weights[name], atol=1e-5, rtol=0)
    for number, told in enumerate(expected["told"]):
        of_ranks = [result["told"][number] for result in results.ranks(case)]
        assert sorted(sample for one in of_ranks for sample in one) == list(range(SAMPLES - 1)), "each once"
        for sample, values in (pair for one in of_ranks for pair in one.items()):
            np.testing.assert_allclose(values, told[sample], atol=1e-5)


def test_the_log_probabilities_that_are_reported_are_those_before_the_step(results: Results) -> None:
    for seed, (told, metrics) in enumerate(zip(results["one"]["told"], results["one"]["metrics"])):
        batch = make_batch(seed)
        counts = [int(flags.sum()) for flags in np.split(batch.sampled, np.cumsum(batch.lengths)[:-1])]
        assert [len(told[sample]) for sample in range(SAMPLES - 1)] == counts[:-1]
        rollout = np.split(batch.rollout_log_probs, np.cumsum(counts)[:-1])
        apart = np.concatenate([np.abs(told[sample] - rollout[sample]) for sample in range(SAMPLES - 1)])
        # All but one sample, whose share of the mean lies between what it can be at least and at most.
        whole = metrics["train/train_rollout_logprob_abs_diff"] * sum(counts)
        largest = metrics["train/train_rollout_logprob_abs_diff_max"]
        assert apart.max() <= largest + 1e-5
        assert apart.sum() - 1e-3 <= whole <= apart.sum() + largest * counts[-1] + 1e-3


@of_replay
def test_each_token_goes_to_the_experts_that_the_batch_names(results: Results) -> None:
    """Held to transformers' model with its routers set to the same; scores are of the trainer's own choice."""
    batch = with_experts(make_batch(0), 0)
    assert batch.experts is not None
    model = Qwen3MoeForCausalLM.from_pretrained(results.folder / "moe", dtype=torch.float32).eval()
    told: list[torch.Tensor] = []
    other: list[torch.Tensor] = []
    for place, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(partial(_told, told, other, place))
    differences, otherwise = [], []
    starts = np.cumsum(batch.lengths) - batch.lengths
    sampled = np.cumsum(batch.sampled) - batch.sampled
    for sample, (start, length) in enumerate(zip(starts, batch.lengths)):
        ids = torch.from_numpy(batch.tokens[start : start + length])
        rows = slice(start - sample, start - sample + length - 1)
        told[:] = [torch.from_numpy(batch.experts[rows].astype(np.int64))]
        with torch.no_grad():
            log_probs = model(ids[:-1].unsqueeze(0)).logits[0].log_softmax(-1)
        own = log_probs.gather(-1, ids[1:, None])[:, 0].numpy()
        mine = np.flatnonzero(batch.sampled[start : start + length])
        differences.append(np.abs(own[mine - 1] - batch.rollout_log_probs[sampled[start + mine]]))
        otherwise += [rows[mine - 1] for rows in other]
        other.clear()
    expected = float(np.concatenate(differences).mean())
    name = "train/train_rollout_logprob_abs_diff"
    assert results["one_replay"]["metrics"][0][name] == pytest.approx(expected, abs=1e-5)
    assert abs(results["one_moe"]["metrics"][0][name] - expected) > 1e-4, "any experts would have done"
    share = float(torch.cat(otherwise).float().mean())
    assert 0.5 < share < 1
    assert results["one_replay"]["metrics"][0]["train/router_mismatch"] == pytest.approx(share)
    assert "train/router_mismatch" not in results["one_moe"]["metrics"][0]


@of_replay
def test_replay_leaves_rounding_where_routers_round_differently(results: Results) -> None:
    """Distances from a model whose routers' weights are others by a little."""
    far = results["rounded_replay"]
    assert far["flipped"] > 0
    assert far["replayed"] < far["own"] / 5
    assert far["one token late"] > 5 * far["replayed"]
    assert far["layers swapped"] > 5 * far["replayed"]


@of_replay
def test_the_reference_policy_chooses_its_own_experts(results: Results) -> None:
    """Before its first update the policy is the reference, but for its experts."""
    assert results["kl_replay"]["metrics"][0]["train/kl_loss"] > 1e-6


def _told(
    told: list[torch.Tensor],
    other: list[torch.Tensor],
    place: int,
    _gate: torch.nn.Module,
    _args: Any,
    result: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, ...]:
    probabilities, _, chosen = result
    experts = told[0][:, place]
    other.append((chosen.sort(dim=-1).values != experts.sort(dim=-1).values).any(dim=-1))
    weights = probabilities.gather(-1, experts)
    return probabilities, weights / weights.sum(dim=-1, keepdim=True), experts


def test_recompute_offload_and_memory_saver_change_no_bit(results: Results) -> None:
    expected = results.weights("one")
    for case in ("recompute", "offload", "offload_moved", "no_saver"):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in results.weights(case).items()), case
    expected = results.weights("bf16")
    moved = results.weights("offload_moved_bf16")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in moved.items())


@pytest.mark.parametrize(("case", "tensors"), [("offload_moved", 2), ("offload_moved_bf16", 3)])
def test_an_offloaded_state_comes_two_buckets_at_a_time(results: Results, case: str, tensors: int) -> None:
    seen = results[case]["state"]
    assert seen["tensors"] == tensors
    assert seen["buffers"] < 0.6 * seen["all"]
    # And a number of updates for each of a bucket's parameters.
    assert 0 <= seen["peak"] - 4 * tensors * seen["buffers"] < 100


@of_terms
def test_several_updates_use_old_log_probs_and_move_further(results: Results) -> None:
    first = results["one_terms"]["metrics"][0]
    assert first["train/ppo_kl"] != 0
    assert results["one"]["metrics"][0]["train/ppo_kl"] == 0
    assert results["one_terms"]["metrics"][2]["train/kl_loss"] > first["train/kl_loss"] > 0


@pytest.mark.parametrize("case", ["stop_one", "stop_tp", "stop_pp", "stop_dp"])
def test_stop_in_the_middle_of_a_pass(results: Results, case: str) -> None:
    for result in results.ranks(case):
        assert result["stopped"]
        assert result["unchanged"]
        assert result["applied"], "the step can be run afterwards"
    # The one that was asked computes at most the micro-batch that it announces; the next ones are skipped.
    assert results[case]["computed"] <= 3 < results[case]["micro_batches"]


def test_stop_after_the_first_of_two_updates_rolls_back(results: Results) -> None:
    result = results["stop_after_update"]
    assert result["changed"] == [True]
    assert result["stopped"]
    assert result["unchanged"]


def test_non_finite_values_are_not_applied(results: Results) -> None:
    result = results["non_finite"]
    loss: StepMetrics = result["loss"]
    assert not loss.applied
    assert result["loss_unchanged"]
    assert "loss of micro-batch" in loss.detail["reason"]
    assert re.search(r"samples \[.*\b5\b.*\]", loss.detail["reason"]), (
        "the sample with the NaN advantage is in the named micro-batch"
    )
    assert np.isnan(loss.metrics["train/loss"])
    gradient: StepMetrics = result["gradient"]
    assert not gradient.applied
    assert result["gradient_unchanged"]
    assert "gradient of decoder.final_layernorm.weight" in gradient.detail["reason"]
    assert result["good"].applied
    assert not result["good_unchanged"]
    second: StepMetrics = result["second"]
    assert not second.applied
    assert result["second_unchanged"]
    assert second.detail["reason"].startswith("update 2 of 2")


def test_reference_swap_leaves_the_weights_as_they_were(results: Results) -> None:
    result = results["reference"]
    assert result["same"]
    assert result["unchanged"]
    assert result["zero_kl"] == 0
    assert result["kl"] > 0


@pytest.mark.parametrize("which", ["fp32", "bf16", "dp"])
def test_resumed_run_is_bit_equal(results: Results, which: str) -> None:
    whole, resumed = results.ranks(f"save_{which}"), results.ranks(f"resume_{which}")
    assert len(whole) == len(resumed) == (2 if which == "dp" else 1)
    for expected, got in zip(whole, resumed):
        assert len(expected["state"]) == len(got["state"])
        assert all(torch.equal(a, b) for a, b in zip(expected["state"], got["state"]))
        assert expected["metrics"] == got["metrics"]
        assert expected["asleep"].backup_bytes > 0
        assert "PAUSED" in expected["refused"]


@pytest.mark.parametrize(
    ("case", "before", "from_to"),
    [
        ("dp_to_tp", "undisturbed_dp", ("2 trainers: tensor 1, pipeline 1, expert 1, data 2", "tensor 2")),
        ("dp_to_pp", "undisturbed_dp", ("data 2", "pipeline 2")),
        ("dp_to_one", "undisturbed_dp", ("data 2", "1 trainer: tensor 1, pipeline 1, expert 1, data 1")),
        ("bf16_to_one", "undisturbed_bf16", ("data 2", "data 1")),
        ("moe_to_ep", "undisturbed_moe", ("1 trainer: ", "expert 2")),
    ],
)
def test_a_run_continues_in_another_layout(results: Results, case: str, before: str, from_to: tuple[str, str]) -> None:
    there, here = results.ranks(before), results.ranks(case)
    for kind in ("exp_avg", "exp_avg_sq", "master"):
        saved, loaded = (whole_tensors(result["optimizer"][kind] for result in ranks) for ranks in (there, here))
        assert saved.keys() == loaded.keys()
        for name, tensor in saved.items():
            assert not tensor.isnan().any(), (kind, name)
            assert torch.equal(tensor, loaded[name]), (kind, name)
    assert {count for result in (*there, *here) for count in result["optimizer"]["step"]} == {2.0}
    saved, loaded = (whole_tensors(result["loaded"] for result in ranks) for ranks in (there, here))
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())

    before_after = [result["resharded"].split(", to ") for result in here]
    assert all(from_to[0] in there and from_to[1] in here for there, here in before_after), before_after
    rounding = 1e-2 if "bf16" in case else 1e-5
    for result in here:
        for got, want in zip(result["metrics"], there[0]["metrics"], strict=True):
            assert got == pytest.approx(want, rel=rounding, abs=rounding)
    expected, got = results.weights(before), results.weights(case)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=rounding, rtol=0)


def test_states_that_do_not_fit_are_refused(results: Results) -> None:
    other, missing = results["refused_load"]["messages"]
    assert "training.precision bf16 there, fp32 here" in other
    assert "no such file" in missing
    assert results["refused_load"]["unchanged"]
