"""Filling a slot of the weight sync with bf16 values of fp32 rows, checksum and all, against a memory copy.

The copy is of as many bytes as are sent, from bf16 to bf16, and reads half of what the rows are. Both take turns on
one thread; medians are compared. Exits with 1 when the ratio misses its limit.

    python benchmarks/rounded_fill.py [--mebibytes 128] [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from figures import Figure, report

from rljob_worker.weightsync.shared_memory import HostMemory

LIMIT = 0.45
ROW = 1024


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=128, help="that are sent (default 128)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default 15)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = (arguments.mebibytes * 2**20 // torch.bfloat16.itemsize // ROW, ROW)
    rows, beside = torch.randn(shape), torch.randn(shape).bfloat16()
    memory = HostMemory.private(arguments.mebibytes * 2**20)
    slot, other = (memory.tensor(index, 0, torch.bfloat16, shape) for index in range(2))
    batch = memory.filling([(rows, slot)])
    # Once, so that pages are there; and what is measured is right.
    batch.run()
    other.copy_(beside)
    assert torch.equal(slot, rows.bfloat16())
    fills, copies = [], []
    for _ in range(arguments.rounds):
        fills.append(seconds(batch.run))
        copies.append(seconds(lambda: other.copy_(beside)))
    ratio = statistics.median(copies) / statistics.median(fills)
    return report(
        [Figure("filling a slot from fp32 rows, rounded to bf16, with checksum", "a memory copy", ratio, LIMIT)]
    )


if __name__ == "__main__":
    sys.exit(main())
