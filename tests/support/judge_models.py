"""Small models that judge, made from a config with a tokenizer trained on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|> ' + message['content'] + ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_judge(
    folder: Path,
    words: Sequence[str],
    *,
    template: str | None = TEMPLATE,
    broken: str | None = None,
    writes: bool = False,
    **config: Any,
) -> Path:
    """A random Qwen3 of one label (hidden 64, 2 layers), with a token for each word.

    Args:
        folder: where it is saved.
        words: of its tokenizer, beside its special tokens.
        template: its chat template.
        broken: a word whose embedding is NaN, so that texts with it have no score.
        writes: a causal model in its place, which answers in words.
        config: over its config.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3ForSequenceClassification,
    )

    special = ["<unk>", "<eos>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>"]
    inner = Tokenizer(models.WordLevel(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.train_from_iterator([" ".join(words)], trainers.WordLevelTrainer(special_tokens=special, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>",
        additional_special_tokens=special[3:], chat_template=template,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "num_labels": 1,
        "initializer_range": 0.2,
    }  # fmt: skip
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    made = Qwen3Config(vocab_size=len(tokenizer), **ids, **sizes | config)
    model = (Qwen3ForCausalLM if writes else Qwen3ForSequenceClassification)(made).float()
    if broken is not None:
        with torch.no_grad():
            model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids(broken)] = torch.nan
    model.save_pretrained(folder)
    return folder


def own_scores(folder: Path, texts: Sequence[Sequence[int]]) -> list[float]:
    """The scores that transformers gives each text, by itself."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [float(model(torch.tensor([list(text)])).logits[0, 0]) for text in texts]


def own_answers(folder: Path, texts: Sequence[Sequence[int]], tokens: int) -> list[str]:
    """Answers of transformers to each text, by itself: the likeliest tokens, so many at most."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    with torch.no_grad():
        for text in texts:
            given = torch.tensor([list(text)])
            whole = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False)
            answers.append(tokenizer.decode(whole[0, len(text) :], skip_special_tokens=True))
    return answers
