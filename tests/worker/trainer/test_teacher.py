"""A teacher beside the policy on ranks of both backends, held to float64 over transformers' own models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_batch, make_spec
from safetensors.torch import load_file, save_file
from support.samples import unless_drawn
from support.warm.protocol import TRAINER
from support.warm.scripts import run_script
from teacher_ranks import ALL_TOKENS, SAMPLED, VOCAB
from test_trainer import Results, whole_tensors, write_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rljob_api.spec import RLJobSpec, TrainingBackend
from rljob_worker.data.tokenizer import load_tokenizer
from rljob_worker.errors import UserError
from rljob_worker.models.config import ModelConfig
from rljob_worker.models.manifest import hf_manifest
from rljob_worker.models.trained import trained_model
from rljob_worker.trainer.teacher_folder import teacher_folder

pytestmark = pytest.mark.slow
in_draw = unless_drawn("a teacher on ranks")

CASES = ["megatron", "megatron_tp", "megatron_tp_resumed", "megatron_pp", "megatron_cp", "megatron_few"]
CASES += [
    "megatron_sampled",
    "fsdp",
    "fsdp_resumed",
    "fsdp_few",
    "fsdp_sampled",
    "fsdp_lora",
    "fsdp_moe",
    "fsdp_cp",
    "learns",
]
CASES += ["refused", "megatron_refused"]


def write_teacher(folder: Path) -> None:
    """Wider and deeper than its policy, untied, and with more rows of padding; peaked, so that there is a distance."""
    folder.mkdir()
    config = {
        "model_type": "qwen3",
        "vocab_size": VOCAB + 5,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(8)
    shapes = hf_manifest(ModelConfig.from_hf(folder))
    tensors = {n: torch.ones(s) if len(s) == 1 else torch.randn(s, generator=generator) * 0.1 for n, s in shapes}
    # Padding that would be likely, if it were looked at.
    tensors["lm_head.weight"][VOCAB:] += 1.0
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("teacher")
    write_model(folder / "dense")
    write_model(folder / "moe", "qwen3_moe")
    write_teacher(folder / "teacher")
    script = Path(__file__).with_name("teacher_ranks.py")
    run_script(TRAINER, script, *([rank, folder, *CASES] for rank in range(2)))
    return Results(folder)


class Loops:
    """Distillation in float64: one sample at a time, sums over the vocabulary, torch's own AdamW."""

    def __init__(self, folder: Path, distill: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM

        def load(name: str) -> Any:
            model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64).eval()
            model.get_input_embeddings().padding_idx = None
            return model

        self.model, self.teacher, self.distill = load("dense"), load("teacher"), distill
        decayed, others = [], []
        for parameter in self.model.parameters():
            (decayed if parameter.dim() > 1 else others).append(parameter)
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-6)

    def rows(self, model: Any, tokens: torch.Tensor, first: int) -> torch.Tensor:
        """Log-probabilities [n, V] at the response's positions, of tokens that both models have."""
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, first - 1 : -1, :VOCAB]
        found: torch.Tensor = logits.log_softmax(-1)
        return found

    def step(self, seed: int) -> dict[str, float]:
        batch = make_batch(seed)
        streams, first = [], 0
        for length in batch.lengths:
            inside = slice(first, first + int(length))
            prompt = int((~batch.sampled[inside]).sum())
            streams.append((torch.from_numpy(batch.tokens[inside]), prompt))
            first += int(length)
        advantages = dict(enumerate(torch.from_numpy(batch.advantages).split([len(t) - p for t, p in streams])))
        with torch.no_grad():
            taught = [self.rows(self.teacher, *stream) for stream in streams]
            old = [self.rows(self.model, *stream) for stream in streams]
        losses, distances, norms = [], [], []
        for start in range(0, len(streams), 8):
            total, distance, tokens = torch.zeros((), dtype=torch.float64), 0.0, 0
            for index in range(start, start + 8):
                ids, prompt = streams[index]
                p, q, labels = self.rows(self.model, ids, prompt), taught[index], ids[prompt:, None]
                of_old = old[index].gather(1, labels)[:, 0]
                ratio = (p.gather(1, labels)[:, 0] - of_old).exp()
                value = self.distill["rewardWeight"] * advantages[index].double()
                if self.distill["divergence"] == "Sampled":
                    gap = of_old - q.gather(1, labels)[:, 0]
                    value = value - self.distill["coefficient"] * gap
                    beside = torch.zeros_like(gap)
                else:
                    gap = (p.exp() * (p - q)).sum(-1)
                    beside = self.distill["coefficient"] * gap
                clipped = torch.maximum(-value * ratio, -value * ratio.clamp(1 - 0.2, 1 + 0.28))
                total = total + (clipped + beside).mean() / 8
                distance, tokens = distance + float(gap.detach().sum()), tokens + len(labels)
            self.adam.zero_grad()
            total.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)))
            self.adam.step()
            losses.append(float(total.detach()))
            distances.append(distance / tokens)
        return {
            "train/loss": sum(losses) / len(losses),
            "train/grad_norm": sum(norms) / len(norms),
            "train/teacher_kl": sum(distances) / len(distances),
        }


