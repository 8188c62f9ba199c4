"""The standard streams of a process."""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Give the streams that the shell closed (`<&-`, `>&-`) to nothing.

    Python has none in their place, and the next file that is opened gets their number: a library that prints would
    write into it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)
        # Numbers are given from below, so that those before it are there.
        if opened != number and not _is_open(number):
            os.dup2(opened, number)
        if opened > 2:
            os.close(opened)
        else:
            os.set_inheritable(opened, True)
        setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
