"""Shell scripts, read without being run: assignments, arrays, expansions and simple commands, in their order.

A value that only a run could give (a command substitution, a variable that nothing sets, a positional parameter) stays
in the text as it is written and is listed in `Word.unknown`. Branches are not decided: commands within them are read
as if each ran, and a variable that one of them sets is listed in `Script.conditional`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rljob_worker.errors import UserError

MAX_CHARACTERS = 2**20
"""Largest script, and largest text that its expansions grow to: `A=$A$A` doubles with each line."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_PARAMETER = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)
_ENDS_WORD = " \t\n;&|()<>"
_PLAIN = re.compile(r"[^ \t\n;&|()<>\\'\"$`]+")
_PLAIN_IN_QUOTES = re.compile(r"[^\"\\$`]+")
_REDIRECTION = re.compile(r"\d*(<<<|<<-?|>>|>&|<&|&>|[<>])[ \t]*")
_MAX_NESTING = 50
_OPERATORS = ("&&", "||", ";;", "&", "|", ";", "(", ")", "\n")
_OPENING, _CLOSING = ("if", "for", "while", "until", "case", "{"), ("fi", "done", "esac", "}")
_KEYWORDS = (*_OPENING, *_CLOSING, "then", "else", "elif", "do", "in", "!", "time", "function", "exec", "nohup")
_DECLARING = ("export", "declare", "typeset", "local", "readonly")


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command, expanded."""

    text: str
    unknown: tuple[str, ...] = ()
    """Expansions whose value is not known, as they are written."""
    used: frozenset[str] = frozenset()
    """Variables that it was made from."""


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command."""

    words: tuple[Word, ...]
    environment: Mapping[str, Word]
    """Assignments before its name."""


@dataclass(slots=True)
class Script:
    """The contents of a script."""

    commands: list[Command] = field(default_factory=list)
    exported: dict[str, Word] = field(default_factory=dict)
    conditional: set[str] = field(default_factory=set)
    """Variables that are set within a branch, a loop or a function."""
    missing: set[str] = field(default_factory=set)
    """Arrays that are used and set nowhere."""
    sourced: list[str] = field(default_factory=list)
    """Files that it reads, and this does not."""


def read_script(text: str, variables: Mapping[str, str]) -> Script:
    """Read a script.

    Args:
        text: its text.
        variables: variables that are set before it begins.

    Raises:
        UserError: a quote or bracket is not closed, or the expansions grow without bound.
    """
    return _Reader(text.replace("\r\n", "\n"), variables).read()


class _Fields:
    """The fields of a word in the making, each of parts."""

    def __init__(self) -> None:
        self._parts: list[list[Word]] = []

    def add(self, words: Sequence[Word]) -> None:
        """Go on with the last field; each further word begins a new one."""
        if words and not self._parts:
            self._parts.append([])
        for index, word in enumerate(words):
            if index > 0:
                self._parts.append([])
            self._parts[-1].append(word)

    def words(self) -> list[Word]:
        """The fields."""
        return [_joined(parts) for parts in self._parts]


def _joined(parts: Sequence[Word]) -> Word:
    unknown = tuple(text for part in parts for text in part.unknown)
    return Word("".join(part.text for part in parts), unknown, frozenset().union(*(part.used for part in parts)))


