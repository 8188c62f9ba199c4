from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from model_cases import CASES, CONFIGS, LAYOUTS, WORDS
from support import qwen3_5
from support.warm.client import WarmProcess
from support.warm.protocol import TRAINER
from support.warm.scripts import variables_of

WORKER = Path(__file__).with_name("megatron_ranks.py")


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of words alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def hf_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint by transformers for each model, with norms and biases away from their neutral values.

    Beside it are its `logits.pt`, and `training.pt`: the loss of predicting each next token, and its gradients.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    root = tmp_path_factory.mktemp("hf")
    ids = torch.randint(0, 96, (3, 17), generator=torch.Generator().manual_seed(1))
    torch.save(ids, root / "ids.pt")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, config in CONFIGS.items():
            if name == "qwen3_5":
                model = qwen3_5.language_half(config)
                qwen3_5.write_folder(model, config, root / name)
            else:
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter) * 0.05)
                model.save_pretrained(root / name)
            logits = model(ids).logits
            torch.save(logits.detach(), root / name / "logits.pt")
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            published = qwen3_5.published_name if name == "qwen3_5" else str
            gradients: dict[str, torch.Tensor] = {}
            for own, parameter in model.named_parameters():
                gradients |= dict(of_experts(published(own), parameter.grad))
            torch.save({"loss": loss.detach(), "gradients": gradients}, root / name / "training.pt")
    return {name: root / name for name in CONFIGS}


def of_experts(name: str, gradient: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers holds the experts of a layer in one tensor, a checkpoint each in tensors of its own."""
    layer, _, kind = name.partition(".experts.")
    if not kind:
        yield name, gradient
        return
    for expert, part in enumerate(gradient):
        halves = part.chunk(2) if kind == "gate_up_proj" else (part,)
        for which, half in zip(kind.removesuffix("_proj").split("_"), halves, strict=True):
            yield f"{layer}.experts.{expert}.{which}_proj.weight", half


@pytest.fixture(scope="session")
def megatron_results(hf_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One launch of two ranks that runs every case; what it writes is described in megatron_ranks.py."""
    out = tmp_path_factory.mktemp("megatron")
    cases = [
        {"name": f"{model}-{layout}", "folder": str(hf_folders[model]), "sizes": LAYOUTS[layout]}
        for model, layout in CASES
    ]
    (out / "cases.json").write_text(json.dumps(cases))
    environment = variables_of(TRAINER)
    logs = [out / f"rank-{rank}.log" for rank in range(2)]
    ranks = [
        WarmProcess(TRAINER, [str(WORKER), str(out), str(rank)], environment, errors=log)
        for rank, log in enumerate(logs)
    ]
    deadline = time.monotonic() + 300
    try:
        while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
            assert not any(process.poll() for process in ranks), "\n".join(log.read_text() for log in logs)
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
            process.wait(timeout=30)
    assert all(process.returncode == 0 for process in ranks), "\n".join(log.read_text() for log in logs)
    return out
