"""Requests to the driver that runs in a run folder on this machine."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

from rljob_api.wire.names import DRIVER_TOKEN_VARIABLE
from rljob_api.wire.run_status import ADDRESS_FILE, TOKEN_FILE
from rljob_worker.errors import JobError, UserError
from rljob_worker.host.files import read_file
from rljob_worker.host.sealed_json import unsealed

_SECONDS = 10.0
_HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Address that is listened on -> address that leads there."""


def ask_driver(folder: Path, path: str, method: str) -> None:
    """Ask the driver of a run folder; its address and token are read from there.

    Raises:
        UserError: no driver of it runs on this machine, or it refuses what was asked.
        JobError: it does not answer, or answers with another error.
    """
    # Slow to import, and every command imports this module.
    from urllib import error as url_error
    from urllib import request as url_request

    try:
        address = unsealed(read_file(folder / ADDRESS_FILE).decode())
        host, port = str(address["host"]), int(address["port"])
        token = os.environ.get(DRIVER_TOKEN_VARIABLE) or read_file(folder / TOKEN_FILE).decode("ascii").strip()
    except FileNotFoundError as error:
        raise UserError(
            f"{folder}: no driver of it runs on this machine: there is no {Path(error.filename).name}"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / ADDRESS_FILE}: not the address of a driver: {error}") from None
    host = _HERE.get(host, host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"
    request = url_request.Request(url, method=method, headers={"Authorization": f"Bearer {token}"})
    # A proxy of the shell's is not asked for this machine's own.
    opener = url_request.build_opener(url_request.ProxyHandler({}))
    try:
        opener.open(request, timeout=_SECONDS).close()
    except url_error.HTTPError as error:
        said = error.read(1000).decode(errors="replace")
        if error.code in (HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT):
            with suppress(ValueError, KeyError, TypeError):
                said = json.loads(said)["error"]
            raise UserError(f"{folder}: {said}") from None
        raise JobError(f"{folder}: the driver at {host}:{port} answers {error.code}: {said}") from None
    except OSError as error:
        raise JobError(f"{folder}: no driver answers at {host}:{port} ({error}); did it end?") from None
