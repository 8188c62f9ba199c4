"""Chat messages to the text of a prompt, by transformers' own rendering of a chat template."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.spec import ChatSpec, DataSource
from rljob_worker.errors import UserError
from rljob_worker.host.interrupting import interrupted_after

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
_MAX_TEMPLATE_BYTES = 2**20
_RENDER_SECONDS = 10.0
"""A prompt takes milliseconds; loops within loops take as long as whoever wrote them wants."""
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
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{where} cannot be read: {error}") from None
    _check_syntax(text, where)
    return text


def _check_syntax(text: str, where: str) -> None:
    """Before transformers is imported, which has tags of its own: it judges those."""
    import jinja2

    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        said = str(error.message)
        if not said.startswith("Encountered unknown tag"):
            raise UserError(f"{where}, line {error.lineno}: no chat template: {said}") from None


class ChatTemplate:
    """How one source's prompts are rendered.

    Args:
        source: with `applyChatTemplate`.
        field: its place in the manifest.
        tokenizer: whose template is used, unless the source has its own.
        own: the source's own (`read_template`).

    Raises:
        UserError: there is no template, or it has no use for an argument of `chat.templateArgs`.
    """

    def __init__(self, source: DataSource, field: str, tokenizer: PreTrainedTokenizerBase, own: str | None) -> None:
        if own is None and not tokenizer.chat_template:
            raise UserError(f"{field}.applyChatTemplate: the model's tokenizer has no chat template")
        self._field, self._tokenizer = field, tokenizer
        self._chat = source.chat or ChatSpec()
        try:
            self._template = tokenizer.get_chat_template(own)
        except ValueError as error:
            raise UserError(f"{field}.applyChatTemplate: {error}") from None
        self._check_arguments()

    def messages(self, prompt: str | Messages) -> Messages:
        """A prompt's messages: a plain string is one of the user; those without a system message get the source's."""
        messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self._chat.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._chat.system})
        return messages

    def render(self, prompt: str | Messages, place: str) -> str:
        """The text that the policy continues; `place` names the row in a message."""
        render = partial(
            self._tokenizer.apply_chat_template,
            self.messages(prompt),
            chat_template=self._template,
            add_generation_prompt=True,
            tokenize=False,
            **self._chat.template_args,
        )
        try:
            text = interrupted_after(_RENDER_SECONDS, render)
        except TimeoutError:
            raise UserError(
                f"{self._template_name()}: renders {place} for more than {_RENDER_SECONDS:g} s: a loop without end?"
            ) from None
        except Exception as error:
            raise UserError(
                f"{place}: the chat template refuses the prompt: {type(error).__name__}: {error}"
            ) from error
        return str(text)

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

    def _check_holds(self, text: str, words: str, place: str) -> None:
        if not _holds(text, words):
            raise UserError(
                f"{self._template_name()}: drops the words of {place}: {_short(words)} is not in the rendered prompt "
                f"{_short(text)}"
            )

    def _check_arguments(self) -> None:
        # A template passes over what it does not know, so that a slip of the keyboard would have no effect.
        names = set(_WORD.findall(self._template))
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
