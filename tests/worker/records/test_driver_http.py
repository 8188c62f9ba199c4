from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from record_cases import bare
from support.clocks import at_once

from rljob_api.wire.driver_status import DriverStatus
from rljob_worker.errors import JobError, UserError
from rljob_worker.host.sealed_json import unsealed
from rljob_worker.records import http as driver_http
from rljob_worker.records.http import DriverServer
from rljob_worker.records.profile_request import BusyError, ProfileRequest
from rljob_worker.records.steps import StepLog

TOKEN = "token-of-the-tests"
Serve = Callable[..., DriverServer]


class Job:
    def __init__(self) -> None:
        self.ready = False
        self.broken = False
        self.checkpoints = 0
        self.nodes = 2
        self.profile: ProfileRequest | None = None

    def status(self) -> DriverStatus:
        if self.broken:
            raise RuntimeError("no status")
        return DriverStatus(self.ready, 3, 10, "rollout", 1, 3, None, False, 0.5)

    def request_checkpoint(self) -> None:
        self.checkpoints += 1

    def want_engine_nodes(self, nodes: int) -> None:
        if nodes > 4:
            raise UserError("4 at most")
        self.nodes = nodes

    def trace(self) -> bytes:
        if self.broken:
            raise JobError("rljob trace: no room")
        if self.ready:
            raise UserError("a trace is being made")
        return b"packed"

    def request_profile(self, request: ProfileRequest) -> None:
        if self.profile is not None:
            raise BusyError("another one is not done")
        if request.first < 4:
            raise UserError("step 3 is over")
        self.profile = request


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def serve(tmp_path: Path, job: Job) -> Iterator[Serve]:
    servers = []

    def start(token: str | None = TOKEN, host: str = "127.0.0.1", port: int = 0) -> DriverServer:
        server = DriverServer(
            StepLog(tmp_path),
            status=job.status,
            metrics=lambda: b"# HELP x y\n",
            request_checkpoint=job.request_checkpoint,
            want_engine_nodes=job.want_engine_nodes,
            request_profile=job.request_profile,
            trace=job.trace,
            host=host,
            port=port,
            token=token,
            address_file=tmp_path / "http.json",
            token_file=tmp_path / "http.token",
        )
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


def ask(server: DriverServer, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, path, body=body, headers={"Authorization": f"Bearer {TOKEN}"} | headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content) if "json" in answer.headers["Content-Type"] else content


