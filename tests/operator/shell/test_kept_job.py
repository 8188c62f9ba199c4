"""Memory kept of RLJobs that users make as large as they can."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from operator_cases import a_case, manifest, until

from rljob_api.spec import RLJobSpec
from rljob_operator.kubernetes_objects import RLJobObject
from rljob_operator.shell.caches.kept_job import TooLarge, check_kept, job_text, kept_job
from rljob_operator.shell.caches.spec_cache import SpecCache
from rljob_operator.state.reconcile import reconcile

META = {"name": "a", "namespace": "n", "uid": "u", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}


def noise(size: int) -> str:
    """Text that cannot be packed much."""
    return "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=size))


def item(spec: dict[str, Any], **meta: Any) -> RLJobObject:
    made: Any = {"metadata": {**META, **meta}, "spec": spec, "status": {"phase": "Queued"}}
    return made


def test_of_its_metadata_only_what_is_used_is_kept() -> None:
    annotations = {"mine": "y" * 1000, "rljob.dev/checkpoint-requested": "now"}
    text = job_text(item({"steps": 1}, annotations=annotations, managedFields=["y" * 1000]))
    assert b"yyy" not in text
    assert kept_job(text)["metadata"]["annotations"] == {"rljob.dev/checkpoint-requested": "now"}
    assert len(job_text(item({}, annotations={"rljob.dev/checkpoint-requested": noise(200_000)}))) < 500


def test_of_many_labels_those_that_may_mean_something_are_kept() -> None:
    many = {f"example.com/{noise(50)[:40]}{n}": noise(60) for n in range(5000)}
    mine = {"cost-centre": "7", "kueue.x-k8s.io/queue-name": "team"}
    text = job_text(item({"steps": 1}, labels={**many, **mine}))
    kept = kept_job(text)["metadata"]["labels"]
    assert mine.items() <= kept.items()
    assert len(kept) == 64
    assert len(text) < 8000


@pytest.mark.parametrize("spec", [{"steps": 1}, {"steps": 1, "note": "y" * 10**6}, {"steps": 1, "note": noise(90_000)}])
def test_a_spec_that_can_be_rendered_is_kept_whole(spec: dict[str, Any]) -> None:
    text = job_text(item(spec))
    again = kept_job(text)
    check_kept(again)
    assert (again["spec"], again["status"]) == (spec, {"phase": "Queued"})
    assert len(text) < 100_000


def test_of_a_spec_that_is_too_large_for_a_driver_nothing_is_kept() -> None:
    text = job_text(item({"steps": 1, "note": noise(10**6)}))
    assert len(text) < 500
    with pytest.raises(TooLarge, match=r"spec: has \d+ bytes when packed, and 98304 .* put long texts into files"):
        check_kept(kept_job(text))


def test_the_user_of_such_a_job_is_told() -> None:
    async def run() -> None:
        async with a_case() as case, case.operator(reconcile):
            await case.api.put("rljobs", manifest(environment={"common": {"A": noise(300_000)}}))
            await until(lambda: "fit into a driver's environment" in case.status().get("message", ""), case.status)
            assert case.status()["phase"] == "Pending"

    asyncio.run(run())


def test_specs_are_kept_up_to_a_size_and_not_up_to_a_number() -> None:
    cache, spec = SpecCache(), RLJobSpec.model_construct()
    for number in range(3000):
        cache.keep(str(number), 1, spec, {"x": "y" * 3000})
    kept = [number for number in range(3000) if cache.get(str(number), 1) is not None]
    assert 1000 < len(kept) < 1500
    assert kept[-1] == 2999
    cache.keep("large", 1, spec, {"x": "y" * 2**20})
    assert cache.get("large", 1) is None
    assert [number for number in kept if cache.get(str(number), 1) is not None] == kept
    cache.drop("2999", 1)
    assert cache.get("2999", 1) is None


def test_specs_that_are_kept_are_what_they_were_and_can_be_changed_by_copies() -> None:
    cache, texts = SpecCache(), [manifest(), manifest(steps=7)]
    for number, text in enumerate(texts):
        spec = RLJobSpec.model_validate(text["spec"])
        before = spec.model_copy(deep=True)
        cache.keep(str(number), 1, spec, text["spec"])
        assert spec == before
        assert spec.model_dump(exclude_unset=True) == before.model_dump(exclude_unset=True)
    first, second = (cache.get(str(number), 1) for number in range(2))
    assert first is not None
    assert second is not None
    changed = first.rollout.model_copy(update={"partial": None, "seed": 1})
    assert "seed" in changed.model_fields_set
    assert "seed" not in second.rollout.model_fields_set
