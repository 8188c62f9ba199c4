"""Chat messages to the text of a prompt, by transformers' own rendering of a chat template."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.spec import ChatSpec, DataSource
from rljob_worker.data import bounded
from rljob_worker.data.bounded import within_bounds
from rljob_worker.data.places import with_places
from rljob_worker.data.prompts import ASSISTANT, Messages, parsed_prompt
from rljob_worker.data.turns import Schema
from rljob_worker.errors import UserError
from rljob_worker.host.encodings import not_text, without_mark

if TYPE_CHECKING:
    from jinja2 import Environment, Undefined
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("rljob.data")

_MAX_TEMPLATE_BYTES = 2**20
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_ANSWER = "rljob-42-answer"
_TRIED = 5
"""Prompts with which a template's use of variables and of the generation prompt is looked at."""
_WORD = re.compile(r"\w+")


def read_template(source: DataSource, field: str) -> str | None:
    """The text of a source's own chat template; None where it has none. UserError when it cannot be read."""
    if source.chat is None or source.chat.template_file is None:
        return None
    path = Path(source.chat.template_file).expanduser()
    where = f"{field}.chat.templateFile: {path}"
    if not path.is_file():
        raise UserError(f"{where} {'is not a file' if path.exists() else 'does not exist'}")
    if path.stat().st_size > _MAX_TEMPLATE_BYTES:
        raise UserError(f"{where} has more than 1 MiB, which is no chat template")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error}") from None
    if what := not_text(content[:64]):
        raise UserError(f"{where} {what}")
    try:
        text = without_mark(content).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{where} cannot be read: {error}") from None
    _check_syntax(text, where)
    return text


def _parser() -> Environment:
    import jinja2

    return jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])


def _check_syntax(text: str, where: str) -> None:
    """Before transformers is imported, which has tags of its own: it judges those."""
    import jinja2

    try:
        _parser().parse(text)
    except jinja2.TemplateSyntaxError as error:
        said = str(error.message)
        if not said.startswith("Encountered unknown tag"):
            raise UserError(f"{where}, line {error.lineno}: no chat template: {said}") from None


