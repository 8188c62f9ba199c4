"""Faults in what sends a token to the engine's experts."""

from __future__ import annotations

from mutants.fault import Fault

RETURNED = "tests/worker/engine/test_returned_experts.py"
TRAINER = "tests/worker/trainer/test_trainer.py"

REPLAY_FAULTS = (
    Fault(
        "a checkpoint forgets the experts of what it carries",
        "worker/rljob_worker/flow/episode.py",
        "**({} if self.experts is None else",
        "**({} if True else",
        "tests/worker/rollouts/test_groups.py::test_a_checkpoint_keeps_the_experts_of_what_is_finished",
    ),
    Fault(
        "tokens that predict no response count among those that routers would have sent elsewhere",
        "worker/rljob_worker/trainer/megatron/expert_replay.py",
        "counted[micro_batch.rows] = True",
        "counted[:] = True",
        f"{TRAINER}::test_each_token_goes_to_the_experts_that_the_batch_names",
    ),
    Fault(
        "experts of the dense layers kept",
        "worker/rljob_worker/engine/loaded_model.py",
        "np.flatnonzero(ModelFacts.from_hf(folder).moe_layers)",
        "np.arange(ModelFacts.from_hf(folder).num_layers)",
        f"{RETURNED}::test_experts_are_those_of_transformers_router",
    ),
    Fault(
        "padding of a token-parallel share taken from the first rank",
        "worker/rljob_worker/trainer/megatron/expert_replay.py",
        "experts.chunk(self._shares)[self._rank]",
        "experts.chunk(self._shares)[0]",
        f"{TRAINER}::test_layouts_agree",
    ),
    Fault(
        "a layer that is computed again takes the experts of the micro-batch after it",
        "worker/rljob_worker/trainer/megatron/expert_replay.py",
        "experts = waiting.popleft()",
        "experts = (waiting.popleft(), self._experts)[1]",
        f"{TRAINER}::test_layouts_agree",
    ),
    Fault(
        "each token goes to the experts of the one after it",
        "worker/rljob_worker/trainer/batches.py",
        "(self.starts - np.arange(len(self)))[sample] + places",
        "self.starts[sample] + places",
        "tests/worker/trainer/test_batches.py::test_micro_batches_hold_the_right_tokens",
    ),
    Fault(
        "the reference policy is routed as the engine was",
        "worker/rljob_worker/trainer/forward_passes.py",
        "self._log_probs(_with_own_routing(updates), sampling)",
        "self._log_probs([one for update in updates for one in update.micro_batches], sampling)",
        f"{TRAINER}::test_the_reference_policy_chooses_its_own_experts",
    ),
)
