"""Requirements of vLLM's kernels for CPUs on the machine."""

from __future__ import annotations

import ctypes

from rljob_worker.errors import UserError

LIBRARIES = {"libnuma.so.1": "libnuma1 on Debian and Ubuntu, numactl-libs elsewhere"}
"""Libraries that the kernels are linked to and no Python package brings, and the system's package that has them."""


def check_cpu_libraries() -> None:
    """Tell which library is missing: vLLM only logs that its kernels cannot be loaded, and fails later by another name.

    Raises:
        UserError: names the library and its package.
    """
    for library, package in LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError as error:
            raise UserError(f"vLLM's CPU kernels need {library} ({package}): {error}") from None
