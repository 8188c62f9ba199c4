"""Whatever happens to prompts, each is open, consumed or filtered, and no ledger forgets or doubles one."""

from __future__ import annotations

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rljob_worker.flow import Decision, Frontier
from rljob_worker.flow.frontier import LEDGER_KEYS


class Ledger(RuleBasedStateMachine):
    """A Frontier beside a dictionary with the state of every prompt ever opened."""

    def __init__(self) -> None:
        super().__init__()
        self.frontier = Frontier()
        self.known: dict[int, Decision | None] = {}

    def open_ones(self) -> list[int]:
        return [ordinal for ordinal, fate in self.known.items() if fate is None]

    @rule(count=st.integers(0, 5))
    def open(self, count: int) -> None:
        opened = self.frontier.open(count)
        assert list(opened) == list(range(len(self.known), len(self.known) + count))
        self.known |= dict.fromkeys(opened)

    @precondition(lambda self: self.open_ones())
    @rule(data=st.data(), fate=st.sampled_from(sorted(LEDGER_KEYS)))
    def close(self, data: st.DataObject, fate: Decision) -> None:
        some = data.draw(st.lists(st.sampled_from(self.open_ones()), unique=True))
        self.frontier.close(some, fate)
        self.known |= dict.fromkeys(some, fate)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), fate=st.sampled_from(sorted(LEDGER_KEYS)))
    def close_what_is_not_open(self, data: st.DataObject, fate: Decision) -> None:
        closed = [ordinal for ordinal, known in self.known.items() if known is not None]
        wrong = data.draw(st.sampled_from([*closed, len(self.known), -1]))
        with pytest.raises(ValueError, match=f"prompt {wrong} is to be {fate}, but"):
            self.frontier.close([*self.open_ones(), wrong], fate)

    @rule()
    def restart(self) -> None:
        self.frontier = Frontier.restore(json.loads(json.dumps(self.frontier.state())))

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        assert self.frontier.open_ordinals == sorted(self.open_ones())
        assert self.frontier.next == len(self.known)
        for fate, key in LEDGER_KEYS.items():
            assert self.frontier.state()[key] == sum(known is fate for known in self.known.values())


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30)


def test_closing_a_prompt_twice_at_once_changes_nothing() -> None:
    frontier = Frontier()
    frontier.open(2)
    with pytest.raises(ValueError, match="prompt 1 is to be trained twice at once"):
        frontier.close([0, 1, 1], Decision.TRAINED)
    assert frontier.open_ordinals == [0, 1]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"next": 3, "open": [0], "consumed": 1, "filtered": 0},
        {"next": 2, "open": [0, 0], "consumed": 0, "filtered": 0},
        {"next": 1, "open": [1], "consumed": 0, "filtered": 0},
        {"next": 1, "open": [0, 0], "consumed": 0, "filtered": -1},
        {"next": "many", "open": [], "consumed": 0, "filtered": 0},
    ],
)
def test_a_ledger_that_does_not_add_up_is_refused(state: dict) -> None:
    with pytest.raises(ValueError, match="ledger of prompts"):
        Frontier.restore(state)