@in_draw
@pytest.mark.parametrize(
    ("cases", "distill"),
    [
        (["megatron", "megatron_tp", "megatron_pp", "megatron_cp", "fsdp", "fsdp_cp"], ALL_TOKENS),
        (["megatron_sampled", "fsdp_sampled"], SAMPLED),
    ],
)
def test_both_backends_against_float64(results: Results, cases: list[str], distill: dict[str, Any]) -> None:
    """With all tokens it is the reverse KL of GKD; sharded vocabularies, stages and ranks change nothing."""
    loops = Loops(results.folder, distill)
    expected = [loops.step(seed) for seed in range(3)]
    weights = {name: tensor.detach().float() for name, tensor in loops.model.state_dict().items()}
    for case in cases:
        for found, step in zip(results[case]["metrics"], expected, strict=True):
            for name, value in step.items():
                assert found[name] == pytest.approx(value, rel=2e-5, abs=2e-6), (case, name)
        for name, tensor in results.weights(case).items():
            assert float((tensor - weights[name]).abs().max()) < 1e-4, (case, name)


@in_draw
@pytest.mark.parametrize("case", [case for case in CASES if "resumed" not in case and "refused" not in case][:-1])
def test_asleep_nothing_is_left_and_awake_the_bits_are_the_same(results: Results, case: str) -> None:
    for rank in results.ranks(case):
        assert rank["naps"] == [(0, True)] * 3
        for metrics in rank["metrics"]:
            assert metrics["train/teacher_kl"] > 0.1


@in_draw
@pytest.mark.parametrize(("case", "saved"), [("megatron_tp_resumed", "megatron_tp"), ("fsdp_resumed", "fsdp")])
def test_resumed_it_has_the_same_bits(results: Results, case: str, saved: str) -> None:
    """The teacher is read from its folder again: no checkpoint has it."""
    assert results[case]["last"] == results[saved]["last"]
    resumed, went_on = ([rank["last_pieces"] for rank in results.ranks(one)] for one in (case, saved))
    for tensors in zip(whole_tensors(resumed).items(), whole_tensors(went_on).items(), strict=True):
        (name, found), (other, expected) = tensors
        assert name == other
        assert torch.equal(found, expected)


