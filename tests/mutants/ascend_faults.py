"""Faults of the code for NPUs, among them those that a reading of its upstreams had found in it."""

from __future__ import annotations

from mutants.fault import Fault

_REFUSED = "tests/operator/render/test_cluster_rules.py tests/api"

ASCEND_FAULTS = (
    Fault(
        "metrics are reduced by all_reduce, whose float64 MindSpeed throws away",
        "worker/rljob_worker/trainer/objective.py",
        "        everyone = [torch.empty_like(own) for _ in range(self._world_size)]\n"
        "        dist.all_gather(everyone, own)\n"
        "        table = torch.stack(everyone)\n"
        "        return table[:, 0].sum(0), table[:, 1].amax(0)\n",
        "        dist.all_reduce(own)\n        return own[0], own[1]\n",
        "tests/worker/trainer/test_metric_reduction.py",
    ),
    Fault(
        "all trainers of a node are pinned to the same cores",
        "crds/rljob_api/rules/variables.py",
        "        check=lambda s: not shares_cores(s),\n",
        "        check=lambda s: True,\n",
        _REFUSED,
    ),
    Fault(
        "graphs are captured on NPUs with a task queue that torch_npu refuses",
        "crds/rljob_api/rules/devices.py",
        "    if spec.resources.tuning.task_queue_enable == 2:\n",
        "    if False:\n",
        _REFUSED,
    ),
    Fault(
        "captured graphs go on with a weight that lies elsewhere by now",
        "worker/rljob_worker/upstream/vllm_graphs.py",
        "            if before != now:\n",
        "            if False:\n",
        "tests/worker/engine/test_engine_platforms.py",
    ),
    Fault(
        "an engine goes on without the graphs that were asked for",
        "worker/rljob_worker/engine/sleep_controller.py",
        "        if min(found) == 0:\n",
        "        if False:\n",
        "tests/worker/engine/test_engine_platforms.py",
    ),
    Fault(
        "torch may take the memory that the memory saver needs, which then ends the process",
        "worker/rljob_worker/devices/accelerator.py",
        "self._module.set_per_process_memory_fraction(min(1.0, allowed / memory.total), self._logical)",
        "self._module.set_per_process_memory_fraction(1.0, self._logical)",
        "tests/contract/test_npu.py",
    ),
    Fault(
        "an engine argument by which NPUs lose the experts' places is let through",
        "crds/rljob_api/rules/devices.py",
        "            not s.rollout.engine_args.get(name) or name not in",
        "            True or name not in",
        _REFUSED,
    ),
    Fault(
        "a batch may be in flight across a sleep",
        "worker/rljob_worker/engine/platforms.py",
        '"async_scheduling": False',
        '"async_scheduling": True',
        "tests/worker/engine/test_engine_platforms.py",
    ),
    Fault(
        "staging takes what other threads allocate as well",
        "worker/rljob_worker/devices/npu.py",
        "        torch_npu._C._npu_beginAllocateCurrentThreadToPool(self._logical, pool.id)\n",
        "        torch_npu._C._npu_beginAllocateToPool(self._logical, pool.id)\n",
        "tests/contract/test_npu.py",
    ),
    Fault(
        "what a library prints at its end is taken for the doctor's result",
        "worker/rljob_worker/doctor/deep_steps.py",
        "                stderr=errors,\n                text=True,\n                env={**os.environ, **",
        "                stderr=subprocess.STDOUT,\n                text=True,\n                env={**os.environ, **",
        "tests/worker/doctor/test_deep_and_ray.py::test_a_librarys_last_word_is_no_result",
    ),
    Fault(
        "variables that force the NZ layout reach the engine",
        "crds/rljob_api/rules/devices.py",
        'all(getattr(e, field).get(name, "0") == "0" for name in _FORCING_NZ)',
        "True",
        _REFUSED,
    ),
    Fault(
        "without Transformer Engine the router of experts reads a name that nobody defines",
        "worker/rljob_worker/upstream/megatron.py",
        "        put(moe_utils, te_general_gemm=None)\n",
        "        pass\n",
        "tests/worker/models/test_model_conversion.py",
    ),
    Fault(
        "the stages of a replica are dealt to nodes by their ranks, so that a node holds one stage",
        "worker/rljob_worker/parallel_layout.py",
        "            for first in range(0, self.stage_size, share)\n            for stage in stages\n",
        "            for stage in stages\n            for first in range(0, self.stage_size, share)\n",
        "tests/worker/test_parallel_layout.py",
    ),
    Fault(
        "the doctor looks for the memory saver where images have it, and jobs on this machine take another",
        "worker/rljob_worker/cli/doctor.py",
        '            "trainer": {**wanted.trainer, **trainer, **given.variables, **given.trainer},\n',
        '            "trainer": dict(wanted.trainer),\n',
        "tests/contract/test_npu_doctor.py",
    ),
)
