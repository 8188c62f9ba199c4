"""A report that follows its run."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from record_cases import run_folder, write_run, write_samples
from support.browser import show

from rljob_worker.cli import view
from rljob_worker.errors import UserError
from rljob_worker.report.live import LiveReport


@pytest.fixture
def report(tmp_path: Path) -> Iterator[LiveReport]:
    write_run(tmp_path / "run", 6)
    write_samples(tmp_path / "run", 6, ["first", "second"], [0.1, 0.9])
    live = LiveReport(tmp_path / "run")
    thread = threading.Thread(target=live.serve)
    thread.start()
    yield live
    live.close()
    thread.join(10)
    assert not thread.is_alive()


def ask(report: LiveReport, path: str, token: bool = True, **headers: str) -> tuple[int, dict[str, str], bytes]:
    address = urlsplit(report.address)
    assert address.hostname == "127.0.0.1"
    connection = HTTPConnection(address.hostname, address.port or 0, timeout=60)
    secret = address.query.partition("=")[2]
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET", path, headers=named | ({"Authorization": f"Bearer {secret}"} if token else {}))
    answer = connection.getresponse()
    content = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return content


def test_nobody_without_the_token_and_no_page_of_a_stranger_is_answered(report: LiveReport) -> None:
    query = report.address[report.address.index("?") :]
    for path in (
        "/",
        "/?token=",
        "/?token=wrong",
        "/run.json",
        f"/run.json{query}",
        f"/samples.json{query}&step=6",
        "/trace.json.gz",
    ):
        assert ask(report, path, token=False)[0] == HTTPStatus.UNAUTHORIZED, path
    assert ask(report, "/run.json", Host="evil.example")[0] == HTTPStatus.MISDIRECTED_REQUEST
    assert ask(report, "/run.json", Origin="http://evil.example")[0] == HTTPStatus.FORBIDDEN
    assert ask(report, "/../run.json")[0] == HTTPStatus.NOT_FOUND
    status, headers, _ = ask(report, "/")
    assert status == HTTPStatus.OK
    assert headers["Referrer-Policy"] == "no-referrer", "the token in the address goes nowhere"


def test_curves_are_sent_again_only_when_there_are_new_ones(report: LiveReport) -> None:
    status, headers, content = ask(report, "/run.json")
    assert status == HTTPStatus.OK
    assert json.loads(content)["runs"][0]["steps"][-1] == 6
    assert ask(report, "/run.json", If_None_Match=headers["ETag"])[0] == HTTPStatus.NOT_MODIFIED
    write_run(report.folder, 7)
    status, _, content = ask(report, "/run.json", If_None_Match=headers["ETag"])
    assert status == HTTPStatus.OK
    assert json.loads(content)["runs"][0]["steps"][-1] == 7


def test_samples_are_sent_by_step_and_what_is_not_there_is_named(report: LiveReport) -> None:
    assert [row["response"] for row in json.loads(ask(report, "/samples.json?step=6")[2])] == ["first", "second"]
    status, _, content = ask(report, "/samples.json?step=5")
    assert status == HTTPStatus.NOT_FOUND
    assert b"no trajectories of step 5; there are those of step 6" in content
    for step in ("", "-1", "x", "9" * 400, "%ff"):
        assert ask(report, f"/samples.json?step={step}")[0] == HTTPStatus.BAD_REQUEST, step


def test_a_browser_follows_the_run(report: LiveReport, tmp_path: Path) -> None:
    shown = show(report.address, tmp_path)
    assert shown.console == []
    assert re.search(r'id="state"[^>]*>live<', shown.dom)
    assert "<dd>second</dd>" in shown.dom


def test_what_cannot_be_shown_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        LiveReport(tmp_path / "missing")
    run_folder(tmp_path / "new")
    with pytest.raises(UserError, match="no step was finished yet"):
        LiveReport(tmp_path / "new")
    write_run(tmp_path / "run", 2)
    with pytest.raises(UserError, match="--port 70000: cannot listen there"):
        LiveReport(tmp_path / "run", port=70000)


def test_the_first_step_of_a_job_that_starts_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path / "run")
    view.await_first_step(run)
    assert capsys.readouterr().err == "", "no driver runs there"
    asked: list[Path] = []

    def answer(folder: Path, path: str, method: str) -> None:
        asked.append(folder)
        if len(asked) == 3:
            write_run(run, 1)

    monkeypatch.setattr(view, "ask_driver", answer)
    monkeypatch.setattr(view, "_PAUSE_SECONDS", 0.0)
    view.await_first_step(run)
    assert asked == [run] * 3
    assert capsys.readouterr().err == f"rljob: waiting for the first step of {run}\n"
    view.await_first_step(run)
    assert len(asked) == 3, "a step is there"


def test_the_trace_of_the_run_so_far_is_served_to_whoever_has_the_address(report: LiveReport, tmp_path: Path) -> None:
    query = report.address[report.address.index("?") :]
    status, headers, content = ask(report, f"/trace.json.gz{query}", token=False)
    assert (status, headers["Content-Type"]) == (HTTPStatus.OK, "application/gzip")
    events = json.loads(gzip.decompress(content))["traceEvents"]
    assert [event["name"] for event in events if event["name"] == "step 6"] == ["step 6"]
    assert not (tmp_path / "run" / "trace.json.gz").exists()
    (link,) = re.findall(r'<a id="trace" href="([^"]*)"', show(report.address, tmp_path).dom)
    assert link == report.address.replace("/?", "/trace.json.gz?")
