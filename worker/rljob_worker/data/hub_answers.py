"""Whether a hub answers: asked once, with a deadline, before its client is, which waits or tries again for minutes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from rljob_api.spec import Hub
from rljob_worker.errors import JobError
from rljob_worker.waiting import waiting_for, within

ANSWER_SECONDS = 15.0
"""A hub that is there answers within a second or two."""
STALL_SECONDS = 30.0
"""Seconds that a hub may say nothing during a download."""
_BEGINNING = 1024
_NOT_FOUND = 404
"""The hub's client says of which repository; some mirrors answer with a page."""
Kind = Literal["models", "datasets"]


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    content: str
    """Its type."""
    is_json: bool
    url: str
    """After redirections."""


def check_answers(hub: Hub, name: str, kind: Kind, wrong: str) -> None:
    """Refuse a hub that does not answer, or in whose place something else does; none where its client asks none.

    Args:
        hub: which.
        name: of the repository.
        kind: of the repository.
        wrong: beginning of the message: what needs the hub.

    Raises:
        JobError: with the host, the variable that chose it, and what came instead; it may pass.
    """
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    if hub is Hub.HUGGING_FACE and constants.HF_HUB_OFFLINE:
        return
    address, place = _address(hub)[0], place_of(hub)
    # As the client would: a private hub shows its login page to those without a token.
    headers = build_hf_headers() if hub is Hub.HUGGING_FACE else {}
    try:
        with waiting_for(f"{hub.value}'s hub {place}", ANSWER_SECONDS):
            answer = within(ANSWER_SECONDS, lambda: _ask(f"{address}/{kind}/{name}", headers))
    except TimeoutError:
        raise JobError(f"{wrong}: the hub {place} did not answer within {ANSWER_SECONDS:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise JobError(f"{wrong}: the hub {place} cannot be reached: {error}") from error
    page = answer.content == "text/html" and answer.status != _NOT_FOUND
    if page or (answer.status == httpx.codes.OK and not answer.is_json):
        raise JobError(
            f"{wrong}: what answers in the place of the hub {place} is {answer.content or 'something'} from "
            f"{urlsplit(answer.url).netloc} (HTTP {answer.status}), not the hub: a login page, or a proxy's?"
        )


def place_of(hub: Hub) -> str:
    """A hub's host, and the variable that chooses it."""
    address, variable = _address(hub)
    return f"{urlsplit(address).netloc} ({variable})"


@contextmanager
def with_deadlines() -> Iterator[None]:
    """Inside, the Hugging Face client gives up on a hub that says nothing: by itself it has no deadline for most calls.

    Not for uploads, to which a hub may answer late.
    """
    import httpx
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    class Bounded(httpx.Client):
        def build_request(self, *arguments: Any, timeout: Any = None, **named: Any) -> httpx.Request:
            # Most calls of the hub's client ask for none.
            bound = STALL_SECONDS if timeout in (None, httpx.USE_CLIENT_DEFAULT) else timeout
            return super().build_request(*arguments, timeout=bound, **named)

    with default_client_factory() as usual:
        hooks = usual.event_hooks
    set_client_factory(lambda: Bounded(event_hooks=hooks, follow_redirects=True))
    try:
        yield
    finally:
        set_client_factory(default_client_factory)


def _ask(url: str, headers: Mapping[str, str]) -> _Answer:
    import httpx

    # Deadlines of each read too, so that what is left behind ends.
    with (
        httpx.Client(follow_redirects=True, timeout=ANSWER_SECONDS, headers=headers) as client,
        client.stream("GET", url) as answer,
    ):
        kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        begins = next(answer.iter_bytes(_BEGINNING), b"").lstrip()[:1]
        return _Answer(answer.status_code, kind, begins in (b"{", b"["), str(answer.url))


def _address(hub: Hub) -> tuple[str, str]:
    """Address of its API, and the variable that says so."""
    if hub is Hub.MODEL_SCOPE:
        domain = os.environ.get("MODELSCOPE_DOMAIN") or "www.modelscope.cn"
        return f"https://{domain}/api/v1", "MODELSCOPE_DOMAIN"
    from huggingface_hub import constants

    return f"{(os.environ.get('HF_ENDPOINT') or constants.ENDPOINT).rstrip('/')}/api", "HF_ENDPOINT"