class _Reader:
    def __init__(self, text: str, variables: Mapping[str, str]) -> None:
        self._text, self._at, self._depth, self._expanded, self._nesting = text, 0, 0, 0, 0
        self._given = set(variables)
        self._variables: dict[str, list[Word]] = {name: [Word(value)] for name, value in variables.items()}
        self._documents: list[str] = []
        self._script = Script()

    def read(self) -> Script:
        if len(self._text) > MAX_CHARACTERS:
            raise UserError(f"the script has more than {MAX_CHARACTERS} characters")
        while self._at < len(self._text):
            self._command()
        return self._script

    def _command(self) -> None:
        assigned: dict[str, tuple[bool, list[Word]]] = {}
        words: list[Word] = []
        while not self._ends():
            found = None if words else _ASSIGNMENT.match(self._text, self._at)
            if found:
                self._at = found.end()
                values = self._array() if self._text.startswith("(", self._at) else self._word() or [Word("")]
                assigned[found[1]] = bool(found[2]), values
            elif not self._redirection():
                words += self._word()
        self._perform(assigned, words)

    def _ends(self) -> bool:
        """Pass what separates words; whether the command ends here, with its operator passed too."""
        while self._at < len(self._text):
            if self._text.startswith("\\\n", self._at):
                self._at += 2
            elif self._text[self._at] in " \t":
                self._at += 1
            elif self._text[self._at] == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            else:
                break
        if self._at >= len(self._text):
            return True
        operator = next((o for o in _OPERATORS if self._text.startswith(o, self._at)), None)
        if operator is None:
            return False
        self._at += len(operator)
        if operator == "\n":
            self._pass_documents()
        return True

    def _redirection(self) -> bool:
        """Pass a redirection, and remember the end of a document that follows."""
        found = _REDIRECTION.match(self._text, self._at)
        if not found:
            return False
        self._at = found.end()
        start = self._at
        target = self._word()
        if found[1] in ("<<", "<<-"):
            self._documents.append(self._text[start : self._at].strip("'\"\\"))
        return bool(target) or self._at > found.start()

    def _pass_documents(self) -> None:
        for end in self._documents:
            while self._at < len(self._text):
                line = self._line()
                if line.strip() == end:
                    break
        self._documents = []

    def _line(self) -> str:
        end = self._text.find("\n", self._at)
        end = len(self._text) if end < 0 else end
        line = self._text[self._at : end]
        self._at = end + 1
        return line

    def _array(self) -> list[Word]:
        opened = self._at
        self._at += 1
        words: list[Word] = []
        while not self._text.startswith(")", self._at):
            if self._at >= len(self._text):
                raise self._unclosed("(", opened)
            if self._text[self._at] == "\n":
                self._at += 1
            elif self._ends():
                if self._text[self._at - 1 : self._at] == ")":
                    return words
            elif not self._redirection():
                words += self._word()
        self._at += 1
        return words

    def _word(self) -> list[Word]:
        """The fields of one word: an array makes several, and so do blanks in an expansion without quotes."""
        fields = _Fields()
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in _ENDS_WORD:
                break
            if self._text.startswith("\\\n", self._at):
                self._at += 2
                break
            if character == "'":
                fields.add([Word(self._until("'"))])
            elif character == '"':
                fields.add(self._double())
            elif character in "$`":
                fields.add([part for value in self._expansion() for part in _split(value)])
            elif character == "\\":
                fields.add([Word(self._text[self._at + 1 : self._at + 2])])
                self._at += 2
            else:
                fields.add([Word(self._run(_PLAIN))])
        return fields.words()

    def _double(self) -> list[Word]:
        """The fields within double quotes: one, or those of an array."""
        opened = self._at
        self._at += 1
        fields = _Fields()
        while not self._text.startswith('"', self._at):
            if self._at >= len(self._text):
                raise self._unclosed('"', opened)
            character = self._text[self._at]
            following = self._text[self._at + 1 : self._at + 2]
            if character in "$`":
                fields.add(self._expansion())
            elif character == "\\":
                escaped = following and following in '$`"\\\n'
                fields.add([Word(following.replace("\n", "") if escaped else character + following)])
                self._at += 2
            else:
                fields.add([Word(self._run(_PLAIN_IN_QUOTES))])
        self._at += 1
        # "${ARGS[@]}" of no elements is no word, "" is one.
        return fields.words() or ([Word("")] if self._at - opened == 2 else [])

    def _run(self, plain: re.Pattern[str]) -> str:
        found = plain.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return found[0]

    def _until(self, quote: str) -> str:
        end = self._text.find(quote, self._at + 1)
        if end < 0:
            raise self._unclosed(quote, self._at)
        text, self._at = self._text[self._at + 1 : end], end + 1
        return text

    def _expansion(self) -> list[Word]:
        """The values of `$NAME`, `${...}`, `$(...)` or of a command in backticks."""
        start = self._at
        if self._text[start] == "`":
            self._until("`")
            return [self._unknown(start)]
        following = self._text[start + 1 : start + 2]
        if following == "(":
            self._at = self._closing(start + 1, "(", ")")
            return [self._unknown(start)]
        if following == "{":
            self._at = self._closing(start + 1, "{", "}")
            return self._parameter(self._text[start + 2 : self._at - 1], start)
        name = _NAME.match(self._text, start + 1)
        if name:
            self._at = name.end()
            return self._parameter(name[0], start)
        self._at = start + 1 + len(following)
        if following in ("@", "*"):
            return []
        return [self._unknown(start)] if following in "0123456789#?$!-" and following else [Word("$" + following)]

    def _parameter(self, text: str, start: int) -> list[Word]:
        found = _PARAMETER.fullmatch(text)
        if text in ("@", "*"):
            return []
        if not found:
            return [self._unknown(start)]
        name, whole, operator, default = found.groups()
        values = self._variables.get(name)
        if values is None or (operator and operator[0] == ":" and values == [Word("")]):
            if operator is None:
                if whole:
                    self._script.missing.add(name)
                return [] if whole else [self._unknown(start)]
            # A default may hold expansions and quotes of its own.
            nested = _Reader(default, {})
            nested._variables, nested._given, nested._nesting = self._variables, self._given, self._nesting + 1
            if nested._nesting > _MAX_NESTING:
                raise UserError(f"line {self._line_of(start)}: expansions are nested more than {_MAX_NESTING} times")
            values = nested._all_words()
            values = [_joined(values)]
        self._expanded += sum(len(value.text) for value in values)
        if self._expanded > MAX_CHARACTERS:
            raise UserError(f"the script's variables grow beyond {MAX_CHARACTERS} characters")
        named = [Word(value.text, value.unknown, value.used | {name}) for value in values]
        return named if whole else named[:1]

    def _all_words(self) -> list[Word]:
        words = []
        while self._at < len(self._text):
            if self._text[self._at] in _ENDS_WORD:
                words.append(Word(self._text[self._at]))
                self._at += 1
            else:
                words += self._word()
        return words

    def _closing(self, at: int, opening: str, closing: str) -> int:
        """The place behind the bracket that closes the one at `at`."""
        depth, place = 0, at
        while place < len(self._text):
            character = self._text[place]
            if character == "\\":
                place += 1
            elif character == "'" and opening == "(":
                place = self._text.find("'", place + 1)
                if place < 0:
                    break
            else:
                depth += (character == opening) - (character == closing)
                if depth == 0:
                    return place + 1
            place += 1
        raise self._unclosed(opening, at)

    def _unknown(self, start: int) -> Word:
        text = self._text[start : self._at]
        return Word(text, (text,))

    def _unclosed(self, mark: str, at: int) -> UserError:
        return UserError(f"line {self._line_of(at)}: {mark} is not closed")

    def _line_of(self, at: int) -> int:
        return self._text.count("\n", 0, at) + 1

    def _perform(self, assigned: Mapping[str, tuple[bool, list[Word]]], words: list[Word]) -> None:
        while words and words[0].text in _KEYWORDS:
            self._depth += (words[0].text in _OPENING) - (words[0].text in _CLOSING)
            if words[0].text == "for" and len(words) > 1:
                self._variables[words[1].text] = [Word(f"${words[1].text}", (f"${words[1].text}",))]
                return
            # `then NAME=value`: what follows a keyword is a command of its own.
            words = words[1:]
            while words and (found := _ASSIGNMENT.match(words[0].text)):
                value = Word(words[0].text[found.end() :], words[0].unknown, words[0].used)
                assigned = {**assigned, found[1]: (bool(found[2]), [value])}
                words = words[1:]
        if not words:
            for name, (more, values) in assigned.items():
                self._assign(name, values, more)
        elif words[0].text in _DECLARING:
            self._declare(words[0].text, words[1:])
        elif words[0].text in ("source", "."):
            self._script.sourced += [word.text for word in words[1:2]]
        elif words[0].text == "unset":
            for word in words[1:]:
                self._variables.pop(word.text, None)
        else:
            environment = {name: values[0] for name, (_, values) in assigned.items() if values}
            self._script.commands.append(Command(tuple(words), environment))

    def _assign(self, name: str, values: list[Word], more: bool = False) -> None:
        if name in self._given:
            return
        if self._depth > 0:
            self._script.conditional.add(name)
        before = self._variables.get(name, [])
        if more and len(before) == len(values) == 1:
            self._variables[name] = [_joined([before[0], values[0]])]
        else:
            self._variables[name] = [*before, *values] if more else list(values)
        if name in self._script.exported:
            self._script.exported[name] = self._variables[name][0] if self._variables[name] else Word("")

    def _declare(self, how: str, words: Iterable[Word]) -> None:
        for word in words:
            found = _ASSIGNMENT.match(word.text)
            name = found[1] if found else word.text
            if found:
                self._assign(name, [Word(word.text[found.end() :], word.unknown, word.used)], bool(found[2]))
            if how == "export" and name in self._variables and self._variables[name]:
                self._script.exported[name] = self._variables[name][0]


def _split(value: Word) -> list[Word]:
    """The fields of an expansion without quotes."""
    if value.unknown:
        return [value]
    return [Word(part, (), value.used) for part in value.text.split()]
