"""Main module of an operator inside a network namespace; its argument is the number of the namespace's open file."""

from __future__ import annotations

import ctypes
import os
import sys

from rljob_operator.main import main

if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), "Cannot enter the network namespace")
    os.close(descriptor)
    sys.exit(main([]))
