"""The RLJob API: the only schema source of the project."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rljob_api.job import RLJob
    from rljob_api.spec import RLJobSpec
    from rljob_api.status import RLJobStatus
else:
    _MODULES = {"RLJob": "job", "RLJobSpec": "spec", "RLJobStatus": "status"}

    def __getattr__(name: str) -> object:
        """Import a model when it is asked for: processes that need a constant of this package start without them."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = ["RLJob", "RLJobSpec", "RLJobStatus"]
