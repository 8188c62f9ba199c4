"""Faults of tail batching, of the measured tail, and of the mismatch by age."""

from __future__ import annotations

from mutants.fault import Fault

TAIL_FAULTS = (
    Fault(
        "a deferred group waits until it has company, for ever if need be",
        "worker/rljob_worker/flow/tail.py",
        "any(step - deferred >= most_steps for deferred in since)",
        "False",
        "tests/worker/flow/test_tail.py",
    ),
    Fault(
        "a long step takes the first ones of the data, not those deferred first",
        "worker/rljob_worker/flow/tail.py",
        "return since is None, since or 0, ordinal",
        "return since is None, 0, ordinal",
        "tests/worker/flow/test_tail.py::test_a_long_step_takes_those_that_were_deferred_first",
    ),
    Fault(
        "each engine rounds its share up, so that fewer groups are deferred",
        "worker/rljob_worker/flow/tail.py",
        "least = wanted * after // total - wanted * before // total if total else 0",
        "least = -(-wanted * len(held) // total) if total else 0",
        "tests/worker/flow/test_tail.py::test_engines_complete_together_exactly_what_is_missing",
    ),
    Fault(
        "a group that begins anew keeps its tokens",
        "worker/rljob_worker/flow/episode.py",
        "prompt = TokenStream.of_prompt(first.ids[: first.prompt_length])",
        "prompt = first",
        "tests/worker/rollouts/test_groups.py::test_a_group_begins_anew_with_its_own_noise",
    ),
    Fault(
        "a checkpoint forgets which groups were deferred",
        "worker/rljob_worker/flow/group.py",
        "**({} if self.deferred_at is None else",
        "**({} if True else",
        "tests/worker/rollouts/test_groups.py::test_a_group_begins_anew_with_its_own_noise",
    ),
    Fault(
        "a long step defers those that wait for the next one",
        "worker/rljob_worker/rollouts/policies/tail.py",
        "[] if step.long else self.growing(step, left)",
        "self.growing(step, left)",
        "tests/worker/rollouts/test_policies.py::test_a_long_step_waits_for_all_it_has",
    ),
    Fault(
        "requests that wait for a place count as busy",
        "worker/rljob_worker/flow/occupancy.py",
        "sum(min(left, self.places) for left in self._left.values())",
        "sum(self._left.values())",
        "tests/worker/flow/test_occupancy.py::test_what_waits_for_a_place_is_not_busy",
    ),
    Fault(
        "ages without a token pull the mean down",
        "worker/rljob_worker/algorithms/mismatch.py",
        "            if count:\n                finished[name] = value / count\n",
        "            finished[name] = value / max(count, 1)\n",
        "tests/worker/algorithms/test_mismatch.py",
    ),
)
