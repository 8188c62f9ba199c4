"""The job's prompts by number: drawn from the data, and each closed once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from rljob_worker.data.dataset import PromptSource
from rljob_worker.flow import Fate, Frontier
from rljob_worker.types import Prompt


class NumberedPrompt(NamedTuple):
    """A prompt and its ordinal: its number in the data, in the order of this job."""

    ordinal: int
    prompt: Prompt


class PromptLedger:
    """Which prompts were trained on, which a filter took, and which are open.

    A step draws prompts and settles at its end what became of them; what it drew and did not close comes first in the
    next step, with new samples. State is only taken between steps, so that a step that is not completed never was.

    Args:
        source: the data.
    """

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self._frontier = Frontier()
        self._waiting: dict[int, Prompt] = {}
        """Open, and not drawn by the running step."""
        self._drawn: dict[int, Prompt] = {}
        self._skipped: list[int] = []
        """Closed as such, and not reported yet."""

    def draw(self, count: int) -> list[NumberedPrompt]:
        """Prompts for the running step, those that an earlier step left open first."""
        again = sorted(self._waiting)[:count]
        drawn = [NumberedPrompt(ordinal, self._waiting.pop(ordinal)) for ordinal in again]
        while len(drawn) < count:
            fresh = self._source.next_prompts(count - len(drawn))
            numbered = list(map(NumberedPrompt, self._frontier.open(len(fresh)), fresh))
            self._skip(one.ordinal for one in numbered if self._source.skips(one.prompt.uid))
            drawn += [one for one in numbered if not self._source.skips(one.prompt.uid)]
        self._drawn.update(drawn)
        return drawn

    def _skip(self, ordinals: Iterable[int]) -> None:
        skipped = list(ordinals)
        self._frontier.close(skipped, Fate.SKIPPED)
        self._skipped += skipped

    def take_skipped(self) -> list[int]:
        """Prompts that were left out since the last time (`spec.data.skip`)."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def waiting(self) -> dict[int, Prompt]:
        """Prompts that are open and not drawn by the running step, by number."""
        return dict(self._waiting)

    @property
    def mended(self) -> tuple[str, ...]:
        """Rows that have another content since the cursor was saved that was restored."""
        return self._source.mended

    def settle(self, consumed: Iterable[int], filtered: Iterable[int]) -> None:
        """The running step is done: close what it trained on and what its filter took; the rest stays open.

        Raises:
            ValueError: one of them is not open; names it.
        """
        for ordinals, fate in ((consumed, Fate.CONSUMED), (filtered, Fate.FILTERED)):
            closed = list(ordinals)
            self._frontier.close(closed, fate)
            for ordinal in closed:
                del self._drawn[ordinal]
        self._waiting |= self._drawn
        self._drawn = {}

    @property
    def next_ordinal(self) -> int:
        """The first that was never drawn."""
        return self._frontier.next

    def open_ordinals(self) -> list[int]:
        """Drawn and not closed, in order."""
        return self._frontier.open_ordinals

    def state(self) -> dict[str, Any]:
        """The cursor of the data with the ledger, as a JSON value."""
        waiting = {str(ordinal): prompt.uid for ordinal, prompt in sorted(self._waiting.items())}
        return self._source.state() | {"ledger": self._frontier.state() | {"prompts": waiting}}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        A state without a ledger is of a version that trained on every prompt that it drew.

        Raises:
            UserError: it is of other data.
            ValueError: the ledger in it does not add up.
        """
        self._source.restore(state)
        drawn = sum(source["drawn"] for source in state["sources"])
        ledger = state.get("ledger", {"next": drawn, "open": [], "consumed": drawn, "filtered": 0, "prompts": {}})
        self._frontier = Frontier.restore(ledger)
        if self._frontier.next != drawn:
            raise ValueError(f"the ledger counts {self._frontier.next} prompts, but the data gave {drawn}")
        waiting = {int(ordinal): uid for ordinal, uid in ledger["prompts"].items()}
        if sorted(waiting) != self._frontier.open_ordinals:
            raise ValueError(f"prompts {self._frontier.open_ordinals} are open, but named are {sorted(waiting)}")
        prompts = self._source.prompts_of(list(waiting.values()))
        self._waiting, self._drawn = dict(zip(waiting, prompts)), {}
        self._skipped = []
        left_out = [ordinal for ordinal, prompt in self._waiting.items() if self._source.skips(prompt.uid)]
        self._skip(left_out)
        for ordinal in left_out:
            del self._waiting[ordinal]
