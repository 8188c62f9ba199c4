"""Rendezvous of the workers of a vLLM engine: in a file, since all of them are on one node.

vLLM has them meet at a TCP store, which listens on every address of the machine and takes keys from anyone.
"""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

from rljob_worker.upstream.patch import VLLM, Patch, Process


def meet_in(folder: Path) -> None:
    """Have the engines that this process makes meet in files of a folder that nobody else can enter."""
    import vllm.utils.network_utils as network

    original = network.get_distributed_init_method

    def init_method(ip: str, port: int) -> str:
        # vLLM names shared memory by what follows the last colon: with TCP, the port.
        return f"file://{folder}/engine:{uuid.uuid4().hex[:12]}"

    # Executors, also those of other platforms, have it under their own name, now or when they are imported.
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm")]:
        if vars(module).get(original.__name__) is original:
            setattr(module, original.__name__, init_method)


PATCHES = (
    Patch(
        "vllm-meeting-place",
        ("vllm.utils.network_utils.get_distributed_init_method",),
        {"vllm": VLLM},
        "vLLM's workers meet at a TCP store, which listens on every address of the machine and takes keys from anyone",
        "tests/worker/driver/test_closed_ports.py::test_a_stranger_reaches_nothing",
        meet_in,
        (Process.ENGINE,),
        scoped=True,
    ),
)
