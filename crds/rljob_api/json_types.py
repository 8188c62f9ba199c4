"""JSON as a type, for what is written: read-only, so that a `dict[str, str]` is JSON as it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | int | float | bool | None"
"""Any value of a JSON document."""
JsonObject: TypeAlias = "Mapping[str, Json]"
"""An object of a JSON document."""
