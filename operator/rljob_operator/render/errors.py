"""Errors of specs that cannot be rendered."""

from __future__ import annotations


class RenderError(ValueError):
    """A spec that passes validation and still makes no objects that Kubernetes, KubeRay or HCCL would take."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        self.message = message
        super().__init__(f"{field}: {message}")
