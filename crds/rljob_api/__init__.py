"""The RLJob API: the only schema source of the project."""

from rljob_api.spec import RLJobSpec

__all__ = ["RLJobSpec"]
