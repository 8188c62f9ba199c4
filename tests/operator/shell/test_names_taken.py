"""Jobs beside each other whose objects would have the same names."""

from __future__ import annotations

from typing import Any

import pytest
from operator_cases import SETTINGS, manifest

from rljob_api.validation import load_manifest
from rljob_operator.kubernetes_objects import RLJobObject
from rljob_operator.render import head_service_name
from rljob_operator.shell.api.resources import JobKey
from rljob_operator.shell.caches.cache import Cache
from rljob_operator.shell.caches.kept_job import job_text
from rljob_operator.shell.caches.names_taken import names_taken
from rljob_operator.shell.caches.views import job_view, own_key
from rljob_operator.state.observed import JobView

LONG = "x" * 40
OPEN = {"network": {"rayAuthentication": "Off"}}
CLOSED = {"network": {"rayAuthentication": "Token"}}


def stored(name: str, minute: int, phase: str | None = None, namespace: str = "default", **spec: Any) -> RLJobObject:
    item: Any = manifest(name, status={"phase": phase} if phase else None, **{**CLOSED, **spec})
    time = f"2026-01-01T00:{minute:02d}:00Z"
    meta = {"name": name, "namespace": namespace, "uid": name, "resourceVersion": "1", "creationTimestamp": time}
    return {**item, "metadata": meta}


def view_of(key: JobKey, item: RLJobObject) -> JobView:
    document = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": key.name}}
    return job_view(item, load_manifest({**document, "spec": item["spec"]}).spec, "")


def told(job: RLJobObject, *others: RLJobObject) -> str:
    """The message about `job`."""
    cache: Cache[RLJobObject, bytes] = Cache(own_key, job_text, lambda _: None)
    for item in (job, *others):
        cache.learn(item)
    return names_taken(view_of(own_key(job), job), cache, view_of, SETTINGS.render)


@pytest.mark.parametrize(
    ("younger", "older"),
    [
        (stored("x-driver", 2), stored("x", 1)),
        (stored("x", 2), stored("x-driver", 1)),
        (stored("x-driver", 2), stored("x", 1, "Succeeded")),
        (stored(f"b-{LONG}", 2, **OPEN), stored(f"a-{LONG}", 1, **OPEN)),
        (stored("x-driver", 1), stored("x", 1)),
    ],
    ids=["beside x", "beside x-driver", "the Secret of an ended job", "one Service", "in the same second"],
)
def test_the_younger_one_is_told_and_the_older_one_is_not(younger: RLJobObject, older: RLJobObject) -> None:
    said = told(younger, older)
    assert f"RLJob {older['metadata']['name']}, which is older" in said
    assert told(older, younger) == ""


@pytest.mark.parametrize(
    ("job", "other"),
    [
        (stored("x-driver", 2, **OPEN), stored("x", 1)),
        (stored("x", 2), stored("x-driver", 1, "Failed")),
        (stored("x-driver", 2), stored("x", 1, namespace="another")),
        (stored("x-driver", 2), stored("y", 1)),
        (stored("x-driver-driver-driver", 2), stored("x", 1)),
        (stored(f"b-{LONG[:-2]}", 2), stored(f"a-{LONG[:-2]}", 1)),
    ],
    ids=["no token", "ended", "another namespace", "another name", "further off", "short enough"],
)
def test_others_have_their_own_names(job: RLJobObject, other: RLJobObject) -> None:
    assert told(job, other) == ""


@pytest.mark.parametrize(
    ("cluster", "service"),
    [
        ("a", "a-head-svc"),
        ("a" * 41, "a" * 41 + "-head-svc"),
        ("b" + "a" * 41, "a" * 41 + "-head-svc"),
        ("b-" + "a" * 40, "r" + "a" * 40 + "-head-svc"),
        ("b7" + "a" * 40, "r" + "a" * 40 + "-head-svc"),
    ],
)
def test_the_service_is_named_as_kuberay_names_it(cluster: str, service: str) -> None:
    assert head_service_name(cluster) == service
