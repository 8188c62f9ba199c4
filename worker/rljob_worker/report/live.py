"""A report that follows its run: a page on this machine's loopback address."""

from __future__ import annotations

import json
import secrets
import tempfile
import threading
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

from rljob_api.wire import names
from rljob_worker.errors import UserError
from rljob_worker.host.guarded_http import GuardedHandler, GuardedServer
from rljob_worker.records.steps import StepLog
from rljob_worker.report.build import Run, live_page, page_data
from rljob_worker.report.page_data import sample_rows, sample_steps
from rljob_worker.report.trace import TRACE_FILE, build_trace

_PAGE, _RUN, _SAMPLES, _TRACE = "/", "/run.json", "/samples.json", f"/{TRACE_FILE}"
_HOST = "127.0.0.1"
_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


class LiveReport:
    """Serves the report of a run that may still go on, to each client that has the address with its token.

    `GET /?token=TOKEN` is the page, `GET /run.json` its curves (304 where nothing was added since `If-None-Match`),
    `GET /samples.json?step=N` the samples of a step; these two take `Authorization: Bearer TOKEN`.
    `GET /trace.json.gz?token=TOKEN` is the trace of the run so far.

    Args:
        folder: of the run.
        beside: folder of another run, whose curves are drawn in the same charts.
        port: 0 picks a free one.

    Raises:
        UserError: not a run folder, no step was finished yet, or the port cannot be listened on.
    """

    def __init__(self, folder: Path, beside: Path | None = None, port: int = 0) -> None:
        self._folders = [folder, *([beside] if beside is not None else [])]
        self._lock, self._tracing = threading.Lock(), threading.Lock()
        self._read: tuple[str, list[Run]] | None = None
        self.runs()
        token = secrets.token_urlsafe(32)
        try:
            self._server = GuardedServer((_HOST, port), _handler(self), token)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"--port {port}: cannot listen there: {str(error).rstrip('.')}; 0 picks a free one"
            ) from None
        self.address = f"http://{_HOST}:{self._server.server_port}/?token={token}"

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self._folders[0]

    def runs(self) -> tuple[str, Sequence[Run]]:
        """The runs as their records say now, and the version of these."""
        with self._lock:
            version = "-".join(map(_version, self._folders))
            if self._read is None or self._read[0] != version:
                self._read = version, [Run.read(folder) for folder in self._folders]
            return self._read

    def trace(self) -> bytes:
        """The trace of the run so far, packed; UserError where nothing has happened yet. One at a time is made."""
        with self._tracing, tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / TRACE_FILE
            build_trace(self.folder, file)
            return file.read_bytes()

    def serve(self) -> None:
        """Answer until interrupted."""
        with self._server:
            self._server.serve_forever(0.2)

    def close(self) -> None:
        """End `serve` in another thread."""
        self._server.shutdown()


def _version(folder: Path) -> str:
    try:
        state = (folder / StepLog.FILE).stat()
    except OSError:
        return "none"
    return f"{state.st_ino}.{state.st_size}.{state.st_mtime_ns}"


def _handler(report: LiveReport) -> type[GuardedHandler]:
    class Handler(GuardedHandler):
        token_headers = names.TOKEN_HEADERS
        routes = {_PAGE: "GET", _RUN: "GET", _SAMPLES: "GET", _TRACE: "GET"}
        token_in_query = (_PAGE, _TRACE)

        def serve(self, path: str, query: str) -> None:
            try:
                if path == _PAGE:
                    version, runs = report.runs()
                    self.send(live_page(runs, version).encode(), "text/html; charset=utf-8", headers=_HEADERS)
                elif path == _RUN:
                    self._run()
                elif path == _TRACE:
                    self.send(report.trace(), "application/gzip", headers=_HEADERS)
                else:
                    self._samples(query)
            except UserError as error:
                self.refuse(HTTPStatus.NOT_FOUND, str(error))

        def _run(self) -> None:
            version, runs = report.runs()
            headers = _HEADERS | {"ETag": version}
            if self.headers.get("If-None-Match") == version:
                self.send(b"", "application/json", HTTPStatus.NOT_MODIFIED, headers)
                return
            content = {**page_data(runs), "samples": sample_steps(report.folder)}
            self.send(json.dumps(content).encode(), "application/json", headers=headers)

        def _samples(self, query: str) -> None:
            given = parse_qs(query).get("step", [""])[-1]
            if not (given.isascii() and given.isdigit() and len(given) < 10):
                self.refuse(HTTPStatus.BAD_REQUEST, f"step: {given[:80]!r} is not a step")
                return
            self.send(json.dumps(sample_rows(report.folder, int(given))).encode(), "application/json", headers=_HEADERS)

    return Handler
