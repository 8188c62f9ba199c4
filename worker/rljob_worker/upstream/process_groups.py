"""torch's process groups, known and replaceable: `trainer.process_groups` gives them up while a trainer sleeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.distributed import ProcessGroup

from rljob_worker.upstream.patch import MEGATRON, TORCH, Patch, Process, put
from rljob_worker.upstream.references import References

MakeGroup = Callable[[], object]
"""A call of `torch.distributed.new_group` with its arguments."""
Made = Callable[[MakeGroup, ProcessGroup | None], None]
"""Called for a group with its maker, and with the group made here; None where this rank is not a member."""


@contextmanager
def recorded_groups(timeout: timedelta, made: Made) -> Iterator[None]:
    """Tell of each group made inside with `torch.distributed.new_group`, which gets `timeout`."""
    original: Callable[..., object] = dist.new_group

    def new_group(*args: object, **kwargs: object) -> object:
        # Megatron gives whole minutes.
        kwargs["timeout"] = timeout
        group = original(*args, **kwargs)
        made(partial(_new_group, *args, **kwargs), group if isinstance(group, ProcessGroup) else None)
        return group

    put(dist, new_group=new_group)
    try:
        yield
    finally:
        put(dist, new_group=original)


def _new_group(*args: object, **kwargs: object) -> object:
    new_group: Callable[..., object] = dist.new_group
    return new_group(*args, **kwargs)


PATCHES = (
    Patch(
        "torch-groups-recorded",
        ("torch.distributed.new_group",),
        {"torch": TORCH, "megatron-core": MEGATRON},
        "Megatron makes its groups itself; what made them makes them again, and the deadline is the job's",
        "tests/worker/trainer/test_process_groups.py::test_training_goes_on_bit_for_bit_and_nothing_grows",
        recorded_groups,
        (Process.TRAINER,),
        scoped=True,
    ),
    Patch(
        "torch-groups-replaced",
        ("every reference to a process group",),
        {"torch": TORCH, "megatron-core": MEGATRON},
        "a communicator holds device memory while anything refers to its group, and Megatron does in many places",
        "tests/worker/trainer/test_process_groups.py::test_training_goes_on_bit_for_bit_and_nothing_grows",
        References,
        (Process.TRAINER,),
        scoped=True,
    ),
)
