"""HTTP servers that answer whoever has the token, and no page of a stranger."""

from __future__ import annotations

import hmac
import json
import logging
import socket
import socketserver
import sys
from collections.abc import Collection, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from rljob_worker.host.sockets import is_local_name

logger = logging.getLogger(__name__)

_SOCKET_SECONDS = 10.0
_LARGEST_BODY = 1 << 16


class GuardedServer(ThreadingHTTPServer):
    """Listens, and gives each connection a thread of its own.

    Args:
        address: host and port; port 0 picks a free one.
        handler: of each request.
        token: that a request must bring.

    Raises:
        OSError, OverflowError: the address cannot be listened on.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[GuardedHandler], token: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.token = token
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind, and name the server by its address."""
        # HTTPServer would ask DNS for the host's name here, which can take longer than the job's start-up.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def local(self) -> bool:
        """Whether only processes of this machine can reach it."""
        return ip_address(self.server_name).is_loopback

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a request that failed; a connection that ended early is nothing to speak of."""
        if isinstance(sys.exception(), OSError):
            logger.debug("connection from %s ended early", client_address)
        else:
            logger.exception("request from %s failed", client_address)


class GuardedHandler(BaseHTTPRequestHandler):
    """Checks a request before it is served: where it was sent, from which page, and with which token.

    A request in whose `Host` is a name that is not this machine's (where only this machine can reach the server), or
    that a page of another origin sent, is refused: a browser must not carry strangers' requests to the loopback
    address.
    """

    token_headers: ClassVar[Collection[str]] = ("Authorization",)
    """Headers of which one has the token."""
    routes: ClassVar[Mapping[str, str]]
    """Path -> its method."""
    without_token: ClassVar[Collection[str]] = ()
    """Paths that anyone may ask for."""
    token_in_query: ClassVar[Collection[str]] = ()
    """Paths whose token may stand in the address, as `?token=`: a browser sends no header with a page's address."""
    server: GuardedServer
    timeout = _SOCKET_SECONDS
    protocol_version = "HTTP/1.1"

    def serve(self, path: str, query: str) -> None:
        """Answer a request that was let through."""
        raise NotImplementedError

    def do_GET(self) -> None:
        """Answer a GET request."""
        self._respond("GET")

    def do_POST(self) -> None:
        """Answer a POST request."""
        self._respond("POST")

    def _respond(self, method: str) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError as error:
            self.refuse(HTTPStatus.BAD_REQUEST, f"not an address: {error}")
            return
        if not self._body_skipped() or not self._meant_for_us() or not self._allowed(url.path, url.query):
            return
        if url.path not in self.routes:
            self.refuse(HTTPStatus.NOT_FOUND, f"no such path: {url.path}; there are {', '.join(self.routes)}")
        elif self.routes[url.path] != method:
            self.refuse(HTTPStatus.METHOD_NOT_ALLOWED, f"{url.path} takes {self.routes[url.path]}, not {method}")
        else:
            try:
                self.serve(url.path, url.query)
            except OSError:
                raise
            except Exception:
                logger.exception("%s failed", self.path)
                self.refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed to answer; its log says why")

    def _body_skipped(self) -> bool:
        """Read a body that nobody asked for: what stays unread would be taken for the next request."""
        given = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (given.isascii() and given.isdigit()):
            self.refuse(HTTPStatus.BAD_REQUEST, "a body needs a Content-Length that is a whole number")
            return False
        if len(given) > 9 or int(given) > _LARGEST_BODY:
            self.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body may have {_LARGEST_BODY} bytes")
            return False
        self.rfile.read(int(given))
        return True

    def _meant_for_us(self) -> bool:
        host, origin = self.headers.get("Host"), self.headers.get("Origin")
        if host is not None and self.server.local and not is_local_name(host):
            self.refuse(HTTPStatus.MISDIRECTED_REQUEST, f"Host: {host[:80]!r} is not localhost or 127.0.0.1")
            return False
        if origin is not None and origin != f"http://{host}":
            self.refuse(HTTPStatus.FORBIDDEN, f"Origin: {origin[:80]!r}: pages of others are not answered")
            return False
        return True

    def _allowed(self, path: str, query: str) -> bool:
        if path in self.without_token or any(map(self._right, self._tokens(path, query))):
            return True
        self.refuse(HTTPStatus.UNAUTHORIZED, "a bearer token is needed")
        return False

    def _tokens(self, path: str, query: str) -> Iterator[str]:
        if path in self.token_in_query:
            yield from parse_qs(query).get("token", [])
        for header in self.token_headers:
            scheme, _, given = self.headers.get(header, "").partition(" ")
            if scheme.lower() == "bearer":
                yield given.strip()

    def _right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self.server.token.encode())

    def refuse(self, status: HTTPStatus, message: str) -> None:
        """An error; the connection ends with it, since it is not known what else was sent on it."""
        self.close_connection = True
        self.answer({"error": message}, status)

    def answer(self, content: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        """Send JSON."""
        self.send(json.dumps(content).encode(), "application/json", status)

    def send(
        self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send an answer.

        Args:
            body: of the answer.
            kind: its Content-Type.
            status: of the answer.
            headers: further ones.
        """
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line in a log."""
