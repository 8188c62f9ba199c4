"""MindSpeed (branch core_r0.16.0), which makes megatron-core 0.16 run on Ascend NPUs.

It replaces names in torch and Megatron for the whole process: nothing of Megatron may have been imported before, and
the engine needs a process of its own.

vime (PR 285) patches Megatron's attention before it activates MindSpeed, so that MindSpeed finds the patched one. Here
the layer specification names `trainer.megatron.models.megatron_npu.FusionAttention`, and neither patch is in its way.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator

from rljob_worker.errors import UserError
from rljob_worker.upstream.patch import MEGATRON, MEGATRON_BACKEND, TORCH, Patch, Process

ADAPTOR = "mindspeed.megatron_adaptor"
ARGUMENTS = ("--optimizer-selection=fused_torch_adamw",)
"""MindSpeed's settings, as the command line that it parses.

Its own Adam counts updates in the parameter group, where neither a checkpoint nor a rollback would find them; torch's
keeps the count beside the moments. Megatron binds the class when it is imported, which the adaptor does: `repatch`
comes too late for it."""


def _activate() -> None:
    """Activate MindSpeed.

    Raises:
        UserError: MindSpeed or torch_npu is missing, or does not load.
        RuntimeError: Megatron was imported before: it has bound what MindSpeed would replace.
    """
    early = sorted(name for name in sys.modules if name.partition(".")[0] == "megatron")
    if early:
        raise RuntimeError(
            f"MindSpeed must be activated before Megatron is imported, and {early[0]} is there already; import "
            "megatron only after rljob_worker.upstream's install() has run"
        )
    for package, what in (
        ("torch_npu", "the torch_npu that fits this torch"),
        ("mindspeed", "MindSpeed, branch core_r0.16.0"),
    ):
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            raise UserError(f"{package} is not installed; use the worker image for Ascend, or install {what}")
    with _arguments(ARGUMENTS):
        try:
            importlib.import_module(ADAPTOR)
        except ImportError as error:
            raise UserError(
                f"{ADAPTOR} does not load ({error}); MindSpeed core_r0.16.0 needs megatron-core 0.16 and a torch_npu "
                "that fits torch, with CANN's set_env.sh sourced before Python starts"
            ) from error


@contextlib.contextmanager
def _arguments(own: tuple[str, ...]) -> Iterator[None]:
    """Show MindSpeed a command line of ours: it parses the process's, which is Ray's."""
    outer = sys.argv
    sys.argv = [outer[0] if outer else "", *own]
    try:
        yield
    finally:
        sys.argv = outer


PATCHES = (
    Patch(
        "mindspeed",
        ("torch", "megatron", "apex", "sys.argv"),
        {"megatron-core": MEGATRON, "torch": TORCH},
        "Megatron on NPUs; it replaces what it likes in torch and Megatron, and reads its settings from sys.argv",
        "tests/worker/trainer/megatron/test_platforms.py::test_mindspeed_is_activated_once_and_sees_our_command_line_alone",
        _activate,
        (Process.TRAINER,),
        ("npu",),
        backend=MEGATRON_BACKEND,
    ),
)
