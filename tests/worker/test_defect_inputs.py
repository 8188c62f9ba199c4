"""A folder of inputs that once failed, as a whole: `RLJOB_DEFECTS` names a copy of it in which its `mk.py` has run.

Each kind has tests of its own (docs/testing.md); nothing here depends on the folder, and without it nothing is tested.
"""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.validation import ManifestError, load_manifest
from rljob_worker.cli.first_look import look_first
from rljob_worker.cli.main import main
from rljob_worker.errors import UserError
from rljob_worker.rewards.builtin import gsm8k
from rljob_worker.rewards.math_reward import math

FOLDER = Path(os.environ.get("RLJOB_DEFECTS", "/nowhere"))
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="RLJOB_DEFECTS names no folder")


def test_pairs_of_response_and_label_are_judged_right() -> None:
    wrong, count = [], 0
    for path in sorted(FOLDER.glob("*/pairs.jsonl")):
        for pair in map(json.loads, path.read_text().splitlines()):
            count += 1
            try:
                score: Any = (
                    gsm8k(pair["response"], pair["label"], flexible=pair["flexible"])
                    if "flexible" in pair
                    else math(pair["response"], pair["label"])
                )
            except Exception as error:
                score = type(error).__name__
            # A label that is no number is refused before a job starts, which a single call says by raising.
            refused = "flexible" in pair and pair["right"] not in (0, 1) and isinstance(score, str)
            if score != pair["right"] and not refused:
                wrong.append((path.parent.name, pair, score))
    assert count > 20
    assert not wrong


def _keys() -> list[str]:
    """Settings of keys that YAML reads as something else."""
    lines = (FOLDER / "manifests" / "keys.yaml").read_text().splitlines() if FOLDER.is_dir() else []
    settings = []
    for line in lines:
        place, _, value = line.partition(": ")
        if not line.startswith("#") and value:
            place = place.partition(" ")[0]
            settings.append(f"{place if place.startswith('metadata') else f'spec.{place}'}={value}")
    return settings


@pytest.mark.parametrize("setting", _keys())
def test_a_key_that_yaml_reads_otherwise_is_named(setting: str) -> None:
    with pytest.raises(ManifestError, match=r"YAML reads this key as .*; write it in quotation marks"):
        load_manifest(QUICKSTART, [setting])


def _accepted() -> list[dict[str, Any]]:
    path = FOLDER / "manifests" / "accepted.yaml"
    return yaml.safe_load(path.read_text()) if path.is_file() else []


@pytest.mark.parametrize("settings", _accepted(), ids=json.dumps)
def test_what_was_accepted_is_refused_before_anything_starts(settings: dict[str, Any], tmp_path: Path) -> None:
    overrides = [f"spec.{block}={json.dumps(fields)}" for block, fields in settings.items() if block == "mode"]
    for block, fields in settings.items():
        if block != "mode":
            overrides += [f"spec.{block}.{name}={json.dumps(value)}" for name, value in fields.items()]
    if "mode" in settings:
        overrides = [one.replace('"', "") for one in overrides]
    with pytest.raises((ManifestError, UserError)) as refused:
        look_first(load_manifest(QUICKSTART, overrides), tmp_path / "run", None, on_this_machine=True)
    (block,) = [block for block in settings if block not in ("mode", "algorithm")][:1]
    assert f"spec.{block}." in str(refused.value) or "spec.algorithm" in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "code", "said"),
    [
        ("label-types/decimal.yaml", 0, "label '18.90'"),
        ("label-types/date.yaml", 0, "label '2024-02-29'"),
        ("label-types/bytes.yaml", 0, "label '7'"),
        ("label-types/nan.yaml", 2, "row 1"),
        ("same-mount-message/job.yaml", 2, "spec.storage.volumes"),
        ("kueue-label-on-job/job.yaml", 0, "is valid"),
        ("math-dollar-label/job.yaml", 0, "is valid"),
        ("messages-as-json-text/job.yaml", 0, "<|im_start|>system"),
        ("template-without-generation-prompt/job.yaml", 2, "add_generation_prompt"),
        ("tokenizer-adds-eos/job.yaml", 0, "is valid"),
        ("resume-dead-end/job.yaml", 0, "is valid"),
    ],
)
def test_a_job_is_valid_or_refused_as_its_folder_says(
    job: str, code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its model's path is relative to it.
    monkeypatch.chdir((FOLDER / job).parent)
    assert main(["validate", Path(job).name]) == code
    shown = capsys.readouterr()
    assert said in shown.out + shown.err
    assert "namespace(" not in shown.err


@pytest.mark.slow
@pytest.mark.parametrize("script", ["masked_first.py", "k3_far.py"])
def test_the_numerical_faults(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FOLDER / "numerics" / script))
    said = capsys.readouterr().out
    assert said
    assert "IndexError" not in said
    assert "nan" not in said
