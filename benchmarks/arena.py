"""Sleep and wake-up of the arena against a memory copy of the same bytes, in one run.

    python benchmarks/arena.py [--mebibytes 64 256 1024] [--repeats 7]

Half of each size has tag `backup`, half `discard`. The peer is `Tensor.copy_` between two touched buffers of that many
bytes: what giving memory away would cost at least once if it were copied out (and once more to copy it back). All
figures are medians. Exits with 1 when sleep + wake takes longer than one copy, or leaves pages resident.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from figures import Figure, report

from rljob_worker.memory.arena import Arena

MIB = 1024 * 1024
LIMIT = 1.0


@dataclass(frozen=True)
class Result:
    mebibytes: int
    sleep_seconds: float
    wake_seconds: float
    copy_seconds: float
    refault_seconds: float
    resident_asleep: int
    backup_resident: int

    @property
    def ratio(self) -> float:
        return (self.sleep_seconds + self.wake_seconds) / self.copy_seconds


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(mebibytes: int, repeats: int) -> Result:
    half = mebibytes * MIB // 8
    arena = Arena(2 * mebibytes * MIB)
    kept, dropped = arena.allocate((half,)).fill_(1), arena.allocate((half,), tag="discard").fill_(1)
    sleeps, wakes, refaults, resident = [], [], [], []
    for _ in range(repeats):
        sleeps.append(seconds(arena.pause))
        resident.append((arena.resident_bytes(), arena.backup_resident_bytes()))
        wakes.append(seconds(arena.resume))
        refaults.append(seconds(partial(dropped.fill_, 1)))
    if not bool((kept == 1).all()):
        raise RuntimeError("contents changed over sleep and wake-up")
    del kept, dropped
    arena.close()
    source, target = torch.ones(2 * half), torch.ones(2 * half)
    copies = [seconds(lambda: target.copy_(source)) for _ in range(repeats)]
    sleep, wake, copy, refault = (statistics.median(values) for values in (sleeps, wakes, copies, refaults))
    return Result(mebibytes, sleep, wake, copy, refault, max(r for r, _ in resident), max(b for _, b in resident))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[64, 256, 1024], help="sizes to measure")
    parser.add_argument("--repeats", type=int, default=7, help="cycles and copies of each size")
    options = parser.parse_args()
    print(f"{'MiB':>6} {'sleep ms':>9} {'wake ms':>8} {'copy ms':>8} {'ratio':>6} ", end="")
    print(f"{'refill ms':>9} {'asleep: resident':>17} {'backup MiB':>11}")
    figures = []
    for mebibytes in options.mebibytes:
        result = measure(mebibytes, options.repeats)
        if result.resident_asleep:
            raise SystemExit(f"{mebibytes} MiB: {result.resident_asleep} bytes were resident asleep")
        what = f"seconds of the arena's sleep + wake, {mebibytes} MiB"
        figures.append(Figure(what, "a memory copy of the same bytes", result.ratio, LIMIT, at_most=True))
        print(
            f"{mebibytes:>6} {result.sleep_seconds * 1e3:>9.2f} {result.wake_seconds * 1e3:>8.2f} "
            f"{result.copy_seconds * 1e3:>8.2f} {result.ratio:>6.3f} {result.refault_seconds * 1e3:>9.2f} "
            f"{result.resident_asleep:>17} {result.backup_resident / MIB:>11.0f}"
        )
    return report(figures)


if __name__ == "__main__":
    sys.exit(main())
