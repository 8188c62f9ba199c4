"""The pool of groups: from the first token of a prompt until a step has trained on all its samples.

A group is *growing* while a sample of it may go on, *scoring* while it is complete and waits for rewards, and *ready*
once it has them. A step takes ready groups out; what it leaves is the next step's.

    draw, put -> a prompt is open (`Frontier`), and its group begins
    extend    -> growing, until all samples have ended
    scoring   -> its samples went to their rewards
    score     -> ready with the last of them
    take      -> out of the pool; its prompt is open until `settle`
    update    -> what a step finds or leaves: the same groups, or without what was sampled of some
    settle    -> prompts that were trained on or filtered are closed; the others can be drawn again
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rljob_worker.flow.episode import Episode
from rljob_worker.flow.frontier import Frontier
from rljob_worker.flow.group import Decision, Group
from rljob_worker.flow.prompts import NumberedPrompt, PromptData
from rljob_worker.types import Generation, Prompt, RewardResult


@dataclass(frozen=True, slots=True)
class PoolState:
    """The pool between two steps: what a checkpoint continues from.

    Attributes:
        cursor: of the data, with the ledger of prompts; a JSON value.
        groups: open ones, by ordinal.
    """

    cursor: dict[str, Any]
    groups: tuple[Group, ...] = ()


class OpenGroups:
    """Groups and their prompts; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._prompts: dict[int, Prompt] = {}
        self._groups: dict[int, Group] = {}
        self._results: dict[int, dict[int, RewardResult]] = {}
        """Results of groups that are being scored, by group and sample."""

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt of a group, which may have been taken since."""
        return self._prompts[ordinal]

    @property
    def groups(self) -> list[Group]:
        """All of them, by ordinal."""
        with self._lock:
            return [self._groups[ordinal] for ordinal in sorted(self._groups)]

    def __getitem__(self, ordinal: int) -> Group:
        return self._groups[ordinal]

    def get(self, ordinal: int) -> Group | None:
        """A group, if it is there."""
        with self._lock:
            return self._groups.get(ordinal)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._groups

    def counts(self) -> dict[str, int]:
        """Number of groups that are growing, scoring and ready."""
        groups = self.groups
        growing, ready = sum(not one.complete for one in groups), sum(bool(one.results) for one in groups)
        return {"growing": growing, "scoring": len(groups) - growing - ready, "ready": ready}

    def put(self, prompt: Prompt, group: Group) -> None:
        """Add a group."""
        with self._lock:
            self._prompts[group.ordinal], self._groups[group.ordinal] = prompt, group

    def extend(
        self, ordinal: int, parts: Mapping[int, Generation], version: int, texts: Mapping[int, str] | None = None
    ) -> Group:
        """Add what weights of `version` sampled of a group, by sample, and the texts of responses that end with it;
        returns the group with it."""
        with self._lock:
            grown = self._groups[ordinal] = self._groups[ordinal].extended(parts, version, texts)
            return grown

    def replace(self, ordinal: int, episodes: Iterable[Episode]) -> None:
        """Put another state of some samples in the place of what there is of them."""
        with self._lock:
            self._groups[ordinal] = self._groups[ordinal].with_episodes(episodes)

    def give_back(self, ordinal: int) -> None:
        """Drop a group that cannot become complete, if it has begun; its prompt stays open."""
        with self._lock:
            self._groups.pop(ordinal, None)

    def unscored(self) -> list[Group]:
        """Complete groups, by ordinal, that did not go to their rewards."""
        with self._lock:
            return [one for one in self.groups if one.complete and not one.results and one.ordinal not in self._results]

    def scoring(self, ordinal: int) -> None:
        """Note that a complete group goes to its rewards."""
        with self._lock:
            self._results[ordinal] = {}

    def score(self, ordinal: int, sample: int, result: RewardResult, *, renewed: bool = False) -> None:
        """Give a sample its reward; with that of the last one its group is ready.

        Args:
            ordinal: of the group. A reward may come after its group was dropped or taken.
            sample: number of the sample.
            result: its reward.
            renewed: of the group when it went to its rewards: results of what was dropped are not those of what was
                sampled again.
        """
        with self._lock:
            group, results = self._groups.get(ordinal), self._results.get(ordinal)
            if group is None or results is None or group.renewed is not renewed:
                return
            results[sample] = result
            if len(results) == len(group.episodes):
                self._groups[ordinal] = replace(group, results=tuple(results[index] for index in sorted(results)))
                del self._results[ordinal]

    def decide(self, ordinal: int, kept: bool) -> None:
        """Note what the job's function said of a group that is ready."""
        with self._lock:
            self._groups[ordinal] = replace(self._groups[ordinal], kept=kept)

    def take(self, ordinal: int) -> Group:
        """Take a group out; its prompt stays open, and is not drawn again, until `settle`."""
        with self._lock:
            self._results.pop(ordinal, None)
            return self._groups.pop(ordinal)


