"""The recipe for Kubeflow's OptimizationJob on a real API server with Kubeflow Trainer's own CRDs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kube import ApiError, Kube
from kwok_cluster import KwokCluster
from test_crd import in_namespace
from test_optimization_job import REFUSED, changed, crd, recipe

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def kinds(control_plane: KwokCluster) -> Iterator[Kube]:
    """A client of an API server that has them; no controller runs a trial."""
    crds = [crd(kind) for kind in recipe()]
    control_plane.install_crds(crds)
    yield control_plane.kube
    for one in crds:
        control_plane.kube.delete("CustomResourceDefinition", None, one["metadata"]["name"])


def within(part: Any, whole: Any) -> bool:
    """Whether all of it is there, beside what the server filled in."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(name in whole and within(part[name], whole[name]) for name in part)
    if isinstance(part, list):
        return isinstance(whole, list) and len(part) == len(whole) and all(map(within, part, whole))
    return bool(part == whole)


def test_the_api_server_stores_the_whole_recipe(kinds: Kube, namespace: str) -> None:
    for document in recipe().values():
        stored = kinds.create(in_namespace(document, namespace), fieldValidation="Strict")
        assert within(document["spec"], stored["spec"]), stored["spec"]


@pytest.mark.parametrize("what", REFUSED)
def test_the_api_server_refuses_what_is_wrong(kinds: Kube, namespace: str, what: str) -> None:
    path, value, said = REFUSED[what]
    with pytest.raises(ApiError, match=said):
        kinds.create(in_namespace(changed(path, value), namespace), dryRun="All", fieldValidation="Strict")