@in_draw
def test_few_tokens_are_a_lower_bound_of_the_distance_and_both_backends_agree(results: Results) -> None:
    few, all_tokens = (results[case]["metrics"][0]["train/teacher_kl"] for case in ("fsdp_few", "fsdp"))
    assert 0 < few <= all_tokens
    for one, other in zip(results["fsdp_few"]["metrics"], results["megatron_few"]["metrics"], strict=True):
        assert one["train/teacher_kl"] == pytest.approx(other["train/teacher_kl"], rel=1e-5)
        assert one["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-4)


@in_draw
def test_a_policy_comes_to_a_tenth_of_its_distance(results: Results) -> None:
    """On samples that stay the same, one rank, the same draws each time."""
    distances = results["learns"]["distances"]
    assert distances[-1] < distances[0] / 10


@in_draw
@pytest.mark.parametrize("case", ["refused", "megatron_refused"])
def test_what_is_missing_stopped_or_no_number_leaves_the_step_undone(results: Results, case: str) -> None:
    for rank in results.ranks(case):
        assert "teacher_log_probs() of the same batch" in rank["message"]
        assert rank["stopped"]
        assert rank["left"] == 0
        assert not rank["applied"]
        assert rank["unchanged"]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """Make a policy of eight words and two rows of padding."""
    make_folder(tmp_path / "policy", ["a", "b", "c", "d", "e", "f", "g", "h"], 10)
    return tmp_path / "policy"


def make_folder(folder: Path, words: list[str], rows: int, longest: int = 64) -> None:
    write_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"vocab_size": rows, "max_position_embeddings": longest, "hidden_size": 64})
    )
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.zeros(rows, 64)
    save_file(tensors, folder / "model.safetensors")
    model = WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0])
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token=words[1]).save_pretrained(folder)


def checked(policy: Path, teacher: Path, **distill: Any) -> Path | None:
    backend = TrainingBackend.MEGATRON
    algorithm = {"name": "distill", "distill": {"teacher": {"path": str(teacher)}} | distill}
    spec = RLJobSpec.model_validate(make_spec(1, algorithm=algorithm))
    return teacher_folder(spec, load_tokenizer(policy), trained_model(backend, policy), 32)


def test_a_teacher_of_the_same_ids_and_more_padding_is_taken(policy: Path, tmp_path: Path) -> None:
    make_folder(tmp_path / "teacher", ["a", "b", "c", "d", "e", "f", "g", "h"], 14)
    assert checked(policy, tmp_path / "teacher", divergence="TopK", topK=10) == tmp_path / "teacher"


@pytest.mark.parametrize(
    ("words", "rows", "longest", "distill", "message"),
    [
        ("a b c e d f g h", 14, 64, {}, r"another tokenizer .* 2 ids .* id 3 among them: 'd' for the policy, 'e' for"),
        ("a b c d e f g h i", 14, 64, {}, r"1 ids .* id 8 among them: None for the policy, 'i' for the teacher"),
        ("a b c d e f g", 7, 64, {}, r"1 ids .* id 7 among them: 'h' for the policy, None for the teacher"),
        ("a b c d e f g h", 9, 64, {}, r"an embedding of 9 tokens, the policy of 10"),
        ("a b c d e f g h", 14, 31, {}, r"takes 31 tokens .* sequences of up to 32"),
        ("a b c d e f g h", 14, 64, {"divergence": "TopK", "topK": 11}, r"topK: 11 is more than the vocabulary's 10"),
    ],
)
def test_another_is_refused_by_name(
    policy: Path, tmp_path: Path, words: str, rows: int, longest: int, distill: dict[str, Any], message: str
) -> None:
    make_folder(tmp_path / "teacher", words.split(), rows, longest)
    with pytest.raises(UserError, match=message) as refusal:
        checked(policy, tmp_path / "teacher", **distill)
    assert "spec.algorithm.distill" in str(refusal.value)


def test_a_folder_that_is_missing_or_not_whole_is_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"spec\.algorithm\.distill\.teacher\.path: .* there is no such folder"):
        checked(policy, tmp_path / "nowhere")
    make_folder(tmp_path / "teacher", ["a", "b", "c", "d", "e", "f", "g", "h"], 14)
    tensors = load_file(tmp_path / "teacher" / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "teacher" / "model.safetensors")
    with pytest.raises(UserError, match=r"spec\.algorithm\.distill\.teacher\.path: .*model\.norm\.weight"):
        checked(policy, tmp_path / "teacher")
