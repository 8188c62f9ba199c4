"""Texts of a tokenizer's special tokens in what others wrote, kept from becoming those tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SpecialTexts:
    """The special tokens of a tokenizer, by their texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._texts = sorted((text for text in special if len(text) > 1), key=len, reverse=True)

    def broken(self, text: str) -> tuple[str, int]:
        """The text with a blank in each text of a special token, which would be read as that token; their number."""
        broken = 0
        for special in self._texts:
            found = text.count(special)
            broken += found
            text = text.replace(special, f"{special[0]} {special[1:]}") if found else text
        return text, broken
