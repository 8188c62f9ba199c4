"""Ends a fork as Python ends a process, but frees no objects: each is in a page that the fork would copy first."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_UNFLUSHED = 120
"""Exit code of Python where the standard streams could not be flushed."""


def end(do: Callable[[], object]) -> NoReturn:
    """Do it and end this process: threads are waited for, what was registered is called, streams are flushed.

    Destructors of its libraries do not run. Where one has to (`torch_npu`: the stand-in for CANN gives memory back),
    this is an interpreter's whole end.
    """
    code = _code_of(do)
    if "torch_npu" in sys.modules:
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in {sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__}:
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            code = _UNFLUSHED
    os._exit(code)


def _code_of(do: Callable[[], object]) -> int:
    """The exit code of a main module that does this. Raises KeyboardInterrupt, which ends Python by its signal."""
    try:
        do()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
