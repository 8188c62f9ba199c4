"""Faults in what runs side by side: the lanes of trainers and engines, and what is carried over."""

from __future__ import annotations

from mutants.fault import Fault

WORKER = "worker/rljob_worker"
PARTS = "tests/worker/driver/test_lockstep_parts.py"
CLOCK = "tests/worker/driver/test_phase_clock.py"
DISK = "tests/worker/weightsync/test_disk_sync.py"
REPLAY = "tests/worker/driver/test_replay.py"
NETWORK = "tests/worker/weightsync/test_network_sync.py"
NODES = "tests/worker/weightsync/test_nodes_sync.py"
ADMISSION = "tests/worker/flow/test_admission.py"
BOUND = f"{ADMISSION}::test_a_whole_run_is_within_the_bound_and_trains_on_each_group_once"

LANES_FAULTS = (
    Fault(
        "an error of the engines' lane is not seen by who waits for trainers",
        f"{WORKER}/cluster/calls.py",
        "            self._watch()\n",
        "",
        f"{PARTS}::test_a_wait_for_trainers_ends_by_what_happened_in_the_other_lane",
    ),
    Fault(
        "engines that wait for leave are in no phase",
        f"{WORKER}/driver/loops/lane.py",
        """        with self.clock.phase("admission_wait"):
            # Released by whoever waits for the work, or closes the lane.
            self._released.wait()
""",
        "        self._released.wait()\n",
        f"{PARTS}::test_the_engines_wait_for_leave_from_the_end_of_their_work_until_they_get_it",
    ),
    Fault(
        "a stop gives the batch up at once",
        f"{WORKER}/driver/loops/lane.py",
        "time.monotonic() + patience",
        "time.monotonic()",
        f"{PARTS}::test_a_stop_waits_for_work_that_ends_within_the_patience",
    ),
    Fault(
        "tokens older than the bound",
        f"{WORKER}/rollouts/policies/whole.py",
        "> self._max_staleness:",
        "> self._max_staleness + 1:",
        f"{PARTS}::test_a_batch_that_is_older_than_the_bound_is_not_trained_on",
    ),
    Fault(
        "a batch for the step after the last",
        f"{WORKER}/rollouts/rollouts.py",
        "step.number >= self._spec.steps",
        "step.number > self._spec.steps",
        f"{PARTS}::test_nothing_is_made_ahead_of_the_last_step_or_at_staleness_0",
    ),
    Fault(
        "a carried batch whose prompts are drawn again",
        f"{WORKER}/flow/pool.py",
        "self._prompts.keys() - self._groups.keys()\n            self._saved = PoolState(cursor",
        "set(self._prompts)\n            self._saved = PoolState(cursor",
        f"{PARTS}::test_a_batch_made_ahead_is_trained_on_once_with_the_same_bits_over_any_restarts",
    ),
    Fault(
        "engines on the trainers' devices",
        "crds/rljob_api/derived.py",
        "first, judges = trainers if divides_devices(spec) else 0, ",
        "first, judges = 0, ",
        f"{PARTS}::test_every_process_has_devices_of_its_own",
    ),
    Fault(
        "a phase that goes on over the end of a step counted in both",
        "worker/rljob_worker/phases.py",
        "            self._counting = name, now\n",
        "",
        f"{CLOCK}::test_each_lane_sums_to_the_same_step_and_what_goes_on_is_cut_at_its_end",
    ),
    Fault(
        "keys and values of the weights before, in an engine that did not sleep",
        "worker/rljob_worker/engine/engine.py",
        "                self._sleep_controller.forget_prefixes()\n",
        "                pass\n",
        "tests/worker/driver/test_lockstep.py::test_staleness_0_has_the_bits_of_colocated[Disaggregated]",
    ),
    Fault(
        "only the trainers' devices in the pod",
        "crds/rljob_api/derived.py",
        "devices, worker = first + engine_devices + judges, ",
        "devices, worker = first or engine_devices + judges, ",
        "tests/operator/render/test_cluster_rules.py::"
        "test_devices_of_their_own_for_trainers_and_engines_are_all_in_one_pod",
    ),
    Fault(
        "the engines' phases counted with the trainers'",
        "operator/rljob_operator/metrics/counts.py",
        "            self._lanes[lane].observe_phases(phases)\n",
        "            self._seconds.observe_phases(phases)\n",
        "tests/operator/metrics/test_counting.py::test_the_operator_shows_what_the_driver_shows",
    ),
    Fault(
        "a step trains on tokens that its limit leaves out",
        "worker/rljob_worker/rollouts/batch.py",
        "versions >= oldest\n",
        "versions >= 0\n",
        "tests/worker/rollouts/test_groups.py::test_tokens_that_are_too_old_stay_in_the_stream_and_out_of_the_loss",
    ),
    Fault(
        "a group that was sampled again stands in line behind older ones",
        "worker/rljob_worker/flow/admission.py",
        "    picked = chosen((group for group in complete if is_waited_for(group, limit)), wanted)\n",
        "    picked = []\n",
        "tests/worker/flow/test_limits.py",
    ),
    Fault(
        "a group is sampled a third time",
        "worker/rljob_worker/flow/limits.py",
        "or group.renewed",
        "",
        "tests/worker/flow/test_limits.py::test_a_whole_run_trains_on_each_prompt_once_and_on_no_token_that_is_too_old",
    ),
    Fault(
        "a reward of a response that was dropped is the next one's",
        "worker/rljob_worker/flow/pool.py",
        " or group.renewed is not renewed",
        "",
        "tests/worker/flow/test_pool.py",
    ),
    Fault(
        "a group more than the steps within the bound have room for",
        "worker/rljob_worker/flow/admission.py",
        "min(max_staleness + 1, steps_left) * wanted\n",
        "min(max_staleness + 1, steps_left) * wanted + 1\n",
        BOUND,
    ),
    Fault(
        "groups begun for steps past the last",
        "worker/rljob_worker/flow/admission.py",
        "min(max_staleness + 1, steps_left)",
        "(max_staleness + 1)",
        BOUND,
    ),
    Fault(
        "trained on before its reward came",
        "worker/rljob_worker/flow/admission.py",
        " and all(group.ordinal in ready for group in first)",
        "",
        f"{ADMISSION}::test_a_reward_that_is_waited_for_is_waited_for",
    ),
    Fault(
        "what is complete first, however old the rest gets",
        "worker/rljob_worker/flow/admission.py",
        " and overdue(rest, wanted, version + 1, max_staleness) is None",
        "",
        f"{ADMISSION}::test_ready_first_waits_for_those_that_would_be_too_old",
    ),
    Fault(
        "a generation that begins after its weights were to be replaced goes on",
        "worker/rljob_worker/engine/service.py",
        "self._harvesting or self._version <= self._harvested",
        "self._harvesting or self._version < self._harvested",
        "tests/worker/engine/test_request_service.py::"
        "test_weights_that_are_to_be_replaced_end_their_generation_and_those_that_begin_yet",
    ),
    Fault(
        "one deadline for all that an engine gives",
        f"{WORKER}/cluster/calls.py",
        "                if each:\n",
        "                if False:\n",
        "tests/worker/driver/test_driver_parts.py::test_a_stream_has_one_deadline_or_one_for_each_of_its_items",
    ),
    Fault(
        "lanes cut one after the other at the end of a step",
        "worker/rljob_worker/phases.py",
        ", lock=self._lock)",
        ")",
        f"{CLOCK}::test_steps_that_end_while_another_thread_enters_phases_lose_no_time",
    ),
    Fault(
        "a reward that is taken as it comes may take for ever",
        "worker/rljob_worker/rewards/score_calls.py",
        "calls[0].since < too_old",
        "False",
        "tests/worker/rewards/test_score_calls.py::test_a_reward_that_is_taken_has_its_own_time",
    ),
    Fault(
        "a result comes between two looks at what has come, and is lost",
        "worker/rljob_worker/rewards/score_calls.py",
        """        with self._changed:
            if self._round != round_:
""",
        """        for call, outcome in outcomes:
            if isinstance(outcome, RewardResult):
                call.result = outcome
        with self._changed:
            if self._round != round_:
""",
        "tests/worker/rewards/test_score_calls.py::"
        "test_a_result_that_comes_while_others_are_taken_is_taken_then_or_next",
    ),
    Fault(
        "whoever submits a burst waits for the pool, which waits for the lock",
        "worker/rljob_worker/rewards/pool.py",
        "        self._wake_writer.setblocking(False)\n",
        "",
        "tests/worker/rewards/test_score_calls.py::test_a_burst_of_more_tasks_than_the_pool_is_woken_for",
    ),
    Fault(
        "a result is given twice",
        "worker/rljob_worker/rewards/score_calls.py",
        "            self._samples = [calls for calls in submitted if not _scored(calls)]\n",
        "",
        "tests/worker/rewards/test_reward_runner.py::test_results_are_taken_as_they_come_each_with_its_sample",
    ),
    Fault(
        "groups scored again while the results that they have are being given",
        f"{WORKER}/flow/pool.py",
        " and one.ordinal not in self._results]",
        "]",
        "tests/worker/flow/test_pool.py",
    ),
    Fault(
        "corrected once more where the ratio starts from the engine's log-probabilities",
        "worker/rljob_worker/algorithms/losses.py",
        " and not anchored:",
        ":",
        "tests/worker/algorithms/test_losses.py::test_loss_and_metrics_equal_the_reference",
    ),
    Fault(
        "old tokens without a bound by default",
        "crds/rljob_api/derived.py",
        "max_staleness(spec) >= 2",
        "max_staleness(spec) >= 99",
        "tests/worker/driver/test_async.py::test_generation_goes_on_through_updates_and_no_token_is_over_the_bound",
    ),
    Fault(
        "messages of strangers count",
        "worker/rljob_worker/weightsync/mailbox.py",
        "            if hmac.compare_digest(code, self._code(content)):\n",
        "            if content:\n",
        f"{NETWORK}::test_messages_of_strangers_are_as_if_they_never_came",
    ),
    Fault(
        "a bucket is sent before all trainers have filled it",
        "worker/rljob_worker/weightsync/protocol.py",
        "if bucket.index not in self._filled[name]]",
        "if False]",
        f"{NETWORK}::test_a_bucket_waits_for_the_slowest_trainer",
    ),
    Fault(
        "a group that still awaits a bucket is waited for in the next sync",
        "worker/rljob_worker/weightsync/broadcast.py",
        '        threading.Thread(target=leaving.clear, name="leave-broadcast", daemon=True).start()\n',
        "        leaving.clear()\n",
        f"{NETWORK}::test_a_group_whose_root_still_holds_it_is_left_without_waiting",
    ),
    Fault(
        "pieces of other nodes are not written into the host's slot",
        "worker/rljob_worker/weightsync/device_ipc.py",
        "(writer not in self._node and rank == self._node[0])",
        "(writer in self._node and rank == self._node[0])",
        NODES,
    ),
    Fault(
        "a shard of columns that came from another trainer is left beside the slot",
        "worker/rljob_worker/weightsync/device_ipc.py",
        "                if takes and sent.data_ptr() != part.data_ptr():\n",
        "                if False:\n",
        NODES,
    ),
    Fault(
        "a group that a failed sync left behind is used again",
        "worker/rljob_worker/weightsync/trainer.py",
        "            except BaseException:\n                self.end.abandon()\n",
        "            except BaseException:\n",
        f"{NETWORK}::test_what_the_network_does_to_a_bucket_fails_the_sync_and_the_next_one_works",
    ),
    Fault(
        "engines in pods of their own begin after the trainers' devices",
        "crds/rljob_api/derived.py",
        "NodeGroup(ENGINE_GROUP, engine_nodes(spec), engine_devices, 0, 0, serving)",
        "NodeGroup(ENGINE_GROUP, engine_nodes(spec), engine_devices, 0, 1, serving)",
        "tests/worker/cluster/test_placement.py::test_where_trainers_and_engines_lie_on_nodes_of_their_own",
    ),
    Fault(
        "the trainers' memory planned for all of the job's devices",
        "worker/rljob_worker/planning/job_shape.py",
        "world = derived.trainers(spec)",
        "world = derived.devices(spec)",
        "tests/worker/planning/test_two_groups.py::test_trainers_are_those_of_the_trainers_devices",
    ),
    Fault(
        "an engine that died is awaited in the next hand-over",
        f"{WORKER}/cluster/elastic.py",
        "            raise error\n        self._changed = True\n",
        "            raise error\n",
        "tests/worker/cluster/test_elastic.py::"
        "test_the_others_go_on_and_a_new_one_takes_part_from_the_next_hand_over_on",
    ),
    Fault(
        "a job without engines goes on",
        f"{WORKER}/cluster/elastic.py",
        "if len(self._engines) == 1 or self._engines",
        "if self._engines",
        "tests/worker/cluster/test_elastic.py::test_the_last_engine_and_whoever_is_none_are_not_done_without",
    ),
    Fault(
        "engines that take part are let go before those that are still being made",
        "worker/rljob_worker/cluster/elastic.py",
        "gone += list(made)[missing:]",
        "gone += kept[0][:1] if list(made)[missing:] else []",
        "tests/worker/cluster/test_engine_seats.py::test_an_engine_that_is_being_made_goes_before_one_that_takes_part",
    ),
    Fault(
        "a pod of engines goes before the driver has left it",
        "operator/rljob_operator/state/scaling.py",
        "pods = [pod for pod in pods if pod.address not in engines.in_use]",
        "pass",
        "tests/operator/state/test_scaling.py::test_a_pod_goes_when_nothing_of_the_job_is_on_its_node",
    ),
    Fault(
        "an attempt is stopped for engines that it goes on without",
        "operator/rljob_operator/state/failures.py",
        "if fatal and spec is not None and derived.may_lose_engines(spec):",
        "if False:",
        "tests/operator/state/test_scaling.py::test_the_attempt_is_stopped_for_a_lost_trainers_pod_and_not_for_engines",
    ),
    Fault(
        "a job begins without a pod that is only not ready yet",
        "operator/rljob_operator/state/lifecycle.py",
        "all_scheduled(plan) and all(pod.ready for pod in there)",
        "all_scheduled(plan)",
        "tests/operator/state/test_scaling.py::test_a_job_begins_with_the_nodes_that_there_are",
    ),
    Fault(
        "a replay samples with the noise of the group's first sample",
        f"{WORKER}/driver/replay.py",
        "group.seed + episode.sample",
        "group.seed",
        f"{REPLAY}::test_a_span_is_asked_for_after_what_stood_before_it_and_up_to_where_it_was_cut",
    ),
    Fault(
        "a replay begins with weights that are newer than a token",
        f"{WORKER}/driver/replay.py",
        "checkpoints.find_whole(until=oldest)",
        "checkpoints.find_whole(until=newest)",
        f"{REPLAY}::test_a_replay_begins_at_the_newest_checkpoint_before_the_oldest_token",
    ),
    Fault(
        "a replay compares what follows another token",
        f"{WORKER}/driver/replay.py",
        "until = n if same.all() else int(np.argmin(same))",
        "until = int(same.sum())",
        f"{REPLAY}::test_the_first_other_token_is_named_and_what_follows_it_counts_for_nothing",
    ),
    Fault(
        "a bucket's file that is too short is taken",
        "worker/rljob_worker/weightsync/shared_disk.py",
        "if read != bucket.nbytes:",
        "if False:",
        f"{DISK}::test_what_a_volume_does_to_a_bucket_fails_the_sync_and_the_next_one_works",
    ),
    Fault(
        "buckets stay on disk",
        "worker/rljob_worker/weightsync/shared_disk.py",
        "            self._path(bucket.index - SLOT_COUNT).unlink(missing_ok=True)\n",
        "",
        f"{DISK}::test_many_syncs_leave_nothing_behind",
    ),
)
