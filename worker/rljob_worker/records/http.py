"""The driver's HTTP endpoint: status, step records, probes and metrics."""

from __future__ import annotations

import hmac
import json
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rljob_worker.records.steps import StepLog

_PAGE = 1000
_OPEN_PATHS = ("/healthz", "/readyz")
_SOCKET_SECONDS = 10.0


class DriverServer:
    """Serves one run over HTTP from threads of its own.

    `GET /v1/status`, `GET /v1/steps?after=INDEX` (records whose `index` is above INDEX, at most 1000 a request),
    `GET /healthz`, `GET /readyz`, `GET /metrics`, `POST /v1/checkpoint` (one at the next step boundary).
    With a token, all but the two probes ask for `Authorization: Bearer TOKEN`.

    Args:
        log: the step records.
        status: content of `/v1/status`; its `ready` decides `/readyz`.
        metrics: content of `/metrics`.
        request_checkpoint: called by `POST /v1/checkpoint`.
        host: address to listen on.
        port: 0 picks a free one.
        token: bearer token, or None for none.
        address_file: where the chosen address is written, as `{"host": ..., "port": ...}`.
    """

    def __init__(
        self,
        log: StepLog,
        *,
        status: Callable[[], dict[str, Any]],
        metrics: Callable[[], bytes],
        request_checkpoint: Callable[[], None],
        host: str,
        port: int,
        token: str | None,
        address_file: Path,
    ) -> None:
        self.log = log
        self.status = status
        self.metrics = metrics
        self.request_checkpoint = request_checkpoint
        self.token = token
        self.last_read = -1
        self._server = ThreadingHTTPServer((host, port), _handler(self))
        self._server.daemon_threads = True
        self._address_file = address_file
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Begin to serve and write the address file."""
        self._thread.start()
        host = str(self._server.server_address[0])
        self._address_file.write_text(json.dumps({"host": host, "port": self.port}))

    def linger(self, seconds: float) -> bool:
        """Wait until the last record was read over HTTP, at most so long; tells whether it was."""
        deadline = time.monotonic() + seconds
        while self.last_read < len(self.log) - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.last_read >= len(self.log) - 1

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._address_file.unlink(missing_ok=True)


def _handler(server: DriverServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _SOCKET_SECONDS
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if not self._allowed(url.path):
                return
            if url.path == "/healthz":
                self._answer({"ok": True})
            elif url.path == "/readyz":
                ready = bool(server.status()["ready"])
                self._answer({"ready": ready}, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)
            elif url.path == "/v1/status":
                self._answer(server.status())
            elif url.path == "/v1/steps":
                self._steps(url.query)
            elif url.path == "/metrics":
                self._send(server.metrics(), "text/plain; version=0.0.4; charset=utf-8", HTTPStatus.OK)
            else:
                self._answer({"error": f"no such path: {url.path}"}, HTTPStatus.NOT_FOUND)

        def do_POST(self) -> None:
            # The body has no meaning here, but the connection is only usable again once it was read.
            self.rfile.read(min(int(self.headers.get("Content-Length") or 0), 1 << 16))
            path = urlsplit(self.path).path
            if not self._allowed(path):
                return
            if path == "/v1/checkpoint":
                server.request_checkpoint()
                self._answer({"accepted": True}, HTTPStatus.ACCEPTED)
            else:
                self._answer({"error": f"no such path: {path}"}, HTTPStatus.NOT_FOUND)

        def _steps(self, query: str) -> None:
            given = parse_qs(query).get("after", ["-1"])[0]
            try:
                after = max(int(given), -1)
            except ValueError:
                message = f"after: {given!r} is not a whole number"
                self._answer({"error": message}, HTTPStatus.BAD_REQUEST)
                return
            records = server.log.after(after)[:_PAGE]
            self._answer({"steps": records, "total": len(server.log)})
            if records:
                server.last_read = max(server.last_read, records[-1]["index"])

        def _allowed(self, path: str) -> bool:
            if server.token is None or path in _OPEN_PATHS:
                return True
            given = self.headers.get("Authorization", "")
            if hmac.compare_digest(given.encode(), f"Bearer {server.token}".encode()):
                return True
            self._answer({"error": "a bearer token is needed"}, HTTPStatus.UNAUTHORIZED)
            return False

        def _answer(self, content: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
            self._send(json.dumps(content).encode(), "application/json", status)

        def _send(self, body: bytes, kind: str, status: HTTPStatus) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if status is HTTPStatus.UNAUTHORIZED:
                self.send_header("WWW-Authenticate", "Bearer")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not worth a line in the driver's log."""

    return Handler
