"""Attempts of somebody without rights on a job's pods; runs in a pod: `stranger.py '{"ADDRESS": [PORT, ...]}' [TOKEN]`.

Prints, as JSON, for each `ADDRESS:PORT` that takes a connection what answered there: gRPC calls of Ray's that were
carried out, and HTTP paths that were served.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc

CONNECT_SECONDS = 2.0
CALL_SECONDS = 5.0
CALLS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "InternalKVGcsService/InternalKVKeys",
    "NodeManagerService/GetNodeStats",
    "CoreWorkerService/NumPendingTasks",
    "ObjectManagerService/FreeObjects",
    "ReporterService/GetTraceback",
    "RayletDriver/ClusterInfo",
    "RuntimeEnvService/GetRuntimeEnvsInfo",
)
"""One of each service of Ray's; an empty request is a valid one."""
METRICS, PAGE = "metrics", "page"
PATHS = ("/", "/api/jobs/", "/api/v0/nodes", "/v1/status", "/v1/steps?after=-1", "/metrics", "/healthz")


def tried(address: str, port: int, token: str) -> list[str] | None:
    """The protocols that answer; None: nothing takes a connection."""
    try:
        socket.create_connection((address, port), CONNECT_SECONDS).close()
    except OSError:
        return None
    answers = {what for path in PATHS if (what := served(address, port, path, token))}
    return [*sorted(answers), *called(address, port, token)]


def served(address: str, port: int, path: str, token: str) -> str | None:
    """Answer to a GET: metrics, a page without data, or else the path."""
    connection = http.client.HTTPConnection(address, port, timeout=CALL_SECONDS)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    if answer.status >= 300:
        return None
    if content.startswith((b"# HELP", b"# TYPE")):
        return METRICS
    return PAGE if answer.headers.get_content_type() == "text/html" else path


def called(address: str, port: int, token: str) -> list[str]:
    """The calls that are carried out."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    done = []
    with grpc.insecure_channel(f"{address}:{port}") as channel:
        for name in CALLS:
            try:
                channel.unary_unary(f"/ray.rpc.{name}")(b"", timeout=CALL_SECONDS, metadata=metadata)
                done.append(name)
            except grpc.RpcError as error:
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    break  # no gRPC
    return done


def main() -> None:
    """See the module."""
    places = [(address, port) for address, ports in json.loads(sys.argv[1]).items() for port in ports]
    token = sys.argv[2] if len(sys.argv) > 2 else ""
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda place: tried(*place, token), places)
    found = {f"{address}:{port}": answer for (address, port), answer in zip(places, answers)}
    print(json.dumps({where: answer for where, answer in found.items() if answer is not None}))


if __name__ == "__main__":
    main()