def raw(server: DriverServer, request: bytes) -> bytes:
    """Everything that is answered until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def test_every_endpoint_answers(serve: Serve, job: Job, tmp_path: Path) -> None:
    server = serve()
    assert unsealed((tmp_path / "http.json").read_text()) == {"host": "127.0.0.1", "port": server.port}
    assert ask(server, "/healthz") == (200, {"ok": True})
    assert ask(server, "/readyz") == (503, {"ready": False})
    job.ready = True
    assert ask(server, "/readyz") == (200, {"ready": True})
    assert ask(server, "/v1/status") == (200, asdict(job.status()))
    assert ask(server, "/v1/steps") == (200, {"steps": [], "total": 0})
    assert ask(server, "/metrics") == (200, b"# HELP x y\n")
    assert ask(server, "/v1/checkpoint", "POST") == (202, {"accepted": True})
    assert ask(server, "/v1/checkpoint", "POST", body=b"{}" * 1000) == (202, {"accepted": True})
    assert job.checkpoints == 2
    assert ask(server, "/v1/engine-nodes?wanted=3", "POST") == (202, {"accepted": True})
    assert job.nodes == 3
    server.close()
    assert not (tmp_path / "http.json").exists()


def test_what_does_not_exist_is_refused_by_name(serve: Serve, job: Job) -> None:
    server = serve()
    status, content = ask(server, "/v1/stepz")
    assert status == 404
    assert "/v1/steps" in content["error"]
    assert ask(server, "/v1/checkpoint")[0] == ask(server, "/v1/status", "POST")[0] == 405
    assert ask(server, "/v1/status", "POST") == (405, {"error": "/v1/status takes GET, not POST"})
    assert ask(server, "/v1/engine-nodes?wanted=5", "POST") == (409, {"error": "4 at most"})
    for query in ("", "?wanted=", "?wanted=x"):
        status, content = ask(server, f"/v1/engine-nodes{query}", "POST")
        assert (status, content["error"][:8]) == (400, "wanted: ")
    assert (job.checkpoints, job.nodes) == (0, 2)


def test_a_trace_is_made_once_at_a_time(serve: Serve, job: Job) -> None:
    server = serve()
    assert ask(server, "/v1/trace") == (200, b"packed")
    job.ready = True
    assert ask(server, "/v1/trace") == (409, {"error": "a trace is being made"})
    job.broken = True
    assert ask(server, "/v1/trace") == (500, {"error": "rljob trace: no room"})


def test_a_profile_is_asked_for_and_a_second_one_refused_while_it_is_not_done(serve: Serve, job: Job) -> None:
    server = serve()
    assert ask(server, "/v1/profile?steps=3", "POST") == (400, {"error": "step 3 is over"})
    query = "steps=12-13&ranks=0,3&engines=&stacks=true&maxMebibytes=2"
    assert ask(server, f"/v1/profile?{query}", "POST") == (202, {"accepted": True})
    assert job.profile == ProfileRequest(12, 13, (0, 3), (), True, 2 << 20)
    assert ask(server, "/v1/profile?steps=14", "POST") == (409, {"error": "another one is not done"})


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("", "steps"),
        ("steps=0", "steps"),
        ("steps=13-12", "steps"),
        ("steps=1-101", "steps"),
        ("steps=5&ranks=x", "ranks"),
        ("steps=5&engines=-1", "engines"),
        ("steps=5&stacks=yes", "stacks"),
        ("steps=5&maxMebibytes=0", "maxMebibytes"),
        ("steps=5&rank=0", "rank"),
    ],
)
def test_a_profile_that_cannot_be_names_the_parameter(serve: Serve, job: Job, query: str, named: str) -> None:
    status, content = ask(serve(), f"/v1/profile?{query}", "POST")
    assert status == 400
    assert content["error"].startswith(f"{named}: ")
    assert job.profile is None


def test_steps_are_paged_with_after(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_http, "PAGE", 4)
    server = serve()
    for step in range(1, 11):
        server.log.append(bare(step))
    seen: list[int] = []
    after = -1
    while steps := ask(server, f"/v1/steps?after={after}")[1]["steps"]:
        assert len(steps) <= 4
        seen += [record["step"] for record in steps]
        after = steps[-1]["index"]
    assert seen == list(range(1, 11))
    assert ask(server, "/v1/steps?after=-100")[1]["steps"][0]["step"] == 1
    assert ask(server, "/v1/steps?after=99999999999999999999") == (200, {"steps": [], "total": 10})


def test_a_page_of_large_records_ends_early(serve: Serve) -> None:
    """The records of a job with many devices: a thousand of them would be more than a reader takes."""
    server = serve()
    large = {"nested": ["x" * 1000] * 60}
    for step in range(1, 101):
        server.log.append(bare(step, **large))
    seen: list[int] = []
    sizes: list[int] = []
    while len(seen) < 100:
        _, page = ask(server, f"/v1/steps?after={len(seen) - 1}")
        assert page["total"] == 100
        sizes.append(len(json.dumps(page)))
        seen += [record["step"] for record in page["steps"]]
        deadline = time.monotonic() + 60
        while server.last_read < len(seen) - 1 and time.monotonic() < deadline:
            time.sleep(0.001)  # The server notes it after it has sent the page.
        assert server.last_read == len(seen) - 1, "what was left out was not read"
    assert seen == list(range(1, 101))
    assert max(sizes) < driver_http.PAGE_BYTES + 70_000
    assert len(sizes) == 3


def test_a_record_that_is_a_page_of_its_own_is_answered(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_http, "PAGE_BYTES", 100)
    server = serve()
    for step in (1, 2):
        server.log.append(bare(step, nested=["x" * 1000]))
    assert [record["step"] for record in ask(server, "/v1/steps")[1]["steps"]] == [1]
    assert [record["step"] for record in ask(server, "/v1/steps?after=0")[1]["steps"]] == [2]


@pytest.mark.parametrize("after", ["x", "", "1.5", "9" * 5000, "%00", "0x1"])
def test_a_wrong_after_is_a_bad_request(serve: Serve, after: str) -> None:
    status, content = ask(serve(), f"/v1/steps?after={after}")
    assert status == 400
    assert "is not a whole number" in content["error"]


def test_a_token_guards_everything_but_the_probes(serve: Serve, job: Job) -> None:
    server = serve(token="s3cret\n")
    for path, method in (
        ("/v1/status", "GET"),
        ("/v1/steps", "GET"),
        ("/metrics", "GET"),
        ("/v1/checkpoint", "POST"),
        ("/v1/engine-nodes", "POST"),
        ("/v1/profile", "POST"),
        ("/v1/trace", "GET"),
        ("/nothing", "GET"),
    ):
        for wrong in (
            {"Authorization": ""},
            {"Authorization": "Bearer s3cre"},
            {"Authorization": "s3cret"},
            {"Authorization": "Basic s3cret"},
        ):
            assert ask(server, path, method, **wrong)[0] == 401
        assert ask(server, path, method, Authorization="Bearer s3cret")[0] in (200, 202, 400, 404)
    assert job.checkpoints == 1
    assert (ask(server, "/healthz")[0], ask(server, "/readyz")[0]) == (200, 503)
    assert ask(server, "/v1/status", Authorization="bearer s3cret")[0] == 200
    assert b"WWW-Authenticate: Bearer" in raw(server, b"GET /metrics HTTP/1.1\r\n\r\n")


def test_the_token_may_come_in_a_header_that_a_proxy_leaves_alone(serve: Serve) -> None:
    server = serve(token="s3cret")
    assert ask(server, "/v1/status", Authorization="", **{"X-RLJob-Authorization": "Bearer s3cret"})[0] == 200
    assert ask(server, "/v1/status", **{"X-RLJob-Authorization": "Bearer s3cre"})[0] == 401
    assert (
        ask(server, "/v1/status", Authorization="Bearer proxys", **{"X-RLJob-Authorization": "Bearer s3cret"})[0] == 200
    )


def test_without_a_token_of_the_environment_one_is_made_that_its_owner_alone_reads(
    serve: Serve, job: Job, tmp_path: Path
) -> None:
    server = serve(token=None)
    file = tmp_path / "http.token"
    token = file.read_text()
    assert (file.stat().st_mode & 0o777, len(token)) == (0o600, 64)
    for path, method in (("/v1/status", "GET"), ("/v1/steps", "GET"), ("/metrics", "GET"), ("/v1/checkpoint", "POST")):
        assert ask(server, path, method, Authorization="")[0] == 401
        assert ask(server, path, method, Authorization=f"Bearer {token}")[0] in (200, 202)
    assert job.checkpoints == 1
    assert ask(server, "/healthz", Authorization="")[0] == 200
    later = serve(token=None)
    assert file.read_text() == later.token != token
    server.close()
    assert file.exists(), "the token of the driver that came after"
    later.close()
    assert not file.exists()


def test_a_token_of_the_environment_is_written_nowhere(serve: Serve, tmp_path: Path) -> None:
    serve()
    assert not (tmp_path / "http.token").exists()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200), ("localhost:9", 200), ("[::1]:9", 200), ("127.9.9.9", 200), ("evil.example", 421),
        ("localhost.evil.example", 421), ("10.0.0.1", 421), ("", 421), ("[", 421), ("127.0.0.1@evil.example", 421),
    ],
)  # fmt: skip
def test_on_loopback_a_strangers_host_is_not_served(serve: Serve, job: Job, host: str, status: int) -> None:
    """A web page whose name leads to 127.0.0.1 would read the run from its owner's browser."""
    server = serve()
    assert ask(server, "/v1/status", Host=host)[0] == status
    assert ask(server, "/v1/checkpoint", "POST", Host=host)[0] == (202 if status == 200 else 421)
    assert job.checkpoints == (status == 200)


