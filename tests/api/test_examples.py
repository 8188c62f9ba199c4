"""The manifests in examples/ are valid, the quickstarts are one job, and the published set-ups are what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.local_files import resolved
from rljob_api.spec import Profile
from rljob_api.validation import apply_overrides, load_manifest

EXAMPLES = Path(__file__).parents[2] / "examples"


def spec_of(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))["spec"]
    return spec


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_valid(path: Path) -> None:
    assert resolved(load_manifest(path), EXAMPLES).metadata.name


def test_the_quickstart_on_a_cluster_is_the_quickstart() -> None:
    here, there = spec_of("quickstart.yaml"), spec_of("quickstart-cluster.yaml")
    volume = there.pop("storage")["volumes"][0]["mountPath"]
    assert there.pop("image")
    assert there["checkpoint"].pop("path") == volume
    assert there["resources"].pop("head").keys() == there["resources"].pop("worker").keys() == {"cpu", "memory"}
    assert there == here


def test_examples_that_no_cluster_takes_say_so() -> None:
    """On a cluster checkpoints lie on a volume that all pods mount."""
    local = [path.name for path in EXAMPLES.glob("*.yaml") if not load_manifest(path).spec.storage.volumes]
    marked = [path.name for path in EXAMPLES.glob("*.yaml") if "\n# Local only, as it is: " in path.read_text("utf-8")]
    assert sorted(local) == sorted(marked) != []


def published() -> list[Path]:
    """The examples that are made for devices."""
    return [
        path for path in sorted(EXAMPLES.glob("*.yaml")) if load_manifest(path).spec.resources.profile != Profile.CPU
    ]


def test_every_published_set_up_is_described() -> None:
    page = (EXAMPLES.parent / "docs/published-setups.md").read_text(encoding="utf-8")
    assert len(published()) >= 6
    assert [path.name for path in published() if f"`{path.name}`" not in page] == []


@pytest.mark.parametrize("name", ["qwen3-4b-grpo-4xnpu.yaml", "qwen3.5-9b-grpo-4xnpu.yaml"])
@pytest.mark.parametrize(
    "override", ["spec.resources.devicesPerNode=8", "spec.resources.profile=ascend-a3", "spec.mode=Colocated"]
)
def test_set_up_for_4_npus_also_runs_on(name: str, override: str) -> None:
    document = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))
    assert load_manifest(apply_overrides(document, [override]))
