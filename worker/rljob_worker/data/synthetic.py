"""Generated data sets: no file needed, and the right answer depends on the prompt."""

from __future__ import annotations

from itertools import cycle, islice
from string import ascii_lowercase

import numpy as np

from rljob_api.spec import SyntheticData

_ENUMERATION_LIMIT = 1 << 16


def symbol_names(count: int) -> list[str]:
    """`a` to `z`, then `aa`, `ab` and so on: `count` distinct words."""
    names: list[str] = []
    for index in range(count):
        name = ""
        rest = index + 1
        while rest:
            rest, letter = divmod(rest - 1, len(ascii_lowercase))
            name = ascii_lowercase[letter] + name
        names.append(name)
    return names


def generate_rows(data: SyntheticData) -> list[tuple[str, str]]:
    """(prompt, answer) pairs of space-separated symbols, of a task of text: all prompts distinct, the same for the same
    seed.

    The answer is the task's pattern repeated or cut to `answerSymbols`: the last symbol (`RepeatLast`), the prompt
    (`Copy`) or the reversed prompt (`Reverse`).
    """
    names = symbol_names(data.symbols)
    pattern = {
        "RepeatLast": lambda prompt: prompt[-1:],
        "Copy": lambda prompt: prompt,
        "Reverse": lambda prompt: prompt[::-1],
    }[data.task]
    rows = []
    for codes in _distinct_prompts(data):
        prompt = [names[code] for code in codes]
        answer = islice(cycle(pattern(prompt)), data.answer_symbols)
        rows.append((" ".join(prompt), " ".join(answer)))
    return rows


def _distinct_prompts(data: SyntheticData) -> list[tuple[int, ...]]:
    """Raw bits of PCG64 are used, because NumPy keeps only those the same from version to version."""
    bits = np.random.PCG64(data.seed)
    length = data.prompt_symbols
    possible = data.symbols**length
    if possible <= max(_ENUMERATION_LIMIT, 2 * data.rows):
        chosen = np.argsort(bits.random_raw(possible), kind="stable")[: data.rows]
        digits = [(chosen // data.symbols**place) % data.symbols for place in reversed(range(length))]
        return [tuple(row) for row in np.stack(digits, axis=1).tolist()]
    # At most half of the possible prompts are wanted here, so that few draws are repeats.
    found: dict[tuple[int, ...], None] = {}
    while len(found) < data.rows:
        drawn = bits.random_raw((data.rows - len(found)) * length) % np.uint64(data.symbols)
        found.update(dict.fromkeys(map(tuple, drawn.reshape(-1, length).tolist())))
    return list(found)