def test_a_page_of_another_origin_is_not_answered(serve: Serve, job: Job) -> None:
    server = serve()
    host = f"127.0.0.1:{server.port}"
    for origin in ("http://evil.example", "null", "", f"https://{host}", f"http://{host}.evil.example"):
        assert ask(server, "/v1/checkpoint", "POST", Origin=origin)[0] == 403
    assert job.checkpoints == 0
    assert ask(server, "/v1/checkpoint", "POST", Origin=f"http://{host}")[0] == 202


def test_beyond_loopback_names_are_the_networks_matter(serve: Serve) -> None:
    server = serve(host="0.0.0.0")
    assert not server.local
    assert ask(server, "/v1/status", Host="name-head-svc.team.svc")[0] == 200


def test_an_empty_token_is_refused(serve: Serve) -> None:
    with pytest.raises(UserError, match="empty"):
        serve(token=" ")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET http://[ HTTP/1.1\r\n\r\n", b"400"),
        (b"POST /v1/checkpoint HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"400"),
        (b"POST /v1/checkpoint HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"POST /v1/checkpoint HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"POST /v1/checkpoint HTTP/1.1\r\nContent-Length: 70000\r\n\r\n", b"413"),
        (b"POST /v1/checkpoint HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", b"413"),
        (b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"),
        (b"BREW /v1/status HTTP/1.1\r\n\r\n", b"501"),
        (b"\x00\xff\x16\x03 garbage here\r\n\r\n", b"400"),
    ],
)
def test_garbage_is_answered_and_does_not_reach_the_job(
    serve: Serve, job: Job, request_bytes: bytes, status: bytes
) -> None:
    server = serve()
    try:
        answer = raw(server, request_bytes)
    except ConnectionResetError:
        # The server closed while more was on its way: only for requests that are too long to read.
        assert status == b"414"
    else:
        # What is no HTTP at all gets an error page without a status line.
        assert re.search(rb"^HTTP/1\.1 %s|Error code: %s" % (status, status), answer)
        assert answer.count(b"HTTP/1.1 ") <= 1, "the rest of a refused request was taken for another one"
    assert job.checkpoints == 0
    assert ask(server, "/healthz")[0] == 200


