"""The driver's HTTP endpoint: status, step records, probes and metrics."""

from __future__ import annotations

import hmac
import json
import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rljob_worker.errors import UserError
from rljob_worker.records.run_files import write_whole
from rljob_worker.records.steps import StepLog

logger = logging.getLogger(__name__)

PAGE = 1000
"""Records in one answer at most."""
PAGE_BYTES = 1 << 21
"""Size at which an answer ends: a record of 64 devices has some 60 kB, and the operator reads small answers only
(`rljob_operator.ray.driver`), each within a deadline."""
_ROUTES = {
    "/healthz": "GET",
    "/readyz": "GET",
    "/v1/status": "GET",
    "/v1/steps": "GET",
    "/metrics": "GET",
    "/v1/checkpoint": "POST",
}
_PROBES = ("/healthz", "/readyz")
_TOKEN_HEADERS = ("Authorization", "X-RLJob-Authorization")
"""The second is for who comes through the API server's proxy, which keeps the first for itself; so does Ray with
`X-Ray-Authorization`."""
_PEEK_HEADER = "X-RLJob-Peek"
_SOCKET_SECONDS = 10.0
_LARGEST_BODY = 1 << 16
_POLL_SECONDS = 0.05


class DriverServer:
    """Serves one run over HTTP, each connection from a thread of its own.

    `GET /v1/status`, `GET /v1/steps?after=INDEX` (records whose `index` is above INDEX, as `{"steps": [...],
    "total": N}`; an answer ends with the record that takes it past 2 MiB, and has at most 1000), `GET /healthz`,
    `GET /readyz`, `GET /metrics`, `POST /v1/checkpoint` (one at the next step boundary). With a token, all but the two
    probes ask for `Authorization: Bearer TOKEN`, or the same in `X-RLJob-Authorization`. `linger` does not count what
    was read with the header `X-RLJob-Peek`.

    Args:
        log: the step records.
        status: content of `/v1/status`; its `ready` decides `/readyz`.
        metrics: content of `/metrics`.
        request_checkpoint: called by `POST /v1/checkpoint`.
        host: address to listen on.
        port: 0 picks a free one.
        token: bearer token, or None for none.
        address_file: where the chosen address is written, as `{"host": ..., "port": ...}`.

    Raises:
        UserError: the address cannot be listened on, or the token is empty.
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
        if token is not None and not token.strip():
            raise UserError("the bearer token of the HTTP endpoint is set but empty; set it to a value or unset it")
        self.log = log
        self.status = status
        self.metrics = metrics
        self.request_checkpoint = request_checkpoint
        self.token = None if token is None else token.strip()
        self.last_read = -1
        try:
            self._server = _Server((host, port), _handler(self))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"spec.records.httpHost {host}, spec.records.httpPort {port}: cannot listen there: {error}; "
                "port 0 picks a free one"
            ) from None
        self._address_file = address_file
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="http", daemon=True
        )

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Begin to serve and write the address file."""
        self._thread.start()
        write_whole(self._address_file, json.dumps({"host": str(self._server.server_address[0]), "port": self.port}))

    def linger(self, seconds: float) -> bool:
        """Wait until the last record was read over HTTP, at most so long; tells whether it was."""
        deadline = time.monotonic() + seconds
        while self.last_read < len(self.log) - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self.last_read >= len(self.log) - 1

    def close(self) -> None:
        """Stop serving."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
        self._address_file.unlink(missing_ok=True)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer would ask DNS for the host's name here, which can take longer than the job's start-up.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        if isinstance(sys.exception(), OSError):
            logger.debug("connection from %s ended early", client_address)
        else:
            logger.exception("request from %s failed", client_address)


def _first_of(records: Iterable[dict[str, Any]]) -> list[str]:
    """The first records as JSON, up to the one that takes the answer to `PAGE_BYTES`: never none where there is one."""
    texts: list[str] = []
    size = 0
    for record in records:
        texts.append(json.dumps(record))
        size += len(texts[-1])
        if size >= PAGE_BYTES:
            break
    return texts


def _handler(server: DriverServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _SOCKET_SECONDS
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._respond("GET")

        def do_POST(self) -> None:
            self._respond("POST")

        def _respond(self, method: str) -> None:
            try:
                url = urlsplit(self.path)
            except ValueError as error:
                self._refuse(HTTPStatus.BAD_REQUEST, f"not an address: {error}")
                return
            if not self._body_skipped() or not self._allowed(url.path):
                return
            if url.path not in _ROUTES:
                self._refuse(HTTPStatus.NOT_FOUND, f"no such path: {url.path}; there are {', '.join(_ROUTES)}")
            elif _ROUTES[url.path] != method:
                self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, f"{url.path} takes {_ROUTES[url.path]}, not {method}")
            else:
                try:
                    self._serve(url.path, url.query)
                except OSError:
                    raise
                except Exception:
                    logger.exception("%s failed", self.path)
                    self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "the driver failed to answer; its log says why")

        def _serve(self, path: str, query: str) -> None:
            if path == "/healthz":
                self._answer({"ok": True})
            elif path == "/readyz":
                ready = bool(server.status()["ready"])
                self._answer({"ready": ready}, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)
            elif path == "/v1/status":
                self._answer(server.status())
            elif path == "/v1/steps":
                self._steps(query)
            elif path == "/metrics":
                self._send(server.metrics(), "text/plain; version=0.0.4; charset=utf-8", HTTPStatus.OK)
            else:
                server.request_checkpoint()
                self._answer({"accepted": True}, HTTPStatus.ACCEPTED)

        def _steps(self, query: str) -> None:
            given = parse_qs(query, keep_blank_values=True).get("after", ["-1"])[-1]
            try:
                after = int(given)
            except ValueError:
                self._refuse(HTTPStatus.BAD_REQUEST, f"after: {given[:80]!r} is not a whole number")
                return
            records = server.log.after(after)[:PAGE]
            texts = _first_of(records)
            body = f'{{"steps": [{", ".join(texts)}], "total": {len(server.log)}}}'
            self._send(body.encode(), "application/json", HTTPStatus.OK)
            if texts and _PEEK_HEADER not in self.headers:
                server.last_read = max(server.last_read, records[len(texts) - 1]["index"])

        def _body_skipped(self) -> bool:
            """Read a body that nobody asked for: what stays unread would be taken for the next request."""
            given = self.headers.get("Content-Length", "0")
            if "Transfer-Encoding" in self.headers or not (given.isascii() and given.isdigit()):
                self._refuse(HTTPStatus.BAD_REQUEST, "a body needs a Content-Length that is a whole number")
                return False
            if len(given) > 9 or int(given) > _LARGEST_BODY:
                self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body may have {_LARGEST_BODY} bytes")
                return False
            self.rfile.read(int(given))
            return True

        def _allowed(self, path: str) -> bool:
            if server.token is None or path in _PROBES:
                return True
            for header in _TOKEN_HEADERS:
                scheme, _, given = self.headers.get(header, "").partition(" ")
                right = hmac.compare_digest(given.strip().encode(), server.token.encode())
                if scheme.lower() == "bearer" and right:
                    return True
            self._refuse(HTTPStatus.UNAUTHORIZED, "a bearer token is needed")
            return False

        def _refuse(self, status: HTTPStatus, message: str) -> None:
            """An error; the connection ends with it, since it is not known what else was sent on it."""
            self.close_connection = True
            self._answer({"error": message}, status)

        def _answer(self, content: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
            self._send(json.dumps(content).encode(), "application/json", status)

        def _send(self, body: bytes, kind: str, status: HTTPStatus) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if status is HTTPStatus.UNAUTHORIZED:
                self.send_header("WWW-Authenticate", "Bearer")
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not worth a line in the driver's log."""

    return Handler