class ChatTemplate:
    """Rendering of one source's prompts.

    Args:
        source: with `applyChatTemplate`.
        field: its place in the manifest.
        tokenizer: whose template is used, unless the source has its own.
        own: the source's own (`read_template`).
        tools: schemas of the tools that the policy may call.

    Raises:
        UserError: there is no template, or it has no use for an argument of `chat.templateArgs`, or for tools.
    """

    def __init__(
        self,
        source: DataSource,
        field: str,
        tokenizer: PreTrainedTokenizerBase,
        own: str | None,
        tools: Sequence[Schema] = (),
    ) -> None:
        if own is None and not tokenizer.chat_template:
            raise UserError(f"{field}.applyChatTemplate: the model's tokenizer has no chat template")
        self._field, self._tokenizer = field, tokenizer
        self._chat = source.chat or ChatSpec()
        self._tools: list[dict[Any, Any]] = [dict(tool) for tool in tools]
        try:
            self._template = tokenizer.get_chat_template(own, tools=self._tools or None)
        except ValueError as error:
            raise UserError(f"{field}.applyChatTemplate: {error}") from None
        self._check_arguments()

    def messages(self, prompt: str | Messages) -> Messages:
        """A prompt's messages: a plain string is one of the user; those without a system message get the source's.

        A table has all keys in all messages and in all parts of their contents, null where one has none: those are left
        out, since a template may ask whether one is there.
        """
        value = parsed_prompt(prompt)
        messages: Messages = (
            [{"role": "user", "content": value}]
            if isinstance(value, str)
            else [
                {k: _filled(v) if k == "content" else v for k, v in message.items() if v is not None or k == "content"}
                for message in value
            ]
        )
        if self._chat.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._chat.system})
        return messages

    def render(self, prompt: str | Messages, place: str, pictures: int = 0) -> str:
        """The text that the policy continues; `place` names the row in a message, which has so many pictures."""
        messages = self.messages(prompt)
        if pictures:
            try:
                messages = with_places(messages, pictures)
            except ValueError as error:
                raise UserError(f"{place}: the row {error}") from None
        try:
            return self._rendered(messages)
        except TimeoutError:
            raise UserError(
                f"{self._template_name()}: renders {place} for more than {bounded.RENDER_SECONDS:g} s: a loop without "
                "end?"
            ) from None
        except Exception as error:
            raise UserError(
                f"{self._template_name()}: refuses the prompt of {place}: {type(error).__name__}: {error}"
            ) from error

    def conversation(self, messages: Sequence[Mapping[str, str]], opened: bool) -> str:
        """A conversation as text, with the opening of the next answer or without; raises what the template raises."""
        return self._rendered([dict(message) for message in messages], generation_prompt=opened)

    def _rendered(
        self, messages: Messages, *, generation_prompt: bool = True, more: Mapping[str, Any] | None = None
    ) -> str:
        render = partial(
            self._tokenizer.apply_chat_template,
            messages,
            chat_template=self._template,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            tools=[*self._tools] or None,
            **{**(more or {}), **self._chat.template_args},
        )
        return within_bounds(render)

    def check_roles(self, roles: Mapping[str, str]) -> None:
        """Refuse messages whose role the template does not know, which would pass as that of a stranger, or be lost.

        Args:
            roles: each role of the source's messages with the place of the first row that has it.

        Raises:
            UserError: names role and row.
        """
        known = _ROLES | set(_WORD.findall(self._template))
        for role, place in roles.items():
            if role not in known:
                raise UserError(
                    f"{place}: a chat message has the role {role!r}, which {self._template_name()} does not know: "
                    f"{', '.join(sorted(_ROLES))}, or one that the template names"
                )

    def check(self, prompts: Sequence[tuple[str | Messages, str]]) -> None:
        """Refuse a template that drops what the user asks: the policy would learn to answer nothing.

        Args:
            prompts: some of them, each with its row's place.

        Raises:
            UserError: a prompt's text lacks words of it, or is that of another prompt.
        """
        seen: dict[str, tuple[list[str], str]] = {}
        for prompt, place in prompts:
            text = self.render(prompt, place)
            messages = self.messages(prompt)
            self._check_parts(messages, text, place)
            asked = [words for message in messages if message["role"] == "user" for words in _texts(message)]
            if self._chat.system is not None and messages[0]["content"] == self._chat.system:
                self._check_holds(text, self._chat.system, f"chat.system before {place}")
            for words in asked:
                self._check_holds(text, words, place)
            other, first = seen.setdefault(text, (asked, place))
            if other != asked:
                raise UserError(
                    f"{self._template_name()}: renders two different prompts alike, {first} and {place}: {_short(text)}"
                )

        for prompt, place in prompts[:_TRIED]:
            self._check_variables(self.messages(prompt), place)
            self._check_begins_answer(self.messages(prompt), place)

    def _check_variables(self, messages: Messages, place: str) -> None:
        """Jinja prints nothing for a variable that nobody gave."""
        printed: list[str] = []
        given = {"messages", "tools", "add_generation_prompt", *self._tokenizer.special_tokens_map}
        given |= self._chat.template_args.keys()
        asked = {name for name in self._undeclared() - given if not name.endswith("_token")}
        with suppress(Exception):
            self._rendered(messages, more={name: _noticed(name, printed) for name in asked})
        if printed:
            raise UserError(
                f"{self._template_name()}: prints the variable {printed[0]!r}, which has no value ({place}): give one "
                f"in {self._field}.chat.templateArgs.{printed[0]}"
            )

    def _undeclared(self) -> set[str]:
        import jinja2
        from jinja2 import meta

        try:
            return set(meta.find_undeclared_variables(_parser().parse(self._template)))
        except jinja2.TemplateSyntaxError:
            # With tags that only transformers knows.
            return set()

    def _check_begins_answer(self, messages: Messages, place: str) -> None:
        """Refuse a template that ends a prompt before the assistant's turn begins.

        Where it makes no difference whether a generation prompt is asked for, the text of an answer must follow the
        prompt at once, as after Mistral's `[/INST]`.
        """
        prompt = self._rendered(messages)
        try:
            if prompt != self._rendered(messages, generation_prompt=False):
                return
            answered = self._rendered([*messages, {"role": ASSISTANT, "content": _ANSWER}], generation_prompt=False)
        except Exception as error:
            logger.warning(
                "%s: makes no difference for add_generation_prompt, and whether a prompt ends where an answer begins "
                "cannot be told: it refuses an answer (%s)",
                self._template_name(), error,
            )  # fmt: skip
            return
        before, found, _ = answered.partition(_ANSWER)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, before)))
        between = before[shared:]
        # A template that renders no answer at all is one for a model without turns.
        if found and between.strip():
            raise UserError(
                f"{self._template_name()}: ignores add_generation_prompt: the prompt of {place} ends with "
                f"{prompt[-40:]!r}, and an answer begins after {between!r}: the policy would not know that it is to "
                "answer; write that text where add_generation_prompt is true"
            )

    def _check_parts(self, messages: Messages, text: str, place: str) -> None:
        listed = [message["content"] for message in messages if isinstance(message["content"], list)]
        if any(repr(part) in text for content in listed for part in content):
            raise UserError(
                f"{place}: {self._template_name()} takes the content of a message as a string, and this one is a list "
                "of parts: write its text as a string"
            )

    def _check_holds(self, text: str, words: str, place: str) -> None:
        if not _holds(text, words):
            raise UserError(
                f"{self._template_name()}: drops the words of {place}: {_short(words)} is not in the rendered prompt "
                f"{_short(text)}"
            )

    def _check_arguments(self) -> None:
        # A template passes over what it does not know, so that a slip of the keyboard would have no effect.
        names = set(_WORD.findall(self._template))
        if self._tools and "tools" not in names:
            raise UserError(
                f"{self._field}.environment.tools: {self._template_name()} does not show tools: the policy would not "
                "know of them; take a model with a template that does, or write one (chat.templateFile)"
            )
        for name in self._chat.template_args:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise UserError(
                    f"{self._field}.chat.templateArgs.{name}: the chat template does not use it, so that it would have "
                    f"no effect{hint}"
                )

    def _template_name(self) -> str:
        if self._chat.template_file is not None:
            return f"{self._field}.chat.templateFile: {self._chat.template_file}"
        return f"{self._field}.applyChatTemplate: the model's chat template"


def _filled(content: Any) -> Any:
    """A message's content without what its parts have not."""
    if not isinstance(content, list):
        return content
    return [{k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else part for part in content]


def _noticed(name: str, printed: list[str]) -> Undefined:
    """A variable without a value, as Jinja has them, that is noted in `printed` where its text is asked for."""
    import jinja2

    class Noticed(jinja2.Undefined):
        def __str__(self) -> str:
            printed.append(name)
            return ""

    return Noticed(name=name)


def _texts(message: dict[str, Any]) -> Iterable[str]:
    content = message["content"]
    if isinstance(content, str):
        return [content]
    items = content if isinstance(content, list) else []
    return [item["text"] for item in items if isinstance(item, dict) and isinstance(item.get("text"), str)]


def _holds(text: str, words: str) -> bool:
    """A template may change white space and quotation, but no words."""
    return words.strip() in text or (any(_WORD.finditer(words)) and all(word in text for word in _WORD.findall(words)))


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:117] + "...")
