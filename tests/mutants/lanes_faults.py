"""Faults in what runs side by side: the lanes of trainers and engines, and what is carried over."""

from __future__ import annotations

from mutants.fault import Fault

DRIVER = "worker/rljob_worker/driver"
PARTS = "tests/worker/driver/test_lockstep_parts.py"
CLOCK = "tests/worker/driver/test_phase_clock.py"

LANES_FAULTS = (
    Fault(
        "an error of the engines' lane is not seen by who waits for trainers",
        f"{DRIVER}/calls.py",
        "            self._watch()\n",
        "",
        f"{PARTS}::test_a_wait_for_trainers_ends_by_what_happened_in_the_other_lane",
    ),
    Fault(
        "engines that wait for leave are in no phase",
        f"{DRIVER}/engine_lane.py",
        """        with self.clock.phase("admission_wait"):
            # Released by whoever waits for the work, or closes the lane.
            self._released.wait()
""",
        "        self._released.wait()\n",
        f"{PARTS}::test_the_engines_wait_for_leave_from_the_end_of_their_work_until_they_get_it",
    ),
    Fault(
        "a stop gives the batch up at once",
        f"{DRIVER}/engine_lane.py",
        "time.monotonic() + patience",
        "time.monotonic()",
        f"{PARTS}::test_a_stop_waits_for_work_that_ends_within_the_patience",
    ),
    Fault(
        "tokens older than the bound",
        f"{DRIVER}/lockstep_rollouts.py",
        "> most:",
        "> most + 1:",
        f"{PARTS}::test_a_batch_that_is_older_than_the_bound_is_not_trained_on",
    ),
    Fault(
        "a batch for the step after the last",
        f"{DRIVER}/lockstep_rollouts.py",
        "step.number >= self._spec.steps",
        "step.number > self._spec.steps",
        f"{PARTS}::test_nothing_is_made_ahead_of_the_last_step_or_at_staleness_0",
    ),
    Fault(
        "a carried batch whose prompts are drawn by nobody",
        f"{DRIVER}/lockstep_rollouts.py",
        "        drawn = self._prompts.draw(len(carried))\n",
        "        drawn = [(one.group.ordinal, self._prompts._waiting[one.group.ordinal]) for one in carried]\n",
        f"{PARTS}::test_a_batch_made_ahead_is_trained_on_once_with_the_same_bits_over_any_restarts",
    ),
    Fault(
        "engines on the trainers' devices",
        "crds/rljob_api/derived.py",
        "return trainers_per_node(spec) if divides_devices(spec) else 0",
        "return 0",
        f"{PARTS}::test_every_process_has_devices_of_its_own",
    ),
    Fault(
        "a phase that goes on over the end of a step counted in the next alone",
        "worker/rljob_worker/phases.py",
        "        self._count(now)\n        phases,",
        "        phases,",
        f"{CLOCK}::test_each_lane_sums_to_the_same_step_and_what_goes_on_is_cut_at_its_end",
    ),
    Fault(
        "keys and values of the weights before, in an engine that did not sleep",
        "worker/rljob_worker/rollout/engine.py",
        "                self._sleep_controller.forget_prefixes()\n",
        "                pass\n",
        "tests/worker/driver/test_lockstep.py::test_staleness_0_has_the_bits_of_colocated[Disaggregated]",
    ),
    Fault(
        "two groups rendered as one",
        "operator/rljob_operator/render/check.py",
        "    _check_mode(spec)\n",
        "",
        "tests/operator/render/test_cluster_rules.py::"
        "test_devices_of_their_own_for_trainers_and_engines_are_not_rendered_as_one_group_of_workers",
    ),
)
