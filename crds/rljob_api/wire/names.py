"""Ports, paths, headers, variables and Secrets' keys by which the operator, Ray and a driver find each other."""

from __future__ import annotations

DRIVER_PORT = 8300
"""The driver's HTTP endpoint on the head."""
DASHBOARD_PORT = 8265
"""Ray's job API on the head; Ray's default, as all of its ports here."""
GCS_PORT = 6379
"""Ray's control store on the head."""
CLIENT_PORT = 10001
"""Ray's client server on the head."""
AGENT_PORT = 52365
"""Ray's agent on every node, which answers the probes."""

DRIVER_TOKEN_VARIABLE = "RLJOB_DRIVER_TOKEN"
"""Bearer token that the driver's HTTP endpoint asks for, when set."""
PRIVATE_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", DRIVER_TOKEN_VARIABLE)
"""Variables of a driver that it withholds from processes that run other people's code."""
MANIFEST_VARIABLE = "RLJOB_MANIFEST"
"""Manifest of a submitted driver: base64 of gzip of JSON."""
ATTEMPT_VARIABLE = "RLJOB_ATTEMPT"
"""Number of the attempt that a submitted driver belongs to, from 0: of two drivers of a job the later one."""

DRIVER_TOKEN_KEY = "token"
"""Key of the driver's token in the job's Secret."""
RAY_TOKEN_KEY = "auth_token"
"""Key of Ray's token in the RayCluster's Secret: KubeRay's `RAY_AUTH_TOKEN_SECRET_KEY`."""

STATUS_PATH = "/v1/status"
STEPS_PATH = "/v1/steps"
CHECKPOINT_PATH = "/v1/checkpoint"
ENGINE_NODES_PATH = "/v1/engine-nodes"
TRACE_PATH = "/v1/trace"
PROFILE_PATH = "/v1/profile"
METRICS_PATH = "/metrics"
HEALTH_PATH = "/healthz"
READY_PATH = "/readyz"
"""Paths of the driver's HTTP endpoint."""

DRIVER_AUTHORIZATION_HEADER = "X-RLJob-Authorization"
"""Stands for `Authorization` through the API server's proxy, which keeps that for itself."""
TOKEN_HEADERS = ("Authorization", DRIVER_AUTHORIZATION_HEADER)
"""One of these has the token of a run's pages."""
PEEK_HEADER = "X-RLJob-Peek"
"""Marks a reader of step records for which a driver that lingers at its end does not wait."""
