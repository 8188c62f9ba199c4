"""The driver's HTTP endpoint: status, step records, probes and metrics."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

from rljob_api.wire import names
from rljob_api.wire.driver_status import DriverStatus
from rljob_api.wire.run_status import DriverAddress
from rljob_api.wire.steps_page import PAGE, PAGE_BYTES, page_text
from rljob_worker.errors import JobError, UserError
from rljob_worker.host.files import read_text, write_whole
from rljob_worker.host.guarded_http import GuardedHandler, GuardedServer
from rljob_worker.host.sealed_json import sealed
from rljob_worker.records.profile_request import BusyError, ProfileRequest, parse_request
from rljob_worker.records.steps import StepLog

logger = logging.getLogger(__name__)

_ROUTES = {
    names.HEALTH_PATH: "GET",
    names.READY_PATH: "GET",
    names.STATUS_PATH: "GET",
    names.STEPS_PATH: "GET",
    names.METRICS_PATH: "GET",
    names.CHECKPOINT_PATH: "POST",
    names.ENGINE_NODES_PATH: "POST",
    names.PROFILE_PATH: "POST",
    names.TRACE_PATH: "GET",
}
_PROBES = (names.HEALTH_PATH, names.READY_PATH)
_POLL_SECONDS = 0.05


class DriverServer:
    """Serves one run over HTTP, each connection from a thread of its own.

    `GET /v1/status`, `GET /v1/steps?after=INDEX` (records whose `index` is above INDEX, as `{"steps": [...],
    "total": N}`; an answer ends with the record that takes it past 2 MiB, and has at most 1000), `GET /healthz`,
    `GET /readyz`, `GET /metrics`, `POST /v1/checkpoint` (one at the next step boundary),
    `POST /v1/engine-nodes?wanted=N` (so many nodes with engines; 409 where the job does not allow it),
    `POST /v1/profile?steps=FIRST-LAST&ranks=0,1&engines=0&stacks=false&maxMebibytes=512` (only `steps` must be there;
    409 while another profile is not done), `GET /v1/trace` (as `rljob trace` writes it, packed; 409 while one is made).
    All but the two probes ask for `Authorization: Bearer TOKEN`, or the same in `X-RLJob-Authorization`. A request in
    whose `Host` is a name that is not this machine's, or that a page of another origin sent, is refused: a browser
    must not carry strangers' requests to the loopback address.
    `linger` does not count what was read with the header `X-RLJob-Peek`.

    Args:
        log: the step records.
        status: content of `/v1/status`; its `ready` decides `/readyz`.
        metrics: content of `/metrics`.
        request_checkpoint: called by `POST /v1/checkpoint`.
        want_engine_nodes: called by `POST /v1/engine-nodes`; may raise UserError.
        request_profile: called by `POST /v1/profile`; may raise UserError, and BusyError.
        trace: content of `/v1/trace`; may raise UserError where one is made for another request, and JobError.
        host: address to listen on.
        port: 0 picks a free one.
        token: bearer token; None: one is made, and lies in `token_file` while the server runs.
        address_file: where the chosen address is written, as `{"host": ..., "port": ...}` with a checksum.
        token_file: for a token that is made here; its owner alone can read it.

    Raises:
        UserError: the address cannot be listened on, or the token is empty.
    """

    def __init__(
        self,
        log: StepLog,
        *,
        status: Callable[[], DriverStatus],
        metrics: Callable[[], bytes],
        request_checkpoint: Callable[[], None],
        want_engine_nodes: Callable[[int], None],
        request_profile: Callable[[ProfileRequest], None],
        trace: Callable[[], bytes],
        host: str,
        port: int,
        token: str | None,
        address_file: Path,
        token_file: Path,
    ) -> None:
        if token is not None and not token.strip():
            raise UserError("the bearer token of the HTTP endpoint is set but empty; set it to a value or unset it")
        self.log = log
        self.status = status
        self.metrics = metrics
        self.request_checkpoint = request_checkpoint
        self.want_engine_nodes = want_engine_nodes
        self.request_profile = request_profile
        self.trace = trace
        self.token = secrets.token_hex(32) if token is None else token.strip()
        self.last_read = -1
        try:
            self._server = _Server((host, port), self)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"spec.records.httpHost {host}, spec.records.httpPort {port}: cannot listen there: {error}; "
                "port 0 picks a free one"
            ) from None
        self.local = self._server.local
        """Whether only processes of this machine can reach it."""
        self._address_file = address_file
        self._token_file = token_file if token is None else None
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="http", daemon=True
        )

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._server.server_port

    def start(self) -> None:
        """Begin to serve and write token and address; OSError where only these files could not be written."""
        self._thread.start()
        if self._token_file is not None:
            write_whole(self._token_file, self.token, private=True)
        write_whole(self._address_file, self._address())

    def _address(self) -> str:
        return sealed(DriverAddress(str(self._server.server_address[0]), self.port).to_json())

    def linger(self, seconds: float) -> bool:
        """Wait until the last record was read over HTTP, at most so long; tells whether it was."""
        deadline = time.monotonic() + seconds
        while self.last_read < len(self.log) - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self.last_read >= len(self.log) - 1

    def close(self) -> None:
        """Stop serving, and take the files away unless they are those of a driver that came after this one."""
        if self._thread.is_alive():
            self._server.shutdown()
        address = self._address()
        self._server.server_close()
        _remove_if(self._address_file, address)
        if self._token_file is not None:
            _remove_if(self._token_file, self.token)


def _remove_if(file: Path, content: str) -> None:
    with suppress(OSError):
        if read_text(file) == content:
            file.unlink()


def _first_of(lines: Sequence[str]) -> Sequence[str]:
    """The first records, up to the one that takes the answer to `PAGE_BYTES`: never none where there is one."""
    size = 0
    for count, line in enumerate(lines, start=1):
        size += len(line)
        if size >= PAGE_BYTES:
            return lines[:count]
    return lines


class _Server(GuardedServer):
    def __init__(self, address: tuple[str, int], driver: DriverServer) -> None:
        super().__init__(address, _Handler, driver.token)
        self.driver = driver


class _Handler(GuardedHandler):
    server: _Server
    token_headers = names.TOKEN_HEADERS
    routes = _ROUTES
    without_token = _PROBES

    def serve(self, path: str, query: str) -> None:
        """Answer one of the routes."""
        driver = self.server.driver
        if path == names.HEALTH_PATH:
            self.answer({"ok": True})
        elif path == names.READY_PATH:
            ready = driver.status().ready
            self.answer({"ready": ready}, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)
        elif path == names.STATUS_PATH:
            self.answer(driver.status().to_json())
        elif path == names.STEPS_PATH:
            self._steps(query)
        elif path == names.METRICS_PATH:
            self.send(driver.metrics(), "text/plain; version=0.0.4; charset=utf-8", HTTPStatus.OK)
        elif path == names.ENGINE_NODES_PATH:
            self._engine_nodes(query)
        elif path == names.PROFILE_PATH:
            self._profile(query)
        elif path == names.TRACE_PATH:
            self._trace()
        else:
            driver.request_checkpoint()
            self.answer({"accepted": True}, HTTPStatus.ACCEPTED)

    def _engine_nodes(self, query: str) -> None:
        wanted = self._whole(query, "wanted", "")
        if wanted is None:
            return
        try:
            self.server.driver.want_engine_nodes(wanted)
        except UserError as error:
            self.refuse(HTTPStatus.CONFLICT, str(error))
        else:
            self.answer({"accepted": True}, HTTPStatus.ACCEPTED)

    def _trace(self) -> None:
        try:
            self.send(self.server.driver.trace(), "application/gzip", HTTPStatus.OK)
        except UserError as error:
            self.refuse(HTTPStatus.CONFLICT, str(error))
        except JobError as error:
            self.refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    def _profile(self, query: str) -> None:
        try:
            self.server.driver.request_profile(parse_request(parse_qs(query, keep_blank_values=True)))
        except BusyError as error:
            self.refuse(HTTPStatus.CONFLICT, str(error))
        except UserError as error:
            self.refuse(HTTPStatus.BAD_REQUEST, str(error))
        else:
            self.answer({"accepted": True}, HTTPStatus.ACCEPTED)

    def _whole(self, query: str, name: str, default: str) -> int | None:
        """A number of the query; None: it was refused."""
        given = parse_qs(query, keep_blank_values=True).get(name, [default])[-1]
        try:
            return int(given)
        except ValueError:
            self.refuse(HTTPStatus.BAD_REQUEST, f"{name}: {given[:80]!r} is not a whole number")
            return None

    def _steps(self, query: str) -> None:
        after = self._whole(query, "after", "-1")
        if after is None:
            return
        driver = self.server.driver
        lines = _first_of(driver.log.after(after)[:PAGE])
        self.send(page_text(lines, len(driver.log)).encode(), "application/json", HTTPStatus.OK)
        if lines and names.PEEK_HEADER not in self.headers:
            driver.last_read = max(driver.last_read, max(after, -1) + len(lines))
