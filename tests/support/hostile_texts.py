"""Texts that are no manifest and would take long, or all memory, to read."""

from __future__ import annotations

from itertools import pairwise

LETTERS = "abcdefgh"


def _levels(level: str) -> str:
    """Each level repeats the one before nine times."""
    return f"{LETTERS[0]}: &{LETTERS[0]} {{x: 1}}\n" + "".join(
        f"{name}: &{name} {level.format(', '.join([f'*{before}'] * 9))}\n" for before, name in pairwise(LETTERS)
    )


TEXTS = {
    # name: text, and where and how it is refused
    "aliases of aliases": (_levels("[{}]"), "line 5, "),
    "merged aliases": (_levels("{{<<: [{}]}}"), "line 5, "),
    "an alias of itself": ("a: &a [*a]\n", "line 1, column 8: *a stands inside what it repeats"),
    "a document of itself": ("&a {spec: *a}\n", "line 1, column 11: *a stands inside what it repeats"),
    "merged into itself": ("a: &a {<<: *a}\n", "line 1, column 12: *a stands inside what it repeats"),
    "open brackets": ("[" * 3000, "line 1, column 65: is deeper than 64 blocks inside each other"),
    "brackets": ("a:\n  " + "[" * 3000 + "]" * 3000 + "\n", "line 2, column 66: is deeper than 64 blocks"),
    "half a million brackets": ("[" * 500_000, "line 1, column 65: is deeper than 64 blocks"),
    "braces": ("{a: " * 3000, "line 1, column 257: is deeper than 64 blocks"),
    "dashes": ("- " * 3000 + "x\n", "line 1, column 129: is deeper than 64 blocks"),
    "deep JSON": ('{"a":' * 3000 + "1" + "}" * 3000, "line 1, column 321: is deeper than 64 blocks"),
    "less deep JSON": ('{"a":' * 100 + "1" + "}" * 100, "is deeper than 64 blocks"),
    "many values": ("- x\n" * 200_000, "line 10000, column 3: has more than 10000 keys and values"),
    "half a character": ('spec: {steps: "\\ud800"}\n', "spec.steps: holds half a character"),
    "half a character in JSON": ('{"spec": {"steps": ["\\udfff"]}}\n', "spec.steps[0]: holds half a character"),
    "half a character as a key": ('spec: {"\\udfff": 1}\n', "spec: holds half a character"),
    "5,000 digits": (f"spec: {{steps: {'9' * 5000}}}\n", "line 1, column 15: a number of 5000 digits"),
    "5,000 digits in JSON": (f'{{"spec": {{"steps": {"9" * 5000}}}}}\n', "line 1, column 20: a number of 5000 digits"),
    "5,000 hexadecimal digits": (f"a: 0x{'f' * 5000}\n", "line 1, column 4: a number of 5002 digits"),
    "50,000 bits": (f"a: 0b{'1' * 50_000}\n", "line 1, column 4: a number of 50002 digits"),
    "no number": ("a: !!int x\n", "line 1, column 4: is no int: 'x'"),
    "no time": ("a: !!float x\n", "line 1, column 4: is no float: 'x'"),
    "no truth value": ("a: !!bool x\n", "line 1, column 4: is no bool: 'x'"),
    "bytes": ('a: !!binary "%%%"\n', "line 1, column 4: could not determine a constructor for the tag"),
    "a set": ("a: !!set {x}\n", "line 1, column 4: could not determine a constructor for the tag"),
    "an unknown alias": ("a: 1\nb: *x\n", "line 2, column 4: found undefined alias 'x'"),
    "two anchors of a name": ("a: &a 1\nb: &a 2\n", "line 2, column 4: second occurrence"),
    "a key that is a list": ("? [a]\n: 1\n", "line 1, column 3: a key is not a scalar"),
    "a key twice in JSON": ('{"a": 1,\n "a": 2}', "line 2, column 2: key 'a' is there twice"),
    "no number in JSON": ('{"a": NaN}', "apiVersion: is missing"),
    "a control character": ("a: 1\nb: \x07\n", "line 2: holds the character U+0007"),
    "another YAML": ("%YAML 9.9\n---\na: 1\n", "line 1, column 1: found incompatible YAML document"),
}
