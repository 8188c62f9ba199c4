"""Faults made by hand, and the tests that must notice each of them.

A fault is a text that stands exactly once in a file, what takes its place, and tests that pass without it.
"""

from __future__ import annotations

from dataclasses import dataclass

ALGORITHMS = "worker/rljob_worker/algorithms"
CONVERSION = "tests/worker/models/test_model_conversion.py"
COUNTING = "tests/operator/metrics/test_counting.py"
GOODPUT = "tests/operator/state/test_progress_and_goodput.py"
LOGITS = "tests/worker/algorithms/test_logits.py"
LOSSES = "tests/worker/algorithms/test_losses.py"
REPORT = "tests/worker/report/test_run_report.py"
REWARDS = "worker/rljob_worker/rewards"


@dataclass(frozen=True)
class Fault:
    """One fault; `tests` are arguments of pytest."""

    name: str
    file: str
    old: str
    new: str
    tests: str


FAULTS: tuple[Fault, ...] = (
    # --- formulas --------------------------------------------------------------------------------
    Fault(
        "advantage relative to the other prompts",
        f"{ALGORITHMS}/advantages.py",
        "exact.mean(dim=1, keepdim=True)",
        "exact.mean(dim=0, keepdim=True)",
        "tests/worker/algorithms/test_advantages.py",
    ),
    Fault(
        "advantage over the biased standard deviation",
        f"{ALGORITHMS}/advantages.py",
        "unbiased=True",
        "unbiased=False",
        "tests/worker/algorithms/test_advantages.py",
    ),
    Fault(
        "rounding of equal rewards taken for signal",
        f"{ALGORITHMS}/advantages.py",
        "advantages.masked_fill(zero_variance(rewards).unsqueeze(1), 0.0)",
        "advantages",
        "tests/worker/algorithms/test_advantages.py",
    ),
    Fault(
        "one clip range for both sides",
        f"{ALGORITHMS}/losses.py",
        "-ratio.clamp(1 - clip_low, 1 + clip_high)",
        "-ratio.clamp(1 - clip_low, 1 + clip_low)",
        LOSSES,
    ),
    Fault(
        "dual clip on the wrong side",
        f"{ALGORITHMS}/losses.py",
        "torch.where(advantages < 0, torch.minimum",
        "torch.where(advantages > 0, torch.minimum",
        LOSSES,
    ),
    Fault(
        "constant length left out of the aggregation",
        f"{ALGORITHMS}/losses.py",
        "return weights / (constant_length * num_sequences)",
        "return weights / num_sequences",
        LOSSES,
    ),
    Fault(
        "entropy bonus with the wrong sign",
        f"{ALGORITHMS}/losses.py",
        "loss = loss - spec.entropy_coefficient",
        "loss = loss + spec.entropy_coefficient",
        LOSSES,
    ),
    Fault(
        "KL the wrong way round",
        f"{ALGORITHMS}/kl.py",
        "estimate = torch.exp(-difference) - 1 + difference",
        "estimate = torch.exp(difference) - 1 - difference",
        LOSSES,
    ),
    Fault(
        "low-variance KL without bound",
        f"{ALGORITHMS}/kl.py",
        "estimate.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)",
        "estimate",
        LOSSES,
    ),
    Fault(
        "importance weights the wrong way round",
        f"{ALGORITHMS}/tis.py",
        "(old_log_probs - rollout_log_probs)",
        "(rollout_log_probs - old_log_probs)",
        LOSSES,
    ),
    Fault(
        "trainer ignores the temperature",
        f"{ALGORITHMS}/logits.py",
        "if temperature != 1.0:",
        "if temperature > 1e9:",
        LOGITS,
    ),
    Fault(
        "top-k keeps one token too few",
        f"{ALGORITHMS}/logits.py",
        "~(logits < logits.topk(transform.top_k, dim=-1).values[:, -1:])",
        "logits > logits.topk(transform.top_k, dim=-1).values[:, -1:]",
        LOGITS,
    ),
    Fault(
        "padding of the vocabulary counted as tokens",
        f"{ALGORITHMS}/logits.py",
        "valid = min(max(vocab_size - start, 0), width)",
        "valid = width",
        f"{LOGITS} tests/worker/algorithms/test_vocab_parallel.py",
    ),
    # --- weights on their way ----------------------------------------------------------------------
    Fault(
        "k and v swapped",
        "worker/rljob_worker/models/convert.py",
        '"k": (query_rows, cfg.head_dim), "v": (query_rows + cfg.head_dim, cfg.head_dim)',
        '"v": (query_rows, cfg.head_dim), "k": (query_rows + cfg.head_dim, cfg.head_dim)',
        CONVERSION,
    ),
    Fault(
        "gate taken from up",
        "worker/rljob_worker/models/convert.py",
        '"gate_proj.weight", part, lambda parameter: parameter[:rows]',
        '"gate_proj.weight", part, lambda parameter: parameter[rows:]',
        CONVERSION,
    ),
    Fault(
        "every tensor-parallel rank says it has the first columns",
        "worker/rljob_worker/models/convert.py",
        "columns * parallel.tp_rank, columns",
        "0, columns",
        CONVERSION,
    ),
    Fault(
        "a tensor dropped",
        "worker/rljob_worker/models/convert.py",
        "for shard in layout.shards if shard.part.length",
        'for shard in layout.shards if shard.part.length and "k_norm" not in shard.hf_name',
        CONVERSION,
    ),
    Fault(
        "checksum leaves out the last words",
        "worker/rljob_worker/devices/checksum.py",
        "if rest := words.numel() - full * _ROW:",
        "if (rest := words.numel() - full * _ROW) > _ROW:",
        "tests/worker/devices/test_accelerator.py",
    ),
    Fault(
        "checksum blind to the order of rows",
        "worker/rljob_worker/devices/checksum.py",
        "value = _mix(value ^ (row & _MASK))",
        "value = value ^ (row & _MASK)",
        "tests/worker/devices/test_accelerator.py",
    ),
    Fault(
        "the checksums of trainer and engine not compared",
        "worker/rljob_worker/weightsync/plan.py",
        "            if ours is not None and theirs != ours:",
        "            if False:",
        "tests/worker/weightsync/test_sync.py tests/worker/weightsync/test_protocol.py",
    ),
    Fault(
        "a slot written again before it was acknowledged",
        "worker/rljob_worker/weightsync/protocol.py",
        "free = bucket - SLOT_COUNT + 1",
        "free = bucket - SLOT_COUNT",
        "tests/worker/weightsync/test_protocol.py tests/worker/weightsync/test_sync.py",
    ),
    # --- memory ------------------------------------------------------------------------------------
    Fault(
        "woken without a margin of free memory",
        "worker/rljob_worker/memory/states.py",
        "if free < need + self._margin_bytes:",
        "if free < need:",
        "tests/worker/memory/test_states.py",
    ),
    Fault(
        "memory given away while the device works",
        "worker/rljob_worker/memory/states.py",
        "            self._device.synchronize()\n",
        "",
        "tests/worker/memory/test_states.py",
    ),
    # --- what a restart finds ------------------------------------------------------------------------
    Fault(
        "cursor restored one row late",
        "worker/rljob_worker/data/dataset.py",
        'saved["epoch"], saved["position"], saved["drawn"]',
        'saved["epoch"], saved["position"] + 1, saved["drawn"]',
        "tests/worker/data/test_dataset.py",
    ),
    Fault(
        "the same order in every epoch",
        "worker/rljob_worker/data/dataset.py",
        "_random_bits(rows, self._seed, self.name, epoch)",
        "_random_bits(rows, self._seed, self.name)",
        "tests/worker/data/test_dataset.py",
    ),
    Fault(
        "fsync forgotten",
        "worker/rljob_worker/host/files.py",
        "    os.fsync(file.fileno())\n",
        "",
        "tests/worker/host/test_files.py tests/worker/trainer/test_state_file.py",
    ),
    Fault(
        "torn last line kept",
        "worker/rljob_worker/host/files.py",
        "os.truncate(path, whole)",
        "pass",
        "tests/worker/records/test_step_log.py",
    ),
    Fault(
        "steps of a dead attempt not marked",
        "worker/rljob_worker/records/steps.py",
        "rerun=draft.step in self._attempts",
        "rerun=False",
        "tests/worker/records/test_step_log.py",
    ),
    Fault(
        "a step that was run again counts twice",
        "worker/rljob_worker/records/steps.py",
        "record.step < kept[-1].step",
        "record.step <= kept[-1].step",
        "tests/worker/records/test_step_log.py tests/worker/report",
    ),
    # --- rewards, and what strangers wrote ---------------------------------------------------------------
    Fault(
        "weights of a reward's parts left out",
        f"{REWARDS}/weighted_parts.py",
        "math.fsum(part.weight * result.score",
        "math.fsum(result.score",
        "tests/worker/rewards/test_reward_runner.py::test_parts_are_added_up_and_recorded",
    ),
    Fault(
        "a part averaged over the samples that lack it too",
        f"{REWARDS}/parts.py",
        "sum(values[name]) / len(values[name])",
        "sum(values[name]) / len(results)",
        "tests/worker/rewards/test_reward_parts.py",
    ),
    Fault(
        "any name of a part is a metric's label",
        "crds/rljob_api/reward_parts.py",
        "and _NAME.fullmatch(name)",
        "and name",
        "tests/worker/rewards/test_reward_parts.py",
    ),
    Fault(
        "metrics of parts without bound",
        "crds/rljob_api/reward_parts.py",
        "if len(self._names) < MOST_PARTS and",
        "if",
        "tests/worker/rewards/test_reward_parts.py",
    ),
    Fault(
        "the reward's band past all rewards that occurred",
        "worker/rljob_worker/report/plot.py",
        "low = np.fmax(mean - spread, metric_of(records, m.REWARD_MIN_KEY))",
        "low = mean - spread",
        REPORT,
    ),
    Fault(
        "a response's markup in the report",
        "worker/rljob_worker/report/build.py",
        "html.escape(visible(cell))",
        "visible(cell)",
        REPORT,
    ),
    Fault(
        "a response's control characters in the report",
        "worker/rljob_worker/report/build.py",
        "html.escape(visible(cell))",
        "html.escape(cell)",
        REPORT,
    ),
    Fault(
        "a job's markup in the report",
        "worker/rljob_worker/report/build.py",
        "html.escape(visible(json.dumps(run.job, indent=1, ensure_ascii=False)))",
        "visible(json.dumps(run.job, indent=1, ensure_ascii=False))",
        REPORT,
    ),
    Fault(
        "a dollar sign in a name begins a formula",
        "worker/rljob_worker/report/curves.py",
        """.replace("$", r"\\$")""",
        "",
        REPORT,
    ),
    Fault(
        "direction characters shown as they are",
        "crds/rljob_api/safe_text.py",
        '("Cc", "Cf", "Cs",',
        '("Cc", "Cs",',
        REPORT,
    ),
    Fault(
        "a pickle read by the driver",
        "worker/rljob_worker/trainer/state_file.py",
        "from __future__ import annotations\n",
        "from __future__ import annotations\n\nimport pickle\n",
        "tests/worker/trainer/test_no_pickles.py",
    ),
    Fault(
        "GPL beside another licence taken for a choice",
        "images/sbom.py",
        r"\s+OR\s+",
        r"\s+(?:OR|AND)\s+",
        "tests/images/test_licences.py::test_gpl_is_recognised",
    ),
    Fault(
        "all variables of the driver handed to rewards",
        f"{REWARDS}/bounds.py",
        "        for name, value in os.environ.items()\n        if",
        "        for name, value in os.environ.items()\n        if True or",
        "tests/worker/rewards/test_reward_bounds.py::test_a_reward_sees_no_secret_of_the_driver",
    ),
    # --- bad input ---------------------------------------------------------------------------------------
    Fault(
        "a name too long for the services of its Ray cluster",
        "crds/rljob_api/rules/infrastructure.py",
        "len(j.metadata.name) <= 47 and",
        "True and",
        "tests/worker/cli/test_bad_inputs.py",
    ),
    Fault(
        "a pipe waited for in place of a file",
        "worker/rljob_worker/host/files.py",
        "    if stat.S_ISREG(mode):\n        return descriptor",
        "    if not stat.S_ISDIR(mode):\n        return descriptor",
        "tests/worker/cli/test_no_files.py tests/worker/cli/test_bad_inputs.py",
    ),
    Fault(
        "the first row of data not looked at",
        "worker/rljob_worker/cli/first_look.py",
        "        check_head(source, field)\n",
        "",
        "tests/worker/cli/test_bad_inputs.py",
    ),
    Fault(
        "a run begun where one was to be continued",
        "worker/rljob_worker/cli/first_look.py",
        '    if resume == "always":\n',
        "    if False:\n",
        "tests/worker/cli/test_bad_inputs.py",
    ),
    Fault(
        "folders of a refused run left behind",
        "worker/rljob_worker/driver/run_folder.py",
        "            with suppress(OSError):\n                parent.rmdir()",
        "            pass",
        "tests/worker/driver/test_run_folder.py",
    ),
    # --- operator ------------------------------------------------------------------------------------
    Fault(
        "lost work counted as useful",
        "operator/rljob_operator/metrics/counts.py",
        "if record.rerun:",
        "if not record.rerun:",
        f"{COUNTING} {GOODPUT}",
    ),
    Fault(
        "the evaluation before training counted as a step",
        "operator/rljob_operator/metrics/counts.py",
        "        if record.is_step:\n",
        "        if True:\n",
        COUNTING,
    ),
    Fault(
        "records counted over a gap",
        "operator/rljob_operator/metrics/counts.py",
        "if record.index == self.count + len(found):",
        "if record.index >= self.count + len(found):",
        COUNTING,
    ),
    Fault(
        "time of a clock that went back counted",
        "operator/rljob_operator/state/timing.py",
        "max(0.0, now - seconds_of(text))",
        "now - seconds_of(text)",
        "tests/operator/state",
    ),
    Fault(
        "the wait for the operator counted as time in the queue",
        "operator/rljob_operator/state/goodput.py",
        "return min(plan.now, max([seconds_of(since), *known]))",
        "return plan.now",
        GOODPUT,
    ),
    Fault(
        "an attempt begun before the status knows of it",
        "operator/rljob_operator/state/attempts.py",
        "plan.act(*actions, status_first=True)",
        "plan.act(*actions, status_first=False)",
        "tests/operator/state/test_lifecycle.py",
    ),
    Fault(
        "a head pod of another RayCluster taken for the job's",
        "operator/rljob_operator/state/plan_builder.py",
        "pod.cluster_uid == own.uid",
        "True",
        "tests/operator/state/test_lifecycle.py",
    ),
    Fault(
        "the next RayCluster begun beside the pods of the one before",
        "operator/rljob_operator/state/release.py",
        "plan.act(DeleteCluster(cluster.uid), status_first=True)",
        "plan.act(DeleteCluster(cluster.uid, wait=False), status_first=True)",
        "tests/operator/state/test_failure_policy.py",
    ),
    Fault(
        "a pod on a lost node waited for",
        "operator/rljob_operator/state/release.py",
        "return bool(left) and all(",
        "return not left and all(",
        "tests/operator/state/test_failure_policy.py",
    ),
    # --- what jobs may name ----------------------------------------------------------------------
    Fault(
        "allowed folder left by its parent",
        "operator/rljob_operator/render/job_policy.py",
        'return ".." not in path.split("/") and any(inside)',
        "return any(inside)",
        "tests/operator/render/test_job_policy.py",
    ),
    Fault(
        "pattern that fits the beginning of a name",
        "operator/rljob_operator/render/job_policy.py",
        "re.fullmatch(",
        "re.match(",
        "tests/operator/render/test_job_policy.py",
    ),
    Fault(
        "mount of a profile made writable",
        "operator/rljob_operator/render/policy.py",
        'and mount.get("readOnly") is not True',
        'and mount.get("readOnly") is False',
        "tests/operator/render/test_job_policy.py",
    ),
    Fault(
        "workers left out of the NetworkPolicy",
        "operator/rljob_operator/render/access.py",
        'return _policy(job, {"ray.io/cluster": job.name}, ingress)',
        'return _policy(job, {"ray.io/cluster": job.name, "ray.io/node-type": "head"}, ingress)',
        "tests/operator/render/test_access_and_submission.py",
    ),
    Fault(
        "token sent to any pod of the head's name",
        "operator/rljob_operator/plugin/head.py",
        "        await self._check_owner(pod)\n",
        "",
        "tests/operator/plugin/test_commands.py",
    ),
    Fault(
        "Ray's token from any Secret of its name",
        "operator/rljob_operator/shell/tokens.py",
        "        if not is_controlled_by(item, owner_uid):\n            return None\n",
        "",
        "tests/operator/plugin/test_commands.py",
    ),
    # --- prompts ---------------------------------------------------------------------------------
    Fault(
        "groups without a signal trained on",
        "worker/rljob_worker/flow/filters.py",
        "or rewards.max() != rewards.min()",
        "or rewards.max() >= rewards.min()",
        "tests/worker/driver/test_driver_parts.py -k differ",
    ),
    Fault(
        "surplus groups trained on",
        "worker/rljob_worker/driver/batch.py",
        "if kept < wanted else Decision.SURPLUS",
        "if kept <= wanted else Decision.SURPLUS",
        "tests/worker/driver/test_driver_parts.py -k differ",
    ),
    Fault(
        "open prompts forgotten at the end of a step",
        "worker/rljob_worker/driver/prompt_ledger.py",
        "self._waiting |= self._drawn",
        "self._waiting |= {}",
        "tests/worker/driver/test_prompt_ledger.py",
    ),
    Fault(
        "a token's noise does not depend on its position",
        "worker/rljob_worker/upstream/vllm_sampler.py",
        "_split_mix(start, positions)",
        "_split_mix(start, np.zeros_like(positions))",
        "tests/worker/upstream/test_vllm_sampler.py",
    ),
    Fault(
        "half of a seed is not read",
        "worker/rljob_worker/upstream/vllm_sampler.py",
        ".bitwise_xor_(high)",
        "",
        "tests/worker/upstream/test_vllm_sampler.py",
    ),
    Fault(
        "a generation is cut before the groups that are waited for",
        "worker/rljob_worker/rollout/service.py",
        "len(quota.among & complete) >= quota.least",
        "len(complete) >= quota.least",
        "tests/worker/rollout/test_request_service.py",
    ),
    Fault(
        "a generation ends before it is closed",
        "worker/rljob_worker/rollout/service.py",
        "self._arrived and self._check is not None",
        "self._arrived and False",
        "tests/worker/rollout/test_request_service.py",
    ),
    Fault(
        "a generation that is held goes on",
        "worker/rljob_worker/rollout/service.py",
        "while (self._paused or self._is_idle())",
        "while self._is_idle()",
        "tests/worker/rollout/test_request_service.py",
    ),
    Fault(
        "an engine that is free gets a group that another one has",
        "worker/rljob_worker/driver/dispatch.py",
        "order[room * engines :]",
        "order[room * engines - 1 :]",
        "tests/worker/driver/test_driver_parts.py",
    ),
    Fault(
        "a prompt that was drawn and then lost passes the audit",
        "worker/rljob_worker/records/audit.py",
        "available - still_open)",
        "set())",
        "tests/worker/records/test_audit.py",
    ),
    Fault(
        "observed tokens trained on in the place of sampled ones",
        "worker/rljob_worker/trainer/batches.py",
        "in_sample = self.places[chosen]",
        "in_sample = self.lengths[samples][row] - counts[row] + within",
        "tests/worker/trainer/test_batches.py",
    ),
    # --- what strangers wrote --------------------------------------------------------------------
    Fault(
        "characters that turn the reading direction reach a terminal",
        "crds/rljob_api/safe_text.py",
        '_HIDDEN = ("Cc", "Cf", ',
        '_HIDDEN = ("Cc", ',
        f"{REPORT}::test_visible_escapes_what_a_terminal_would_obey",
    ),
    Fault(
        "a checkpoint's states are unpickled",
        "worker/rljob_worker/trainer/state_file.py",
        'self._file = safe_open(str(path), framework="pt")',
        "self._file = torch.load(str(path), weights_only=False)",
        "tests/worker/trainer/test_no_pickles.py::test_a_malicious_pickle_in_a_checkpoint_or_model_folder_is_not_executed",
    ),
    Fault(
        "an unpickling that nobody has looked at",
        "worker/rljob_worker/trainer/state_file.py",
        "import json\n",
        "import json\nimport pickle\n",
        "tests/worker/trainer/test_no_pickles.py::test_the_code_unpickles_nothing",
    ),
    Fault(
        "a package under the GPL in the images",
        "docs/licences.md",
        "| absl-py | Apache-2.0 |",
        "| absl-py | GPL-3.0-only |",
        "tests/images/test_licences.py::test_nothing_that_is_shipped_is_gpl_and_every_licence_is_known",
    ),
    Fault(
        "the Affero licence taken for no GPL",
        "images/sbom.py",
        "|GNU (?:Affero )?General Public",
        "|GNU General Public",
        "tests/images/test_licences.py::test_gpl_is_recognised",
    ),
    Fault(
        "who held the memory is not said",
        "worker/rljob_worker/driver/out_of_memory.py",
        "if use is None or users is None:",
        "if use is not None or users is None:",
        "tests/worker/driver/test_out_of_memory.py::test_it_is_short_and_says_who_held_the_memory",
    ),
    Fault(
        "an unknown message about memory ends the report of it",
        "worker/rljob_worker/driver/out_of_memory.py",
        "if use is None or users is None:",
        "if False:",
        "tests/worker/driver/test_out_of_memory.py::test_another_message_stays_as_it_is",
    ),
    Fault(
        "Ray's 4,000 characters in the place of the short message",
        "worker/rljob_worker/driver/calls.py",
        "reason = in_short(str(error))",
        "reason = str(error)",
        "tests/worker/driver/test_out_of_memory.py::test_the_one_who_asked_is_told_that",
    ),
)
