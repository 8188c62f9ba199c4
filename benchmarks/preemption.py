"""Device-seconds that preemptions lose in a simulated day: Kueue with the operator's boosts, against Kueue alone.

    python benchmarks/preemption.py [--days 60]

One ClusterQueue of 128 NPUs with `withinClusterQueue: LowerPriority`. Training jobs of 8 to 64 NPUs and 1 to 8 hours
arrive every half hour on average, and save every 5 to 40 minutes; urgent jobs of 8 to 32 NPUs and 10 to 60 minutes
take their places. The same days are lived three times: as Kueue orders candidates (pkg/scheduler/preemption/common/
ordering.go: lower effective priority first, then the one admitted last; taken until the new one fits, then given
back in reverse order where it still fits), the same with the operator's `priority_boost`, which has the state of ten
seconds ago, and with a boost by device-seconds in place of seconds. Lost is what a job did since its last checkpoint
or, before the first, since its admission, times its devices.

The model's choice between two jobs was compared with a real Kueue (main at ff69552, 2026-08, gate PriorityBoost on and
off): docs/install.md says what it did.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / part) for part in ("crds", "operator")]

from figures import Figure, report  # noqa: E402

from rljob_operator.state.preemption import priority_boost  # noqa: E402

QUOTA = 128
DAY = 86400.0
HOUR = 3600.0
URGENT = 100
LOOK_SECONDS = 10.0
LOSS_LIMIT = 0.75
LOADS = (1.5, 3.0, 6.0)
"""Urgent jobs in an hour."""


@dataclass(eq=False)
class Job:
    """One job of the day; times in seconds since its beginning."""

    arrival: float
    devices: int
    work: float
    priority: int
    save_every: float
    start_seconds: float
    saved_work: float = 0.0
    admitted: float = 0.0

    @property
    def end(self) -> float:
        """When it is done if nobody takes its place."""
        return self.admitted + self.start_seconds + self.work - self.saved_work

    def unsaved(self, now: float) -> float:
        """Seconds since its last checkpoint or its admission."""
        saves = self._saves(now)
        return now - self.admitted - (self.start_seconds + saves * self.save_every if saves else 0.0)

    def preempt(self, now: float) -> float:
        """It goes back to the queue; returns the device-seconds that are lost."""
        lost = self.devices * self.unsaved(now)
        self.saved_work += self._saves(now) * self.save_every
        return lost

    def _saves(self, now: float) -> int:
        return math.floor(max(0.0, now - self.admitted - self.start_seconds) / self.save_every)


Boost = Callable[[Job, float], int]


def seconds_boost(job: Job, now: float) -> int:
    """The operator's."""
    return priority_boost(job.unsaved(max(job.admitted, now - LOOK_SECONDS)))


def device_seconds_boost(job: Job, now: float) -> int:
    """Boost that counts a job's size too; eight devices are boosted as they are above."""
    return priority_boost(job.devices / 8 * job.unsaved(max(job.admitted, now - LOOK_SECONDS)))


@dataclass
class Day:
    """A queue for a day."""

    boost: Boost
    running: list[Job] = field(default_factory=list)
    queue: list[Job] = field(default_factory=list)
    lost: float = 0.0
    preemptions: int = 0

    def live(self, jobs: list[Job]) -> None:
        """From midnight to midnight."""
        coming = sorted(jobs, key=lambda job: job.arrival, reverse=True)
        while True:
            now = min([job.end for job in self.running] + [job.arrival for job in coming[-1:]], default=DAY)
            if now >= DAY:
                return
            self.running = [job for job in self.running if job.end > now]
            while coming and coming[-1].arrival <= now:
                self.queue.append(coming.pop())
            for job in sorted(self.queue, key=lambda job: (-job.priority, job.arrival)):
                self._try(job, now)

    def _try(self, job: Job, now: float) -> None:
        free = QUOTA - sum(other.devices for other in self.running)
        targets = self._targets(job, now, free) if job.devices > free else []
        if targets is None:
            return
        for target in targets:
            self.running.remove(target)
            self.queue.append(target)
            self.lost += target.preempt(now)
            self.preemptions += 1
        job.admitted = now
        self.queue.remove(job)
        self.running.append(job)

    def _targets(self, job: Job, now: float, free: int) -> list[Job] | None:
        priority = {other: other.priority + self.boost(other, now) for other in self.running}
        candidates = [other for other in self.running if priority[other] < job.priority]
        targets: list[Job] = []
        for other in sorted(candidates, key=lambda other: (priority[other], -other.admitted)):
            targets.append(other)
            free += other.devices
            if free >= job.devices:
                return _filled_back(targets, free - job.devices)
        return None


def _filled_back(targets: list[Job], spare: int) -> list[Job]:
    """Without those that fit beside the new job after all, the last but one first."""
    for target in targets[-2::-1]:
        if target.devices <= spare:
            spare -= target.devices
            targets.remove(target)
    return targets


def jobs_of(seed: int, urgent_in_an_hour: float) -> list[Job]:
    """The jobs of a day, new each time that they are asked for."""
    dice = random.Random(seed)

    def arrivals(in_an_hour: float) -> Iterator[float]:
        now = dice.expovariate(in_an_hour / HOUR)
        while now < DAY:
            yield now
            now += dice.expovariate(in_an_hour / HOUR)

    def training(now: float) -> Job:
        every = dice.choice([60, 120]) * dice.choice([5, 10, 20])
        devices = dice.choice([8, 8, 16, 16, 32, 64])
        return Job(now, devices, dice.uniform(1, 8) * HOUR, 0, every, dice.uniform(90, 240))

    def urgent(now: float) -> Job:
        return Job(now, dice.choice([8, 16, 32]), dice.uniform(600, HOUR), URGENT, math.inf, dice.uniform(60, 120))

    return [training(now) for now in arrivals(2.0)] + [urgent(now) for now in arrivals(urgent_in_an_hour)]


def lost_in(days: int, load: float, boost: Boost) -> tuple[float, int]:
    """Device-hours lost on all days together, and by how many preemptions."""
    lost, preemptions = 0.0, 0
    for seed in range(days):
        day = Day(boost)
        day.live(jobs_of(seed, load))
        lost, preemptions = lost + day.lost / HOUR, preemptions + day.preemptions
    return lost, preemptions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=60)
    days = parser.parse_args().days
    figures = []
    for load in LOADS:
        kinds: tuple[tuple[str, Boost], ...] = (
            ("Kueue alone", lambda job, now: 0),
            ("boost by seconds", seconds_boost),
            ("boost by device-seconds", device_seconds_boost),
        )
        results = {name: lost_in(days, load, boost) for name, boost in kinds}
        for name, (lost, preemptions) in results.items():
            print(f"{load:g} urgent jobs an hour, {name}: {lost / days:.0f} device-hours lost a day "
                  f"in {preemptions / days:.0f} preemptions", flush=True)  # fmt: skip
        alone, boosted = results["Kueue alone"][0], results["boost by seconds"][0]
        figures.append(
            Figure(
                f"device-seconds lost by preemptions, {load:g} urgent jobs an hour (simulated days)",
                "Kueue alone",
                boosted / alone,
                LOSS_LIMIT,
                at_most=True,
                note=f"{boosted / days:.0f} of {alone / days:.0f} device-hours a day",
            )
        )
    return report(figures)


if __name__ == "__main__":
    sys.exit(main())
