"""The `match` reward."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from rljob_worker.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Match:
    """Share of the label's tokens that the response has in the same place, counted from its first token.

    Tokens are compared as ids, so that the score is exact for what was sampled; what follows the label's length does
    not count. The label is tokenized as it stands and with a space before it, because many tokenizers tell `7` from
    ` 7`, and the better score counts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._variants = lru_cache(maxsize=1 << 16)(self._tokenize)

    def __call__(self, token_ids: IntArray, label: str) -> float:
        """`token_ids`: [n] of the response. Raises ValueError for a label without tokens."""
        return max(
            np.count_nonzero(token_ids[: len(variant)] == variant[: len(token_ids)]) / len(variant)
            for variant in self._variants(label)
        )

    def _tokenize(self, label: str) -> list[IntArray]:
        label = label.strip()
        ids = {tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (label, f" {label}")}
        if not label or () in ids:
            raise ValueError("the label has no tokens")
        return [np.array(variant, dtype=np.int64) for variant in sorted(ids)]
