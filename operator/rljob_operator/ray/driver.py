"""The driver's own endpoint: where the training is, its step records, and a checkpoint on request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp

from rljob_operator.ray.http import Endpoint, NoAnswer, whole

PAGE = 1000
"""Most records in one answer (`rljob_worker.records.http`)."""
PAGE_BYTES = 2**22
"""Most bytes of such an answer: a driver ends it with the record that takes it past half of that."""
_MOST_RECORDS = 2**53


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """`/v1/status`."""

    ready: bool
    step: int
    attempt: int
    phase: str | None
    stopping: bool
    last_checkpoint_step: int | None
    weight_version: int | None


@dataclass(frozen=True, slots=True)
class StepsPage:
    """`/v1/steps`."""

    records: list[dict[str, Any]]
    total: int
    """Records that there are."""


class Driver:
    """Asks one driver.

    Args:
        session: carries the requests.
        address: `http://host:8300`.
        token: from the job's Secret.
        seconds: deadline of one request.
    """

    def __init__(self, session: aiohttp.ClientSession, address: str, token: str | None, seconds: float = 10.0) -> None:
        self._endpoint = Endpoint(session, "The driver", address, token, seconds)

    async def status(self) -> DriverStatus:
        """Where the training is.

        Raises:
            NoAnswer: the driver did not answer, or not as a driver does.
        """
        answer = await self._endpoint.json("GET", "/v1/status")
        try:
            saved, version = answer["last_checkpoint_step"], answer.get("weight_version")
            return DriverStatus(
                ready=bool(answer["ready"]),
                step=whole(answer["step"], "step"),
                attempt=whole(answer["attempt"], "attempt"),
                phase=_phase(answer["phase"]),
                stopping=bool(answer["stopping"]),
                last_checkpoint_step=None if saved is None else whole(saved, "last_checkpoint_step"),
                weight_version=None if version is None else whole(version, "weight_version"),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise NoAnswer(f"The driver answered what is no status: {error!r}") from None

    async def steps(self, after: int, largest: int = PAGE_BYTES) -> StepsPage:
        """The first records whose `index` is above `after` (-1: all): at most 1000, and as many as fit into an answer.

        Raises:
            AnswerTooLarge: the answer has more than `largest` bytes.
            NoAnswer: the driver did not answer, or not as a driver does.
        """
        answer = await self._endpoint.json("GET", f"/v1/steps?after={after}", largest=largest)
        try:
            records, total = answer["steps"], whole(answer["total"], "total", most=_MOST_RECORDS)
            if not isinstance(records, list) or len(records) > PAGE:
                raise TypeError(f"steps is no list of at most {PAGE} records")
            if not all(isinstance(record["index"], int) for record in records):
                raise TypeError("a record's index is no whole number")
        except (KeyError, TypeError, ValueError) as error:
            raise NoAnswer(f"The driver answered what are no step records: {error!r}") from None
        return StepsPage(records, total)

    async def checkpoint(self) -> None:
        """Ask for a checkpoint at the next step boundary.

        Raises:
            NoAnswer: the driver did not take the request.
        """
        await self._endpoint.json("POST", "/v1/checkpoint")


def _phase(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise ValueError("phase is no text")
