"""Reading of a script's words, beside bash's own."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess

import pytest

from rljob_worker.errors import UserError
from rljob_worker.launchers.shell import read_script

SHOW = "show() { for word in \"$@\"; do printf '[%s]\\n' \"$word\"; done; printf -- '--\\n'; }\n"
SCRIPTS = [
    "show a b  c",
    "show 'a b' \"c d\" e\\ f '' \"\"",
    "show a\\\n  b \\\n  # comment\nshow c#d # e\n",
    'A=1; B="$A 2"; show $B "$B" ${B}x "${B}x"',
    "A='x y'; show pre$A\"$A\"post",
    'A=(1 \'two words\' "three"); show ${A[@]} -- "${A[@]}"',
    'A=(\n  --flag 1  # a comment with \'quotes\n\n  --other "2 3"\n)\nA+=(--more)\nshow "${A[@]}"',
    'A=(); show a "${A[@]}" b ${A[@]} c "x${A[@]}y"',
    'show ${UNSET:-default} "${UNSET:-a b}" ${UNSET-x}',
    'A=; show ${A:-empty} "${A-kept}" end',
    'A=1; show ${B:-${A}${A}} "${B:-"$A"}"',
    "A=a; A+=b; show $A; unset A; show ${A:-gone}",
    'export A=1 B=\'2 3\'; show "$A" "$B"',
    'show "a\\"b\\$c\\`d\\\\e\\f"',
    "show 'it'\\''s' \"it's\"",
    "if true; then A=1; fi; show $A",
    "show a && show b; show c | cat",
    'show \'{"NPU": 8}\' "{\\"a\\": \\"b\\"}"',
    "show $'x'y",
    "cat <<'END' > /dev/null\nshow 'unclosed\nEND\nshow after",
    'cat > /dev/null <<END\nshow "unclosed\nEND\nshow after',
    "show a > /dev/null 2>&1; show b 2>/dev/null",
    "A=1 B=2\nshow $A$B",
    "X=1 show prefixed",
    'A="line one\nline two"; show "$A" $A',
    'show $@ "$@" end',
    "show \\$A '$A' \"\\$A\"",
    "declare -a A=; readonly B=5; show $B",
    "{ A=2; show $A; }",
    "A=`true`; show end",
]


def words_of(script: str) -> list[list[str]]:
    found = read_script(script, {}).commands
    return [[word.text for word in command.words[1:]] for command in found if command.words[0].text == "show"]


def words_of_bash(script: str) -> list[list[str]]:
    environment = {"PATH": os.environ["PATH"]}
    ran = subprocess.run(
        ["bash", "--norc", "-c", SHOW + script], env=environment, capture_output=True, text=True, timeout=20, check=True
    )
    lines = ran.stdout.split("--\n")[:-1]
    return [[word.removeprefix("[").removesuffix("]") for word in part.split("]\n")[:-1]] for part in lines]


@pytest.mark.parametrize("script", [script for script in SCRIPTS if "/dev/null" not in script and "$'" not in script])
def test_words_are_those_of_bash(script: str) -> None:
    assert words_of(script) == words_of_bash(script)


@pytest.mark.parametrize("script", [script for script in SCRIPTS if "END" in script])
def test_a_document_within_the_script_is_passed_over(script: str) -> None:
    assert words_of(script)[-1] == ["after"]


def test_what_only_a_run_would_know_is_listed_and_never_run(tmp_path: object) -> None:
    script = f"A=$(touch {tmp_path}/ran) B=`touch {tmp_path}/ran`\nshow $A x$B ${{C}} $1 $((1+2)) ${{D%x}}"
    (command,) = read_script(script, {}).commands
    assert [word.unknown[0][:2] for word in command.words[1:]] == ["$(", "`t", "${", "$1", "$(", "${"]
    assert not os.listdir(str(tmp_path))


def test_variables_that_are_given_win_and_branches_are_named() -> None:
    found = read_script("A=1\nif x; then B=2; else B=3; fi\nfor i in 1 2; do show $i; done\nshow $A $B", {"A": "9"})
    assert [word.text for word in found.commands[-1].words[1:]] == ["9", "3"]
    assert found.commands[-1].words[2].used & found.conditional == {"B"}
    loop = next(command for command in found.commands if command.words[0].text == "show")
    assert loop.words[1].unknown == ("$i",)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("a\nb 'c", "line 2: ' is not closed"),
        ('a "b', 'line 1: " is not closed'),
        ("A=(1 2", r"line 1: \( is not closed"),
        ("a $(b", r"line 1: \( is not closed"),
        ("a ${b", r"line 1: { is not closed"),
        ("A=aaaaaaaaaa\n" + "A=$A$A\n" * 60, "grow beyond 1048576 characters"),
        ("A=" + "${A:-" * 400 + "}" * 400, "nested more than 50 times"),
        ("a" * 2**20 + "b", "more than 1048576 characters"),
    ],
)
def test_what_cannot_be_read_is_named(script: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_script(script, {})


def test_any_text_ends() -> None:
    rng = random.Random(3)
    whole = "\n".join(SCRIPTS)
    pieces = [
        '"',
        "'",
        "$",
        "${",
        "$(",
        ")",
        "}",
        "\\",
        "\n",
        "`",
        "<<E",
        "=(",
        "=",
        "&",
        "|",
        ";",
        "#",
        "<",
        "\x00",
        "é",
    ]
    for _ in range(400):
        text = list(whole[: rng.randrange(len(whole))])
        for _ in range(rng.randrange(1, 20)):
            at = rng.randrange(len(text) + 1)
            text[at : at + rng.randrange(3)] = rng.choice(pieces)
        with contextlib.suppress(UserError):
            read_script("".join(text), {})
