"""Kubeconfigs, service accounts, programs with credentials: what is wrong is named, what is replaced is read anew."""

from __future__ import annotations

import asyncio
import base64
import ssl
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fake_api import FakeApi, serving
from kubernetes.aio.config import incluster_config
from prometheus_client import CollectorRegistry

from rljob_operator.shell.api import access
from rljob_operator.shell.api.access import Access, AccessProblem, find_access
from rljob_operator.shell.api.client import ApiClient, ApiError
from rljob_operator.shell.api.metrics import OperatorMetrics
from rljob_operator.shell.api.resources import RLJOBS
from rljob_operator.shell.kopf.transport import kopf_session


def kubeconfig(folder: Path, user: dict[str, Any], name: str = "config", **cluster: Any) -> str:
    content = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "rl"}}],
        "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:1/", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path = folder / name
    path.write_text(yaml.safe_dump(content))
    return str(path)


def found(*arguments: Any, **environment: str) -> Access:
    return asyncio.run(find_access(*arguments, environment=environment))


def token_of(there: Access) -> str | None:
    return asyncio.run(there.configuration.get_api_key_with_prefix("BearerToken"))


def test_a_kubeconfig_with_a_token(tmp_path: Path) -> None:
    there = found(kubeconfig(tmp_path, {"token": "abc"}))
    assert (there.configuration.host, there.namespace, token_of(there)) == ("http://127.0.0.1:1", "rl", "Bearer abc")
    assert there.arguments == ("--kubeconfig", str(tmp_path / "config"))
    assert found(kubeconfig(tmp_path, {"token": "abc"}), "c", "mine").namespace == "mine"


def test_a_file_with_a_token_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("first\n")
    there = found(kubeconfig(tmp_path, {"tokenFile": "token"}))
    assert token_of(there) == "Bearer first"
    (tmp_path / "token").write_text("second\n")
    assert token_of(there) == "Bearer first"
    now = time.monotonic()
    monkeypatch.setattr(access.time, "monotonic", lambda: now + 61)
    assert token_of(there) == "Bearer second"
    # While the file is not there, the last token is used.
    (tmp_path / "token").unlink()
    monkeypatch.setattr(access.time, "monotonic", lambda: now + 122)
    with pytest.raises(AccessProblem, match="token"):
        token_of(there)
    assert token_of(there) == "Bearer second"


def program(folder: Path, answer: str, **options: Any) -> dict[str, Any]:
    script = folder / "login"
    script.write_text(f"#!{sys.executable}\nimport json, os\n{answer}\n")
    script.chmod(0o755)
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(script), **options}}


def test_a_programs_token_is_asked_for_again_before_it_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "count").write_text("0")
    (tmp_path / "ends").write_text("2000-01-01T00:00:00Z")
    user = program(
        tmp_path,
        f"folder = {str(tmp_path)!r}\n"
        "number = int(open(folder + '/count').read()) + 1\n"
        "open(folder + '/count', 'w').write(str(number))\n"
        "cluster = json.loads(os.environ['KUBERNETES_EXEC_INFO'])['spec']['cluster']['server']\n"
        "ends = open(folder + '/ends').read()\n"
        "print(json.dumps({'status': {'token': f'{cluster} {number}', 'expirationTimestamp': ends}}))",
        provideClusterInfo=True,
    )
    there = found(kubeconfig(tmp_path, user))
    assert token_of(there) == "Bearer http://127.0.0.1:1/ 1"
    now = time.monotonic()
    (tmp_path / "ends").write_text("2999-01-01T00:00:00Z")
    for later, number in ((61, 2), (122, 2)):
        monkeypatch.setattr(access.time, "monotonic", lambda later=later: now + later)
        assert token_of(there) == f"Bearer http://127.0.0.1:1/ {number}"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("raise SystemExit(3)", "gave no credentials.* 3"),
        ("print('no')", "gave no credentials"),
        ("print(json.dumps({'status': {}}))", "'token' is missing"),
        ("import time; time.sleep(60)", "gave no credentials.*timed out"),
    ],
)
def test_a_program_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, says: str
) -> None:
    monkeypatch.setattr(access, "_EXEC_SECONDS", 1.0)
    # The official loader would log it and go on without credentials, or with the token beside it.
    with pytest.raises(AccessProblem, match=says):
        found(kubeconfig(tmp_path, {**program(tmp_path, answer), "token": "old"}))


def test_what_a_kubeconfig_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(AccessProblem, match=r"no context 'other' in .*config; there are: c"):
        found(kubeconfig(tmp_path, {}), "other")
    with pytest.raises(AccessProblem, match="there is no kubeconfig at /none"):
        found("/none")
    with pytest.raises(AccessProblem, match=r"there is no kubeconfig at ~/.kube/config"):
        found(HOME=str(tmp_path / "home"))
    bad = base64.b64encode(b"no certificate").decode()
    with pytest.raises(AccessProblem, match="certificate"):
        found(kubeconfig(tmp_path, {}, **{"server": "https://127.0.0.1:1", "certificate-authority-data": bad}))
    with pytest.raises(AccessProblem, match=r"File does not exist.*/nowhere"):
        found(kubeconfig(tmp_path, {"client-certificate": "/nowhere", "client-key": "/x"}, server="https://h"))
    with pytest.raises(AccessProblem, match="key server"):
        found(kubeconfig(tmp_path, {}, server=None))


