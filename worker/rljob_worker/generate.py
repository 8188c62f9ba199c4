"""Write what the API must know of the worker's algorithms: `python -m rljob_worker.generate [--check]`."""

from __future__ import annotations

import json
import sys
from dataclasses import fields

from rljob_api.algorithms import FACTS_FILE, AlgorithmFacts
from rljob_api.generate import write_or_check
from rljob_worker.algorithms import registered


def generated_files() -> dict[str, str]:
    """Return path below the repository -> content."""
    names = [field.name for field in fields(AlgorithmFacts)]
    facts = [{name: getattr(algorithm, name) for name in names} for algorithm in registered().values()]
    return {FACTS_FILE: json.dumps(facts, indent=2) + "\n"}


if __name__ == "__main__":
    sys.exit(write_or_check(generated_files, __doc__))
