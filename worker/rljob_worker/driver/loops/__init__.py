"""The modes: a loop for each, a class in a file, over the same objects."""

from collections.abc import Callable, Mapping
from typing import Any

from rljob_api.spec import Mode
from rljob_worker.driver.job import Job, Surroundings
from rljob_worker.driver.loops.colocated import ColocatedLoop
from rljob_worker.driver.loops.lockstep import LockstepLoop
from rljob_worker.driver.loops.overlapped import OverlappedLoop

LOOPS: Mapping[Mode, Callable[[Surroundings], Job[Any]]] = {
    Mode.COLOCATED: ColocatedLoop,
    Mode.DISAGGREGATED: LockstepLoop,
    Mode.ASYNC: OverlappedLoop,
}