def test_of_several_kubeconfigs_the_first_current_context_counts(tmp_path: Path) -> None:
    first = kubeconfig(tmp_path, {"token": "first"}, "first")
    other = tmp_path / "second"
    other.write_text(Path(first).read_text().replace("current-context: c", "current-context: d"))
    assert token_of(found(KUBECONFIG=f"{first}:{tmp_path / 'missing'}:{other}")) == "Bearer first"


def test_a_pods_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    with pytest.raises(AccessProblem, match="automountServiceAccountToken"):
        found(KUBERNETES_SERVICE_HOST="10.0.0.1", HOME=str(tmp_path))
    make_certificate(tmp_path)
    (tmp_path / "token").write_text("first")
    (tmp_path / "namespace").write_text("mine")
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "cert.pem"))
    monkeypatch.setattr(access, "_SERVICE_ACCOUNT", tmp_path)
    there = found(KUBERNETES_SERVICE_HOST="10.0.0.1", HOME=str(tmp_path))
    assert (there.configuration.host, there.namespace) == ("https://10.0.0.1:443", "mine")
    assert token_of(there) == "bearer first"
    (tmp_path / "token").write_text("second")
    assert token_of(there) == "bearer first"
    later = datetime.now() + timedelta(seconds=61)
    monkeypatch.setattr(incluster_config.datetime, "datetime", type("Later", (datetime,), {"now": lambda: later}))
    assert token_of(there) == "bearer second"


async def seen_token(there: Access, host: str) -> None:
    there.configuration.host = host
    client = ApiClient(there.configuration, OperatorMetrics(CollectorRegistry()), try_seconds=2.0)
    session = kopf_session(there, OperatorMetrics(CollectorRegistry()), lambda _: None)
    try:
        await client.request("GET", "/x")
        async with session.get(host + "/x"):
            pass
    finally:
        await client.close()
        await session.close()


def test_requests_and_watches_bear_the_token_and_pass_no_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    tokens: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        tokens.append(request.headers.get("Authorization", ""))
        return web.json_response({})

    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        there = await find_access(kubeconfig(tmp_path, {"token": "abc"}), environment={})
        await seen_token(there, f"http://127.0.0.1:{runner.addresses[0][1]}")
        await runner.cleanup()

    asyncio.run(run())
    assert tokens == ["Bearer abc", "Bearer abc"]


def test_a_token_that_cannot_be_read_fails_the_request_not_the_operator(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first")

    async def run() -> None:
        async with serving(FakeApi()) as api:
            await api.put("rljobs", {"metadata": {"name": "a"}})
            there = await find_access(kubeconfig(tmp_path, {"tokenFile": "token"}, server=api.url), environment={})

            def gone(_: Any) -> None:
                raise AccessProblem("the token is not there")

            client = ApiClient(there.configuration, OperatorMetrics(CollectorRegistry()), total_seconds=1.0)
            client._official.configuration.refresh_api_key_hook = gone
            with pytest.raises(ApiError, match="the token is not there"):
                await client.get(RLJOBS, "default", "a")
            await client.close()

    asyncio.run(run())


def test_nothing_is_discovered_and_nothing_is_kept_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def run() -> None:
        async with serving(FakeApi()) as api:
            await api.put("rljobs", {"metadata": {"name": "a"}})
            there = await find_access(kubeconfig(tmp_path, {}, server=api.url), environment={})
            client = ApiClient(there.configuration, OperatorMetrics(CollectorRegistry()))
            await client.get(RLJOBS, "default", "a")
            await client.close()
            assert api.requests == [("GET", RLJOBS.path("default", "a"))]

    asyncio.run(run())
    assert [path.name for path in tmp_path.iterdir()] == ["config"]


def test_a_client_certificate_and_the_servers_authority(tmp_path: Path) -> None:
    """Both ways, that of requests and that of Kopf's watches."""
    make_certificate(tmp_path)
    seen: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        seen.append(dict(part[0] for part in request.transport.get_extra_info("peercert")["subject"])["commonName"])
        return web.json_response({})

    async def run() -> None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "cert.pem"))
        tls.verify_mode = ssl.CERT_REQUIRED
        tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        host = f"https://127.0.0.1:{runner.addresses[0][1]}"
        data = {name: base64.b64encode((tmp_path / f"{name}.pem").read_bytes()).decode() for name in ("cert", "key")}
        user = {"client-certificate-data": data["cert"], "client-key-data": data["key"]}
        config = kubeconfig(tmp_path, user, server=host, **{"certificate-authority": "cert.pem"})
        await seen_token(await find_access(config, environment={}), host)
        config = kubeconfig(tmp_path, {"token": "x"}, server=host, **{"certificate-authority": "cert.pem"})
        stranger = await find_access(config, environment={})
        with pytest.raises(ApiError):
            await seen_token(stranger, host)
        await runner.cleanup()

    asyncio.run(run())
    assert seen == ["me", "me"]


def make_certificate(folder: Path) -> None:
    """A certificate that is its own authority, of a server at 127.0.0.1 and of a client called `me`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "me")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - timedelta(days=1))
    builder = builder.not_valid_after(now + timedelta(days=1))
    names = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))])
    builder = builder.add_extension(names, False).add_extension(x509.BasicConstraints(True, None), True)
    certificate = builder.sign(key, hashes.SHA256())
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(private)
