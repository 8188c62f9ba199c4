"""Step records of a real run, as its driver answers with them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("real_records.jsonl.gz")
"""Some steps of a run of `benchmarks/episodes.py --task frozen-lake`, an environment, on CPU devices."""


def real_records(source: Path = RECORDED) -> list[dict[str, Any]]:
    """The records of a run: from its folder, or a file of them."""
    path = source / "steps.jsonl" if source.is_dir() else source
    content = path.read_bytes()
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
    return [record for record in map(json.loads, lines) if record["step"] > 0]


def record_after(earlier: Sequence[dict[str, Any]], record: dict[str, Any]) -> dict[str, Any]:
    """A real record as that of the step after some of the operator tests' job, whose attempt is 0."""
    count = len(earlier)
    return {**record, "index": count, "step": count + 1, "attempt": 0, "rerun": False, "time": 1.8e9 + count}
