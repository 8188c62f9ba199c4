"""Folders that stand in for Qwen3-0.6B and GSM8K where neither can be fetched (docs/tutorial-gsm8k.md).

`python examples/gsm8k_stand_in.py` writes, below the current folder, what two downloads would:

    models/Qwen3-0.6B/   the model's config, RANDOM weights in bf16 (1.2 GB), and a tokenizer trained here on the
                         problems below, whose special tokens have the numbers of Qwen3's
    data/gsm8k/main/     train and test as Parquet with GSM8K's columns; the problems are made from a few sentences

Nothing here has learned anything: answers of this model are noise. `--tiny` makes a model of 0.3 M parameters.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

# config.json of Qwen/Qwen3-0.6B.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
    # Without it transformers takes a tokenizer for one of Mistral's that have an error, and warns.
    "transformers_version": "4.51.0",
}
TINY = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 2000,
    "eos_token_id": 2002,
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
"""From `bos_token_id` on; a message ends with the third, as in Qwen3."""
# ChatML with Qwen3's switch: without thinking, the answer begins after an empty block of thoughts.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
PEOPLE = ("Natalia", "Weng", "Betty", "Julie", "James", "Mark", "Ken", "Tina", "Alexis", "Tobias")
THINGS = ("clips", "books", "apples", "marbles", "pencils", "stickers", "cards", "eggs", "muffins", "flowers")


def rows(count: int, seed: int) -> list[dict[str, str]]:
    """Problems in two steps, with answers written as GSM8K's are: `<<48/2=24>>` in each step, `#### 72` at the end."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        who, things = draw.choice(PEOPLE), draw.choice(THINGS)
        first, times, less = draw.randint(4, 60), draw.randint(2, 9), draw.randint(1, 4)
        more = first * times
        question = (
            f"{who} had {first} {things} in April, and {times} times as many in May. In June {who} gave {less} of them "
            f"away. How many {things} did {who} have altogether after that?"
        )
        answer = (
            f"{who} had {first}*{times} = <<{first}*{times}={more}>>{more} {things} in May.\n"
            f"Altogether {who} had {first}+{more}-{less} = <<{first}+{more}-{less}={first + more - less}>>"
            f"{first + more - less} {things}.\n#### {first + more - less}"
        )
        found.append({"question": question, "answer": answer})
    return found


def write_data(folder: Path, train: int, test: int) -> list[str]:
    """Two Parquet files with the names that they have in openai/gsm8k; returns all their texts."""
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    texts: list[str] = []
    for split, count, seed in (("train", train, 0), ("test", test, 1)):
        made = rows(count, seed)
        parquet.write_table(pa.Table.from_pylist(made), folder / f"{split}-00000-of-00001.parquet")
        texts += [text for row in made for text in row.values()]
    return texts


def write_tokenizer(folder: Path, texts: list[str], config: dict[str, Any]) -> None:
    """Byte-level BPE of the texts, filled up with made-up words to the vocabulary that the config has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    first_special = int(config["bos_token_id"])
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=min(first_special, 1500), initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    trained = json.loads(bpe.to_str())["model"]
    vocabulary: dict[str, int] = trained["vocab"]
    # A model with random weights writes these. One in fifty is a number, for a reward that looks for numbers.
    for index in range(len(vocabulary), first_special):
        vocabulary[f"Ġ{index}" if index % 50 == 0 else "Ġ" + letters(index)] = index
    merges = [tuple(pair) for pair in trained["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def letters(number: int) -> str:
    """A made-up word, another one for each number."""
    word = "zq"
    while number:
        number, digit = divmod(number, 21)
        word += "bcdfghjklmnpqrstvwxyz"[digit]
    return word


def main(arguments: list[str]) -> None:
    """Write both folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path(), metavar="FOLDER", help="default: the current folder")
    parser.add_argument("--tiny", action="store_true", help="a model of 0.3 M parameters and few rows")
    given = parser.parse_args(arguments)
    from rljob_api.spec import RandomModel
    from rljob_worker.models.random_model import make_random_model

    model = given.into / "models" / "Qwen3-0.6B"
    if (model / "config.json").exists():
        sys.exit(f"{model} is there already: this would write random weights over it")
    config = CONFIG | TINY if given.tiny else CONFIG
    texts = write_data(given.into / "data" / "gsm8k" / "main", *((64, 16) if given.tiny else (7473, 1319)))
    model.mkdir(parents=True, exist_ok=True)
    write_tokenizer(model, texts, config)
    make_random_model(RandomModel(config=config), model, model)
    print(f"{model}: random weights\n{given.into / 'data' / 'gsm8k'}: made-up problems")


if __name__ == "__main__":
    main(sys.argv[1:])
