"""A hub that does not answer, or in whose place something else does: the real client libraries, and sockets."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from rljob_api.spec import DataSource, Hub
from rljob_worker.data import hub_answers
from rljob_worker.data.hub import push_folder, snapshot
from rljob_worker.data.sources import load_source
from rljob_worker.errors import JobError, UserError


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def put(monkeypatch: pytest.MonkeyPatch, port: int) -> str:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    return f"127.0.0.1:{port} (HF_ENDPOINT)"


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Takes connections and never answers."""
    monkeypatch.setattr(hub_answers, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield put(monkeypatch, server.getsockname()[1])


@contextmanager
def answering(
    monkeypatch: pytest.MonkeyPatch, status: int, kind: str, body: bytes, location: str = "", token: str = ""
) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            moved = location and self.path != location
            if token and self.headers.get("Authorization") != f"Bearer {token}":
                return self.send_error(401, "log in")
            self.send_response(302 if moved else status)
            if moved:
                self.send_header("Location", location)
            if kind:
                self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield put(monkeypatch, server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


def wrong(model: str = "someone/no-such-model") -> str:
    with pytest.raises(JobError) as error:
        snapshot(model, Hub.HUGGING_FACE, "spec.model")
    return str(error.value)


def test_a_silent_hub_is_named_at_its_deadline(silent: str, tmp_path: Path) -> None:
    expected = f"is not a local path, and fetching it failed: the hub {silent} did not answer within 0.5 s"
    assert wrong() == f"spec.model.path: 'someone/no-such-model' {expected}"
    with pytest.raises(JobError) as error:
        load_source(DataSource(path="someone/no-such-data"), "spec.data")
    assert str(error.value) == f"spec.data.path: 'someone/no-such-data' {expected}"
    with pytest.raises(JobError, match=rf"--push-to: .* the hub {re.escape(silent)} .*(did not answer|timed out)"):
        push_folder(tmp_path, "org/model", "step 1", private=True)


def test_a_hub_that_sends_a_byte_now_and_then_ends_at_the_deadline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_answers, "ANSWER_SECONDS", 0.5)
    ended = threading.Event()

    def trickle(server: socket.socket) -> None:
        taken, _ = server.accept()
        with taken:
            while not ended.wait(0.1):
                taken.send(b"H")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=trickle, args=(server,), daemon=True)
        thread.start()
        place = put(monkeypatch, server.getsockname()[1])
        try:
            assert f"the hub {place} " in wrong()
        finally:
            ended.set()
            thread.join(20)


def test_a_hub_that_cannot_be_reached_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    place = put(monkeypatch, 1)
    assert f"the hub {place} cannot be reached: " in wrong()
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    assert "the hub hub.invalid (HF_ENDPOINT) cannot be reached: " in wrong()


@pytest.mark.parametrize(
    ("status", "kind", "location"),
    [
        (200, "text/html; charset=utf-8", ""),
        (200, "text/html", "/login?back=/"),
        (503, "text/html", ""),
        (200, "text/plain", ""),
        (200, "", ""),
    ],
)
def test_a_page_in_the_hubs_place_is_named(
    monkeypatch: pytest.MonkeyPatch, status: int, kind: str, location: str
) -> None:
    with answering(monkeypatch, status, kind, b"<html>Please log in</html>", location) as place:
        said = wrong()
    assert f"in the place of the hub {place} is" in said
    assert f"(HTTP {status}), not the hub: a login page" in said


def test_a_hub_that_answers_once_and_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client has no deadline of its own for the call that it begins with."""
    monkeypatch.setattr(hub_answers, "STALL_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = put(monkeypatch, server.getsockname()[1])
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(hub_answers, "check_answers", lambda *arguments: None)
        said = wrong()
    assert "ReadTimeout" in said
    assert place in said


@pytest.mark.parametrize("kind", ["application/json", "text/html"])
def test_what_the_hub_itself_refuses_is_the_clients_to_say(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with answering(monkeypatch, 404, kind, b'{"error": "Repository not found"}'):
        hub_answers.check_answers(Hub.HUGGING_FACE, "a/b", "models", "it")


def test_what_was_fetched_before_is_used_with_a_word(
    silent: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "models--someone--small" / "snapshots" / ("a" * 40)
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    (tmp_path / "models--someone--small" / "refs").mkdir()
    (tmp_path / "models--someone--small" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert snapshot("someone/small", Hub.HUGGING_FACE, "spec.model") == kept
    assert "what was fetched before is used" in caplog.text


def test_a_private_hub_is_asked_with_the_token_of_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "the-token")
    with answering(monkeypatch, 200, "text/plain", b' {"id": "a/b"}', token="the-token"):
        hub_answers.check_answers(Hub.HUGGING_FACE, "a/b", "models", "it")


def test_a_client_that_is_told_to_ask_no_hub_asks_none(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises((JobError, UserError)) as error:
        snapshot("someone/no-such-model", Hub.HUGGING_FACE, "spec.model")
    assert "did not answer" not in str(error.value)