class GroupPool(OpenGroups):
    """All open prompts of a job, and the groups of those that have one; thread-safe.

    Args:
        data: where prompts come from.
    """

    def __init__(self, data: PromptData) -> None:
        super().__init__()
        self._data = data
        self._frontier = Frontier()
        self._waiting: set[int] = set()
        """Open prompts that no step has, and that have no group."""
        self._skipped: list[int] = []
        """Closed as such, and not reported yet."""
        self._saved = PoolState(self._cursor())

    @property
    def saved(self) -> PoolState:
        """The pool at the last `settle`; a step that is not settled never was."""
        return self._saved

    # --- prompts ------------------------------------------------------------------------------

    def draw(self, count: int) -> list[NumberedPrompt]:
        """Prompts for the running step, those that an earlier step left without a group first."""
        with self._lock:
            again = sorted(self._waiting)[:count]
            self._waiting.difference_update(again)
            drawn = [NumberedPrompt(ordinal, self._prompts[ordinal]) for ordinal in again]
            while len(drawn) < count:
                fresh = self._data.next_prompts(count - len(drawn))
                numbered = list(map(NumberedPrompt, self._frontier.open(len(fresh)), fresh))
                self._skip(one.ordinal for one in numbered if self._data.skips(one.prompt.uid))
                drawn += [one for one in numbered if not self._data.skips(one.prompt.uid)]
            self._prompts.update(drawn)
            return drawn

    def give_back(self, ordinal: int) -> None:
        """Same as in `OpenGroups`; the prompt is drawn again."""
        with self._lock:
            super().give_back(ordinal)
            self._waiting.add(ordinal)

    @property
    def next_ordinal(self) -> int:
        """The first that was never drawn."""
        return self._frontier.next

    def open_ordinals(self) -> list[int]:
        """Drawn and not closed, in order."""
        return self._frontier.open_ordinals

    def take_skipped(self) -> list[int]:
        """Prompts that were left out since the last time (`spec.data.skip`)."""
        skipped, self._skipped = self._skipped, []
        return skipped

    @property
    def mended(self) -> tuple[str, ...]:
        """Rows that have another content since the cursor was saved that was restored."""
        return self._data.mended

    # --- between steps ------------------------------------------------------------------------

    def update(self, groups: Sequence[Group]) -> None:
        """Put these in the place of all groups.

        Rewards that are still to come stay those of groups that are the same objects as before. Prompts whose group is
        not among them can be drawn again.
        """
        with self._lock:
            before, self._groups = self._groups, {one.ordinal: one for one in groups}
            kept = {ordinal for ordinal, one in self._groups.items() if before.get(ordinal) is one}
            self._results = {ordinal: scores for ordinal, scores in self._results.items() if ordinal in kept}
            self._waiting |= before.keys() - self._groups.keys()

    def settle(self, consumed: Iterable[int], filtered: Iterable[int]) -> None:
        """Close what the step trained on and what its filter took; the rest stays open, and `saved` is this.

        Raises:
            ValueError: one of them is not open; names it.
        """
        with self._lock:
            for ordinals, decision in ((consumed, Decision.TRAINED), (filtered, Decision.FILTERED)):
                closed = list(ordinals)
                self._frontier.close(closed, decision)
                for ordinal in closed:
                    del self._prompts[ordinal]
            self._waiting = self._prompts.keys() - self._groups.keys()
            self._saved = PoolState(self._cursor(), tuple(self.groups))

    def restore(self, cursor: dict[str, Any], groups: Sequence[Group], *, whole: bool = False) -> None:
        """Continue where a checkpoint was taken.

        A cursor without a ledger is of a version that trained on every prompt that it drew.

        Args:
            cursor: as `PoolState.cursor`.
            groups: as `PoolState.groups`.
            whole: they are one batch, as `still_good`.

        Raises:
            UserError: the cursor is of other data.
            ValueError: the ledger in it does not add up.
        """
        with self._lock:
            self._data.restore(cursor)
            drawn = sum(source["drawn"] for source in cursor["sources"])
            ledger = cursor.get("ledger", {"next": drawn, "open": [], "consumed": drawn, "filtered": 0, "prompts": {}})
            self._frontier = Frontier.restore(ledger)
            if self._frontier.next != drawn:
                raise ValueError(f"the ledger counts {self._frontier.next} prompts, but the data gave {drawn}")
            named = {int(ordinal): uid for ordinal, uid in ledger["prompts"].items()}
            if sorted(named) != self._frontier.open_ordinals:
                raise ValueError(f"prompts {self._frontier.open_ordinals} are open, but named are {sorted(named)}")
            self._prompts = dict(zip(named, self._data.prompts_of(list(named.values()))))
            self._skipped = []
            left_out = [ordinal for ordinal, prompt in self._prompts.items() if self._data.skips(prompt.uid)]
            self._skip(left_out)
            for ordinal in left_out:
                del self._prompts[ordinal]
            good = still_good(groups, self._prompts, self._data.mended, whole=whole)
            self._groups = {one.ordinal: replace(one, prompt_uid=self._prompts[one.ordinal].uid) for one in good}
            self._results = {}
            self._waiting = self._prompts.keys() - self._groups.keys()
            self._saved = PoolState(cursor, tuple(self.groups))

    def _skip(self, ordinals: Iterable[int]) -> None:
        skipped = list(ordinals)
        self._frontier.close(skipped, Decision.SKIPPED)
        self._skipped += skipped

    def _cursor(self) -> dict[str, Any]:
        prompts = {str(ordinal): self._prompts[ordinal].uid for ordinal in sorted(self._prompts)}
        return self._data.state() | {"ledger": self._frontier.state() | {"prompts": prompts}}


def still_good(
    carried: Sequence[Group], prompts: Mapping[int, Prompt], mended: Collection[str] = (), *, whole: bool
) -> tuple[Group, ...]:
    """Groups that were carried over, without those whose prompt is left out by now; one with other tokens begins anew,
    and one of a mended row with pictures, of which tokens tell sizes alone.

    Args:
        carried: as a checkpoint has them.
        prompts: the open ones, by number.
        mended: rows that have another content by now.
        whole: they are one batch, which is sampled anew where a group of it is no good any more.
    """
    good: list[Group] = []
    for one in carried:
        prompt = prompts.get(one.ordinal)
        # With an environment the prompt was made of what that said: whether it still does is seen when it goes on.
        same = prompt is None or prompt.environment is not None or one.prompt_tokens == prompt.token_ids
        same = same and not (prompt is not None and prompt.pictures and prompt.uid in mended)
        if prompt is not None and not same:
            begun = Group.begun(one.ordinal, prompt, len(one.episodes), one.seed, one.admitted_version)
            one = replace(begun, deferred_at=one.deferred_at)
        if prompt is not None:
            good.append(one)
    return () if whole and good != list(carried) else tuple(good)
