"""The conventions that every block of the RLJob API shares, and the scalar types that its fields are made of."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

PositiveInt = Annotated[int, Field(ge=1, le=INT32_MAX, json_schema_extra={"format": "int32"})]
NonNegativeInt = Annotated[int, Field(ge=0, le=INT32_MAX, json_schema_extra={"format": "int32"})]
Seed = Annotated[int, Field(ge=0, le=INT64_MAX, json_schema_extra={"format": "int64"})]
Port = Annotated[int, Field(ge=1, le=65535, json_schema_extra={"format": "int32"})]
PositiveFloat = Annotated[float, Field(gt=0, le=1e9)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e9)]
FiniteFloat = Annotated[float, Field(ge=-1e9, le=1e9)]
"""The bounds are wide: larger numbers are slips of the keyboard, and seconds that no clock can wait for."""
Measured = Annotated[float, Field(ge=0)]
"""A measured value, which no bound may refuse."""
NodeCount = Annotated[int, Field(ge=1, le=16384, json_schema_extra={"format": "int32"})]
GroupSize = Annotated[int, Field(ge=1, le=4096, json_schema_extra={"format": "int32"})]
"""Devices of a node or of a parallel group."""
SampleCount = Annotated[int, Field(ge=1, le=10**6, json_schema_extra={"format": "int32"})]
TokenCount = Annotated[int, Field(ge=1, le=2**24, json_schema_extra={"format": "int32"})]
Fraction = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=253)]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$", max_length=32)]
CpuQuantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?m?$", max_length=32)]
FreeForm = dict[str, Any]
StringMap = dict[str, Annotated[str, Field(max_length=4096)]]


def keyed_by(field: str) -> dict[str, Any]:
    """Schema of a list whose blocks the API server identifies by a field: two managers may have different ones of
    it."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [field]}


class ApiModel(BaseModel):
    """A block of the manifest: camelCase outside, snake_case inside, unknown fields refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        allow_inf_nan=False,
        extra="forbid",
        frozen=True,
        populate_by_name=False,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
    )

    def canonical_json(self, include: Collection[str] | None = None) -> str:
        """JSON that is the same for equal blocks: keys of free mappings are sorted, as the API server keeps them.

        Args:
            include: only these fields; None: all.
        """
        return _in_order(self).model_dump_json(include=None if include is None else set(include))


class StatusModel(ApiModel):
    """A block of the status: an older reader passes over fields that a newer writer added; code writes by attribute."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)


def _in_order(value: Any) -> Any:
    """Copy of a value with the keys of all mappings sorted."""
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: _in_order(one) for name, one in value})
    if isinstance(value, dict):
        return {key: _in_order(value[key]) for key in sorted(value)}
    return [_in_order(one) for one in value] if isinstance(value, list) else value
