"""`--set path=value`."""

from __future__ import annotations

from typing import Any

import pytest
from manifests import manifest

from rljob_api.validation import ManifestError, apply_overrides, load_manifest

DOCUMENT = {"spec": {"steps": 3, "data": {"sources": [{"path": "a"}]}, "training": None}}


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("spec.steps=5", ("spec", "steps"), 5),
        ("spec.training.tensorParallel=2", ("spec", "training", "tensorParallel"), 2),
        ("spec.training.optimizer.lr=1e-5", ("spec", "training", "optimizer", "lr"), 1e-5),
        ("spec.suspend=true", ("spec", "suspend"), True),
        ("spec.image=null", ("spec", "image"), None),
        ("spec.image=host:5000/a=b:c", ("spec", "image"), "host:5000/a=b:c"),
        ("spec.model.revision='1.0'", ("spec", "model", "revision"), "1.0"),
        ("spec.model.revision=2026-01-31", ("spec", "model", "revision"), "2026-01-31"),
        ("spec.rollout.stop=[a, b]", ("spec", "rollout", "stop"), ["a", "b"]),
        ('spec.reward={"name": "regex", "args": {"pattern": "x"}}', ("spec", "reward", "args", "pattern"), "x"),
        ("spec.data.sources[0].path=b", ("spec", "data", "sources", 0, "path"), "b"),
        ("spec.data.sources[1].path=b", ("spec", "data", "sources", 1, "path"), "b"),
        ("spec.rollout.stop[0]=b", ("spec", "rollout", "stop", 0), "b"),
        ("spec.pods.labels[example.com/team]=a", ("spec", "pods", "labels", "example.com/team"), "a"),
    ],
)  # fmt: skip
def test_sets(override: str, path: tuple[Any, ...], value: Any) -> None:
    found: Any = apply_overrides(DOCUMENT, [override])
    for part in path:
        found = found[part]
    assert found == value
    assert type(found) is type(value)


def test_later_overrides_win_and_the_document_is_not_touched() -> None:
    assert apply_overrides(DOCUMENT, ["spec.steps=4", "spec.steps=5"])["spec"]["steps"] == 5
    assert DOCUMENT["spec"]["steps"] == 3


@pytest.mark.parametrize(
    ("override", "wrong"),
    [
        ("spec.steps", "has no '='"),
        ("=3", "has no path"),
        ("spec..steps=3", "malformed at '..steps'"),
        (f"spec{'.a' * 100}=3", "the path has 101 parts; no field lies deeper than 64"),
        (".spec=3", "malformed at '.spec'"),
        ("spec.data.sources[0=3", "malformed at '[0'"),
        ("spec.data.sources[0]path=3", "malformed at 'path'"),
        ("spec.steps=[1", "no YAML"),
        ("spec.steps.more=3", "spec.steps is no mapping"),
        ("spec.data[0]=3", "spec.data is no list"),
        ("spec.data.sources[5].path=3", "spec.data.sources has 1 item, so [5] is beyond its end"),
    ],
)
def test_malformed_overrides_are_named(override: str, wrong: str) -> None:
    with pytest.raises(ManifestError) as error:
        apply_overrides(DOCUMENT, ["spec.steps=4", override])
    assert len(error.value.problems) == 1
    assert f"--set {override}: " in str(error.value)
    assert wrong in str(error.value)


def test_unknown_path_is_caught_by_validation_with_the_nearest_name() -> None:
    with pytest.raises(
        ManifestError, match=r"spec\.training\.tensorParalel: 2: unknown field, did you mean tensorParallel\?"
    ):
        load_manifest(manifest(), ["spec.training.tensorParalel=2"])


def test_overrides_are_validated_together_with_the_manifest() -> None:
    assert load_manifest(manifest(), ["spec.steps=5", "spec.training.globalBatchSize=64"]).spec.steps == 5
    with pytest.raises(ManifestError, match=r"spec\.rollout\.topP: 2: is too large"):
        load_manifest(manifest(), ["spec.rollout.topP=2"])