def test_a_body_is_not_taken_for_the_next_request(serve: Serve) -> None:
    hidden = b"POST /v1/checkpoint HTTP/1.1\r\n\r\n"
    request = b"GET /healthz HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(hidden), hidden)
    last = b"GET /v1/status HTTP/1.1\r\nAuthorization: Bearer %s\r\nConnection: close\r\n\r\n" % TOKEN.encode()
    answer = raw(serve(), request + last)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert b"accepted" not in answer


def test_an_error_of_the_job_is_answered(serve: Serve, job: Job) -> None:
    server = serve()
    job.broken = True
    assert ask(server, "/v1/status")[0] == 500
    job.broken = False
    assert ask(server, "/v1/status")[0] == 200


def test_slow_clients_do_not_hold_up_others(serve: Serve) -> None:
    server = serve()
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    try:
        for connection in slow:
            connection.sendall(b"GET /v1/status HTT")
        with at_once():
            assert ask(server, "/healthz")[0] == 200
    finally:
        for connection in slow:
            connection.close()


def test_linger_waits_for_the_last_record_to_be_read(serve: Serve) -> None:
    server = serve()
    assert server.linger(0.0)
    for step in (1, 2):
        server.log.append(bare(step))
    assert not server.linger(0.1)
    threading.Timer(0.2, lambda: ask(server, "/v1/steps?after=0")).start()
    begin = time.monotonic()
    assert server.linger(60.0)
    assert time.monotonic() - begin > 0.1


def test_linger_does_not_count_who_only_peeks(serve: Serve) -> None:
    server = serve()
    server.log.append(bare(1))
    assert ask(server, "/v1/steps", **{"X-RLJob-Peek": "1"})[1]["total"] == 1
    assert not server.linger(0.1)
    assert ask(server, "/v1/steps")[1]["total"] == 1
    assert server.linger(60.0)


def test_a_taken_port_is_the_users_error(serve: Serve) -> None:
    server = serve()
    with pytest.raises(UserError, match=rf"spec\.records\.httpPort {server.port}: cannot listen"):
        serve(port=server.port)
    with pytest.raises(UserError, match=r"spec\.records\.httpHost nowhere\.invalid"):
        serve(host="nowhere.invalid")


def test_it_listens_on_ipv6(serve: Serve) -> None:
    server = serve(host="::1")
    with socket.create_connection(("::1", server.port), timeout=60) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert b"200" in connection.recv(100)


def test_a_server_that_never_started_can_be_closed(tmp_path: Path, job: Job) -> None:
    DriverServer(
        StepLog(tmp_path),
        status=job.status,
        metrics=bytes,
        request_checkpoint=job.request_checkpoint,
        want_engine_nodes=job.want_engine_nodes,
        request_profile=job.request_profile,
        trace=job.trace,
        host="127.0.0.1",
        port=0,
        token=None,
        address_file=tmp_path / "http.json",
        token_file=tmp_path / "http.token",
    ).close()
