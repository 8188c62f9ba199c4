"""The `judge` reward, in a scoring process: a model behind OpenAI's interface for chat completions scores responses."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from rljob_api import safe_text
from rljob_api.how_many import how_many
from rljob_api.spec import JudgeSpec, RewardSpec
from rljob_worker.errors import AwayError, UserError
from rljob_worker.rewards.functions import RewardOutageError, Sample, Score
from rljob_worker.rewards.judge_texts import (
    TRIES,
    Lacking,
    Verdicts,
    chat_messages,
    check_columns,
    compiled_prompt,
    seed_of,
)
from rljob_worker.sandbox.http_calls import TRANSIENT, open_session, retry_after

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

Answer = TypeVar("Answer")
_Read: TypeAlias = Callable[[Mapping[str, object]], Answer | None]
"""From a server's JSON object to what it says; None where it is no such answer, which the server may still give."""

_CHECK_SECONDS = 30.0
_BODY_BYTES = 2**20
_QUOTED = 300
"""Characters of an answer that an error quotes."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 15.0
_MISPLACED = frozenset({401, 403, 404, 405})


@dataclass(frozen=True, slots=True)
class JudgeSetup:
    """A judge, as its scoring process gets it."""

    spec: JudgeSpec
    seed: int
    columns: frozenset[str] | None = None
    """Columns of the rows; None: unknown."""
    tried: bool = False
    """Whether its endpoint is to be asked for its models at the start."""


def judge_of(judges: Iterable[JudgeSpec], reward: RewardSpec) -> JudgeSpec:
    """The judge that a reward called `judge` asks."""
    named = reward.args.get("judge")
    return next(judge for judge in judges if named in (None, judge.name))


class _Transient(Exception):
    """An answer after which the same request may succeed."""

    def __init__(self, text: str, after: float = 0.0) -> None:
        super().__init__(text)
        self.after = after
        """Seconds that the server asks for."""


class _RefusedError(ValueError):
    """The server refuses this request."""


class Judge:
    """Asks a judge, and reads its verdicts. Used within one event loop.

    Raises:
        UserError: its template is none, or its key is not there.
    """

    def __init__(self, setup: JudgeSetup) -> None:
        self._spec, self._seed = setup.spec, setup.seed
        self._verdicts = Verdicts(setup.spec.verdict)
        self._lacking = Lacking(setup.spec.max_error_share)
        self._session: ClientSession | None = None
        assert setup.spec.endpoint is not None, "rules: a judge that chats has one"
        self._endpoint = setup.spec.endpoint
        variable = self._endpoint.key_variable
        self._key = None if variable is None else os.environ.get(variable)
        if variable is not None and not self._key:
            raise UserError(self._refused(f"endpoint.keyVariable: {variable} is not set where the driver runs"))
        if self._key is not None and not self._key.isprintable():
            said = f"endpoint.keyVariable: {variable} has a line break or another control character"
            raise UserError(self._refused(f"{said}; needed is the key alone (printf '%s', not echo)"))
        try:
            self._template, asked = compiled_prompt(setup.spec)
        except ValueError as error:
            raise UserError(self._refused(f"prompt: {error}")) from error
        if setup.columns is not None:
            check_columns(setup.spec, asked, setup.columns)

    async def check(self) -> None:
        """AwayError where the endpoint does not answer or refuses the key, UserError where it lacks the model."""
        try:
            answer = await self._until("GET", "models", None, dict, time.monotonic() + _CHECK_SECONDS)
        except RewardOutageError as error:
            raise AwayError(self._refused(f"endpoint: {error}")) from None
        except _RefusedError:
            return  # without a list of its models
        finally:
            await self.close()
        models = answer.get("data")
        known = [one.get("id") for one in models if isinstance(one, dict)] if isinstance(models, list) else []
        if known and self._endpoint.model not in known:
            there = self._shown(", ".join(map(str, known)))
            raise UserError(self._refused(f"endpoint.model: there is no {self._endpoint.model!r}; there are {there}"))

    async def close(self) -> None:
        """Close its connections; they are opened again when it is asked."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def score(self, sample: Sample) -> Score:
        """The verdict on one response, with what the judge wrote.

        Raises:
            ValueError: its answers have no verdict, or it refuses this request.
            RewardOutageError: it does not answer, or too few of its answers have a verdict.
        """
        messages, end = chat_messages(self._template, self._spec, sample), time.monotonic() + self._spec.timeout_seconds
        body = {
            "model": self._endpoint.model,
            "messages": messages,
            "max_tokens": self._spec.max_tokens,
            "temperature": self._spec.temperature,
        }
        lacking = ""
        for count in range(TRIES):
            seed = seed_of(self._seed, self._spec.name, sample["key"], count)
            content, finish = await self._until("POST", "chat/completions", body | {"seed": seed}, _completion, end)
            text = self._without_key(content)
            # A search may take seconds, and other requests are under way.
            verdict = await asyncio.to_thread(self._verdicts.read, text, cut=finish == "length")
            if isinstance(verdict, float):
                self._lacking.count(False)
                return Score(verdict, {}, text)
            lacking = f"{verdict}: {self._shown(text)!r}"
        self._lacking.count(True)
        if (many := self._lacking.too_many()) is not None:
            raise RewardOutageError(f"{self._name}: {many}; the last: {lacking}")
        raise ValueError(f"{self._name}: {lacking}")

    # --- inside -------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return f"judge {self._spec.name} ({self._endpoint.url})"

    def _refused(self, text: str) -> str:
        return f"reward.name: judge {self._spec.name}: {text}"

    async def _until(
        self, method: str, path: str, body: Mapping[str, object] | None, read: _Read[Answer], end: float
    ) -> Answer:
        """The answer to a request as `read` has it, sent again until `end` (`time.monotonic()`) where that may help.

        Raises:
            RewardOutageError: there is none, or the server refuses the sender.
            ValueError: the server refuses this request.
        """
        from aiohttp import ClientError

        begun, pause, sent, last = time.monotonic(), _FIRST_PAUSE, 0, "none was sent"
        while (left := end - time.monotonic()) > 0:
            sent += 1
            after = 0.0
            try:
                async with asyncio.timeout(min(self._spec.request_seconds, left)):
                    return await self._request(method, path, body, read)
            except _Transient as error:
                last, after = str(error), error.after
            except TimeoutError:
                last = f"no answer within {min(self._spec.request_seconds, left):.3g} s"
            except _RefusedError:
                raise
            except (ClientError, OSError) as error:
                last = self._shown(f"{type(error).__name__}: {error}")
            except ValueError as error:
                # No sample is at fault: a proxy of the environment that is none, for example.
                raise RewardOutageError(f"{self._name}: it cannot be asked: {self._shown(str(error))}") from None
            wanted = max(after, pause * random.uniform(0.5, 1.0))
            await asyncio.sleep(max(0.0, min(wanted, end - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise RewardOutageError(
            f"{self._name}: no answer to {how_many(sent, 'request')} in {time.monotonic() - begun:.3g} s; "
            f"the last: {last}"
        )

    async def _request(self, method: str, path: str, body: Mapping[str, object] | None, read: _Read[Answer]) -> Answer:
        url = f"{self._endpoint.url.rstrip('/')}/{path}"
        async with self._opened().request(method, url, json=body, allow_redirects=False) as response:
            content = await _bounded(response)
            status, after = response.status, response.headers.get("Retry-After", "")
        said = self._shown(content.decode(errors="replace"))
        if status == 200:
            try:
                answer = json.loads(content)
            except (ValueError, RecursionError):
                raise _Transient(f"an answer that is no JSON: {said}") from None
            if isinstance(answer, dict) and (found := read(answer)) is not None:
                return found
            raise _Transient(f"an answer that is no chat completion: {said}")
        if status in TRANSIENT or status >= 500:
            raise _Transient(f"HTTP {status}: {said}", retry_after(after))
        if 300 <= status < 400 or (status in _MISPLACED and not (method == "GET" and status in (404, 405))):
            hint = "; endpoint.keyVariable names its key" if status in (401, 403) else ""
            raise RewardOutageError(f"{self._name}: {method} {path} gave HTTP {status}: {said}{hint}")
        raise _RefusedError(f"{self._name}: {method} {path} gave HTTP {status}: {said}")

    def _opened(self) -> ClientSession:
        if self._session is None:
            headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
            self._session = open_session(self._spec.concurrency, headers)
        return self._session

    def _without_key(self, text: str) -> str:
        return text if self._key is None else text.replace(self._key, "***")

    def _shown(self, text: str) -> str:
        """A server's text as an error quotes it: in one line, short, without the key that it was sent."""
        whole = self._without_key(text)
        return safe_text.visible_line(whole if len(whole) <= _QUOTED else f"{whole[:_QUOTED]} ...")


async def _bounded(response: ClientResponse) -> bytes:
    """The body; _Transient where it has more than 1 MiB."""
    content = bytearray()
    async for chunk in response.content.iter_chunked(65536):
        content += chunk
        if len(content) > _BODY_BYTES:
            raise _Transient(f"HTTP {response.status} with more than {_BODY_BYTES} bytes")
    return bytes(content)


def _completion(answer: Mapping[str, object]) -> tuple[str, object] | None:
    """Text and reason of the end of a chat completion, or None; a model that only thought has no text."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        return None
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else "", choice.get("finish_reason")
