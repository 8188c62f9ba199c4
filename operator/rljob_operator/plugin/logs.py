"""The driver's log: from Ray while its head is there, else the last lines that the status keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import aiohttp

from rljob_api.status import AttemptStatus
from rljob_operator.plugin.cluster import Cluster
from rljob_operator.plugin.head import Head, open_head
from rljob_operator.plugin.observe import parse_job
from rljob_operator.plugin.problems import CommandError
from rljob_operator.plugin.ray_log import open_log
from rljob_operator.ray.http import NoAnswer
from rljob_operator.ray.jobs import RayJobs
from rljob_operator.shell.api.resources import RAY_CLUSTERS, JobKey
from rljob_operator.shell.caches.views import cluster_state
from rljob_operator.state.observed import JobView, SubmissionState

_LOOK_SECONDS = 3.0


async def show_logs(
    cluster: Cluster, name: str, number: int | None, tail: int, follow: bool, say: Callable[[str], None]
) -> AsyncGenerator[str, None]:
    """The log of an attempt in pieces of text.

    Args:
        cluster: where the job is.
        name: the job.
        number: attempt; None: the newest.
        tail: only so many last lines; -1: all.
        follow: go on until the driver ends.
        say: gets remarks for the reader that are no part of the log.

    Raises:
        CommandError: there is no log to be had.
    """
    job = parse_job(await cluster.job(name))
    attempt = _attempt(job, number)
    item = await cluster.find(RAY_CLUSTERS, name)
    state = None if item is None else cluster_state(item)
    why = f"RayCluster {name} is gone" if state is None else f"RayCluster {name} has no head pod"
    if state is not None and state.owner_uid == job.uid and state.view.head_pod is not None:
        async with open_head(cluster, JobKey(job.namespace, job.name), job.uid, state) as head:
            try:
                async with aclosing(_from_ray(head, attempt, tail, follow)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except NoAnswer as error:
                why = str(error)
    for line in _kept(attempt, why, tail, say):
        yield line + "\n"


def _attempt(job: JobView, number: int | None) -> AttemptStatus:
    attempts = job.status.attempts
    if not attempts:
        raise CommandError(
            f"RLJob {job.name} has not been submitted yet, so there is no log; see `kubectl rljob why {job.name}`"
        )
    found = next((attempt for attempt in attempts if attempt.number == number), None)
    if number is not None and found is None:
        known = ", ".join(str(attempt.number) for attempt in attempts)
        raise CommandError(f"RLJob {job.name} has no attempt {number}; the status knows: {known}")
    return found or attempts[-1]


def _kept(attempt: AttemptStatus, why: str, tail: int, say: Callable[[str], None]) -> list[str]:
    lines = list(attempt.last_log_lines)
    if not lines:
        raise CommandError(
            f"the log of attempt {attempt.number} cannot be read: {why}; the status keeps none of its lines"
        )
    say(f"the log of attempt {attempt.number} cannot be read: {why}; these are the last lines that the status keeps")
    return lines if tail < 0 else lines[len(lines) - min(tail, len(lines)) :]


async def _from_ray(head: Head, attempt: AttemptStatus, tail: int, follow: bool) -> AsyncGenerator[str, None]:
    if attempt.submission_id is None:
        raise NoAnswer("it was never submitted")
    jobs = await head.jobs()
    submission = await jobs.get(attempt.submission_id)
    if submission.state is SubmissionState.MISSING:
        raise NoAnswer("this head has not run it")
    if not submission.log_file:
        raise NoAnswer("it has not run on a node")
    live = follow and submission.state.runs
    async with open_log(head, submission.log_file, tail, follow=live) as content:
        ended = asyncio.create_task(_ended(jobs, attempt.submission_id)) if live else None
        try:
            async with aclosing(_pieces(content, ended)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if ended is not None:
                ended.cancel()


async def _pieces(content: aiohttp.StreamReader, ended: asyncio.Task[None] | None) -> AsyncGenerator[str, None]:
    """Whole lines as they come; what comes in the moments after the driver's end is read too."""
    held = b""
    while True:
        read = asyncio.create_task(content.readany())
        waiting = {read} if ended is None or ended.done() else {read, ended}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not read.done() and ended is not None:
            ended.result()
            await asyncio.wait({read}, timeout=_LOOK_SECONDS)
        if not read.done():
            read.cancel()
            break
        chunk = read.result()
        if not chunk:
            break
        whole, line_break, rest = (held + chunk).rpartition(b"\n")
        held = rest
        if line_break:
            yield (whole + line_break).decode(errors="replace")
    if held:
        yield held.decode(errors="replace") + "\n"


async def _ended(jobs: RayJobs, name: str) -> None:
    """Return when the driver has ended. NoAnswer when its head is gone."""
    while (await jobs.get(name)).state.runs:
        await asyncio.sleep(_LOOK_SECONDS)
