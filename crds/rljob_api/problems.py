"""Problems of a manifest, and the error that reports them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

ABSENT = object()


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a manifest."""

    path: str
    """`spec.rollout.topP`; empty: the whole document."""
    wrong: str
    allowed: str = ""
    value: Any = ABSENT
    rule: tuple[str, str] | None = None
    """Path and message with which an API server would say it, where that is less exact."""

    def __str__(self) -> str:
        parts = [part for part in (self.path, None if self.value is ABSENT else _short(self.value)) if part]
        text = ": ".join([*parts, self.wrong])
        return f"{text}; allowed: {self.allowed}" if self.allowed else text


class ManifestError(ValueError):
    """A manifest that cannot be used, with every problem found."""

    def __init__(self, problems: list[Problem], source: str = "manifest") -> None:
        self.problems = problems
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in problems)]))


def _short(value: Any) -> str:
    if hasattr(value, "__dict__") and not isinstance(value, str | int | float):
        return ""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
