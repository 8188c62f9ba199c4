"""The conventions that every block of the RLJob API shares."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """A block of the manifest: camelCase outside, snake_case inside, unknown fields refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        populate_by_name=False,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
    )
