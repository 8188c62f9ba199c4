"""The driver's own endpoint: where the training is, its step records, and a checkpoint on request."""

from __future__ import annotations

import aiohttp

from rljob_api.wire import names
from rljob_api.wire.driver_status import DriverStatus
from rljob_api.wire.steps_page import LARGEST_PAGE_BYTES, StepsPage
from rljob_api.wire.values import WireError
from rljob_operator.ray.http import Endpoint, NoAnswer


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
        """State of the training.

        Raises:
            NoAnswer: the driver did not answer, or not as a driver does.
        """
        answer = await self._endpoint.json("GET", names.STATUS_PATH)
        try:
            return DriverStatus.parse(answer)
        except WireError as error:
            raise NoAnswer(f"The driver answered what is no status: {error}") from None

    async def steps(self, after: int, largest: int = LARGEST_PAGE_BYTES) -> StepsPage:
        """The first records whose `index` is above `after` (-1: all): at most 1000, and as many as fit into an answer.

        Raises:
            AnswerTooLarge: the answer has more than `largest` bytes.
            NoAnswer: the driver did not answer, or not as a driver does.
        """
        answer = await self._endpoint.json("GET", f"{names.STEPS_PATH}?after={after}", largest=largest)
        try:
            return StepsPage.parse(answer)
        except WireError as error:
            raise NoAnswer(f"The driver answered what are no step records: {error}") from None

    async def checkpoint(self) -> None:
        """Ask for a checkpoint at the next step boundary.

        Raises:
            NoAnswer: the driver did not take the request.
        """
        await self._endpoint.json("POST", names.CHECKPOINT_PATH)

    async def trace(self, largest: int) -> bytes:
        """The run's trace so far, packed.

        Raises:
            AnswerTooLarge: it has more than `largest` bytes.
            NoAnswer: the driver did not answer in time, or is making another one.
        """
        return await self._endpoint.content("GET", names.TRACE_PATH, largest=largest)

    async def profile(self, query: str) -> None:
        """Ask for profiles of steps, by the parameters of the request.

        Raises:
            NoAnswer: the driver did not take the request.
        """
        await self._endpoint.json("POST", f"{names.PROFILE_PATH}?{query}")

    async def want_engine_nodes(self, nodes: int) -> None:
        """Ask for so many nodes with engines.

        Raises:
            NoAnswer: the driver did not take the request.
        """
        await self._endpoint.json("POST", f"{names.ENGINE_NODES_PATH}?wanted={nodes}")
