"""Tokens that the files of a model folder name: each must be one of the tokenizer and of the model's embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rljob_api.how_many import how_many
from rljob_worker.errors import UserError

_MOST_UNUSED = 2**17
"""Numbers without a token below the highest one's: published tokenizers leave some thousands at most."""
_DIGITS = 40
Files = Mapping[str, Mapping[str, Any]]
"""Name of a file -> the object in it."""


def check_tokens(files: Files, folder: Path) -> None:
    """Refuse a folder whose files are not of one model.

    Args:
        files: those that the folder has.
        folder: for messages.

    Raises:
        UserError: naming the file and the token.
    """
    vocabulary = _embedding(files.get("config.json", {}))
    ends = files.get("generation_config.json", {}).get("eos_token_id")
    for token in ends if isinstance(ends, list) else [ends]:
        if vocabulary is not None and type(token) is int and token >= vocabulary:
            raise UserError(
                f"{folder / 'generation_config.json'}: eos_token_id {token} is no token of the model, whose vocab_size "
                f"(config.json) is {vocabulary}; allowed: below {vocabulary}"
            )
    check_numbers(files, folder)
    known = set(_known(files))
    if not known:
        return
    if vocabulary is not None and len(known) > vocabulary:
        raise UserError(
            f"spec.model.path: the tokenizer has {len(known)} tokens, the model's embedding {vocabulary} (vocab_size "
            "of its config.json): they are not of one model"
        )
    highest = max(_numbers_of_tokenizer(files), default=(0, ""))
    # Some models of pictures have embeddings for those behind the language's.
    if vocabulary is not None and highest[0] >= vocabulary and "vision_config" not in files.get("config.json", {}):
        raise UserError(
            f"{folder / 'tokenizer.json'}: token {highest[1][:40]!r} has the number {highest[0]}, and the model's "
            f"embedding no such row (vocab_size of its config.json is {vocabulary}): they are not of one model"
        )
    if dropout := _model(files).get("dropout"):
        raise UserError(
            f"{folder / 'tokenizer.json'}: model.dropout {dropout} makes other tokens of the same text each "
            "time; set it to null"
        )
    end = files.get("tokenizer_config.json", {}).get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    if isinstance(end, str) and end not in known:
        raise UserError(
            f"{folder / 'tokenizer_config.json'}: eos_token {end!r} is no token of tokenizer.json: the model never saw "
            "it; name the one that ends its answers"
        )


def _embedding(config: Mapping[str, Any]) -> int | None:
    language = config.get("text_config")
    size = (language if isinstance(language, dict) else config).get("vocab_size")
    return size if type(size) is int and size > 0 else None


def check_numbers(files: Files, folder: Path) -> None:
    """Refuse a token's number that leaves so many unused that a library which counts through them would not end.

    Args:
        files: those that a folder has.
        folder: for messages.

    Raises:
        UserError: naming the file and the token.
    """
    numbers = [(number, text, "tokenizer.json") for number, text in _numbers_of_tokenizer(files)]
    numbers += _numbers_beside(files)
    if not numbers:
        return
    tokens = len({number for number, _, _ in numbers}) + _listed(files)
    number, text, name = max(numbers)
    if number >= tokens + _MOST_UNUSED:
        raise UserError(
            f"{folder / name}: token {text[:40]!r} has the number {str(number)[:40]}, and the tokenizer has "
            f"{how_many(tokens, 'token')}; allowed: below {tokens + _MOST_UNUSED}"
        )


def _numbers_beside(files: Files) -> Iterator[tuple[int, str, str]]:
    """Numbers and texts of the tokens of the other files, each with its file."""
    for name in ("added_tokens.json", "vocab.json"):
        for text, number in files.get(name, {}).items():
            if type(number) is int:
                yield number, text, name
    for number, token in _decoder(files).items():
        if number.isdecimal():
            text = str(token.get("content") if isinstance(token, dict) else token)
            # Python reads no number of more digits than some thousands.
            yield int(number[:_DIGITS]), text, "tokenizer_config.json"


def _listed(files: Files) -> int:
    """Number of tokens whose numbers are their places in a list."""
    return len(_list(_model(files).get("vocab")))


def _numbers_of_tokenizer(files: Files) -> Iterator[tuple[int, str]]:
    """Numbers and texts of the tokens of `tokenizer.json`; a list's are their places, of which there are not more."""
    for text, number in _object(_model(files).get("vocab")).items():
        if type(number) is int:
            yield number, text
    for token in _list(files.get("tokenizer.json", {}).get("added_tokens")):
        if isinstance(token, dict) and type(token.get("id")) is int:
            yield token["id"], str(token.get("content"))


def _known(files: Files) -> Iterator[str]:
    """Texts of the tokens; none where there is no `tokenizer.json`, which alone says all of them."""
    vocabulary = _model(files).get("vocab")
    if isinstance(vocabulary, dict):
        yield from vocabulary
    elif isinstance(vocabulary, list):
        yield from (entry[0] for entry in vocabulary if isinstance(entry, list) and entry and isinstance(entry[0], str))
    else:
        return
    for token in [*_list(files.get("tokenizer.json", {}).get("added_tokens")), *_decoder(files).values()]:
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            yield token["content"]
    yield from files.get("added_tokens.json", {})


def _model(files: Files) -> dict[str, Any]:
    return _object(files.get("tokenizer.json", {}).get("model"))


def _decoder(files: Files) -> dict[str, Any]:
    """Added tokens by their numbers, as `tokenizer_config.json` has them."""
    return _object(files.get("tokenizer_config.json", {}).get("added_tokens_decoder"))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
