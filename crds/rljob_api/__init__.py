"""The RLJob API: the only schema source of the project."""

from rljob_api.job import RLJob
from rljob_api.spec import RLJobSpec
from rljob_api.status import RLJobStatus

__all__ = ["RLJob", "RLJobSpec", "RLJobStatus"]
