"""Faults of FSDP's jobs, made by hand."""

from __future__ import annotations

from mutants.fault import Fault

MODELS = "tests/worker/models/test_transformers_model.py"
ROWS = "tests/worker/planning/test_fsdp_rows.py"
ADAPTERS = "tests/worker/models/test_adapters.py"
ADAPTED_RANKS = "tests/worker/trainer/test_fsdp_lora.py"
VIEWS = "tests/worker/models/test_checkpoint_views.py"
RANKS = "tests/worker/trainer/test_fsdp.py::test_any_number_of_ranks_and_blocks_is_megatron"
RELEASED = "tests/worker/trainer/test_fsdp.py::test_groups_that_go_asleep_change_no_bit"
ATTENTION = "tests/worker/trainer/test_fsdp_attention.py"
SEEING = "tests/worker/engine/test_pictures_on_engine.py::test_trainer_and_engine_see_the_same_pictures"
MANY_TOKENS = "tests/worker/engine/test_pictures_on_engine.py::test_none_of_many_sampled_tokens_is_a_placeholder"
CRITIC = "tests/worker/trainer/test_critic.py::test_values_advantages_and_updates_are_those_of_float64_loops"
BUFFERS = "tests/worker/trainer/test_state_buckets.py::test_any_order_that_a_device_may_take_gives_the_same_bits"
STATE = "tests/worker/trainer/test_trainer.py::test_an_offloaded_state_comes_two_buckets_at_a_time"

FSDP_FAULTS: tuple[Fault, ...] = (
    Fault(
        "a tied embedding gathered apart from the head that it is",
        "worker/rljob_worker/models/hf_model.py",
        "model.get_output_embeddings().weight is not model.get_input_embeddings().weight",
        "model.get_output_embeddings() is not model.get_input_embeddings()",
        MODELS,
    ),
    Fault(
        "a model that vLLM does not have",
        "worker/rljob_worker/models/served.py",
        "if served and trained not in served:",
        "if not served and trained not in served:",
        MODELS,
    ),
    Fault(
        "random weights drawn from the process's own generator",
        "worker/rljob_worker/models/random_model.py",
        "        torch.manual_seed(seed)\n",
        "",
        MODELS,
    ),
    Fault(
        "saved memory counted for each tensor in it",
        "worker/rljob_worker/planning/fsdp.py",
        "if storage not in self._own and storage not in self._kept:",
        "if storage not in self._own:",
        ROWS,
    ),
    Fault(
        "rows planned without the first rank's larger share",
        "worker/rljob_worker/planning/fsdp.py",
        "-(-shape[0] // shards)",
        "shape[0] // shards",
        ROWS,
    ),
    Fault(
        "layers that stay gathered, planned as if they did not",
        "worker/rljob_worker/planning/fsdp.py",
        "if fsdp is not None and not fsdp.reshard_after_forward:",
        "if fsdp is None:",
        ROWS,
    ),
    Fault(
        "adapters rounded where they are gathered, merged from fp32 where they are handed over",
        "worker/rljob_worker/trainer/fsdp/rank_state.py",
        "dtype if training.lora is None else None",
        "dtype",
        ADAPTED_RANKS,
    ),
    Fault(
        "engines that get the weights without their adapters",
        "worker/rljob_worker/trainer/fsdp/backend.py",
        "computed = {} if rank.adapters is None else rank.adapters.merged_rows",
        "computed = {}",
        ADAPTED_RANKS,
    ),
    Fault(
        "rows merged with the first rows of B",
        "worker/rljob_worker/trainer/fsdp/adapters.py",
        "self._modules[name].scale)[mine.start : mine.stop]",
        "self._modules[name].scale)[: len(mine)]",
        ADAPTED_RANKS,
    ),
    Fault(
        "an adapter without its scale in the gradient of A",
        "worker/rljob_worker/models/adapters.py",
        "of_a = (rows @ b).T @ inputs * ctx.scale",
        "of_a = (rows @ b).T @ inputs",
        ADAPTERS,
    ),
    Fault(
        "a digest that does not see rows change places",
        "worker/rljob_worker/models/adapters.py",
        "seed=first + n",
        "seed=0",
        ADAPTERS,
    ),
    Fault(
        "a reference policy with its adapters on",
        "worker/rljob_worker/models/adapters.py",
        "        module.adapted = False\n",
        "        module.adapted = True\n",
        ADAPTED_RANKS,
    ),
    Fault(
        "B handed over without its scale",
        "worker/rljob_worker/trainer/fsdp/adapters.py",
        'return scaled(self._shards.trained[f"{name}.{B}"], self._modules[name].scale)',
        'return self._shards.trained[f"{name}.{B}"].clone()',
        ADAPTED_RANKS,
    ),
    Fault(
        "weights of the root that stay gathered after a pass",
        "worker/rljob_worker/trainer/fsdp/model.py",
        "                unit.reshard()\n",
        "                pass\n",
        RANKS,
    ),
    Fault(
        "shards over the group of all ranks, which FSDP keeps when groups are released",
        "worker/rljob_worker/trainer/fsdp/rank_state.py",
        "shard = [dist.new_group(line) for line in ranks.tolist()][layout.rank // layout.shards]",
        "shard = dist.group.WORLD",
        RELEASED,
    ),
    Fault(
        "a padding token whose row is never trained",
        "worker/rljob_worker/models/hf_model.py",
        "    model.get_input_embeddings().padding_idx = None\n",
        "",
        RANKS,
    ),
    Fault(
        "a cap of attention's logits left to torch's kernel, which has none",
        "worker/rljob_worker/models/hf_model.py",
        'kind._supports_sdpa and getattr(config, "attn_logit_softcapping", None) is None',
        "kind._supports_sdpa",
        VIEWS,
    ),
    Fault(
        "a row's attention without its cap",
        "worker/rljob_worker/trainer/fsdp/attention.py",
        "if softcap is None and s_aux is None and window is None",
        "if s_aux is None and window is None",
        ATTENTION,
    ),
    Fault(
        "rows of a transposed tensor read as if it were not",
        "worker/rljob_worker/models/checkpoint_views.py",
        "return place, RowsView(place.shape, self.stride, offset)",
        "return place, RowsView(place.shape, self.stride[::-1], offset)",
        VIEWS,
    ),
    Fault(
        "a tensor of the checkpoint that is the model's transposed",
        "worker/rljob_worker/models/checkpoint_views.py",
        "if name in shapes and shapes[name] != shape\n",
        "if name in shapes and sorted(shapes[name]) != sorted(shape)\n",
        VIEWS,
    ),
    Fault(
        "rows of a checkpoint's tensor one after those that are held",
        "worker/rljob_worker/models/checkpoint_views.py",
        "place = TensorSlice(self.name, self.shape, dim, low - start, high - low)",
        "place = TensorSlice(self.name, self.shape, dim, min(low - start + 1, length - high + low), high - low)",
        VIEWS,
    ),
    Fault(
        "a buffer of the checkpoint left out",
        "worker/rljob_worker/models/hf_model.py",
        "    _check_buffers(model, where)\n",
        "",
        VIEWS,
    ),
    Fault(
        "features of pictures that outlive the weights that made them",
        "worker/rljob_worker/engine/sleep_controller.py",
        "        self._engine.engine_core.reset_encoder_cache()\n",
        "",
        SEEING,
    ),
    Fault(
        "placeholders of pictures that are sampled",
        "worker/rljob_worker/engine/sampling.py",
        "    if sampling.forbidden:\n",
        "    if False:\n",
        MANY_TOKENS,
    ),
    Fault(
        "a critic's values of the token after",
        "worker/rljob_worker/trainer/fsdp/model.py",
        "return TokenValues.of_critic(table) if wanted",
        "return TokenValues.of_critic(table.roll(-1, 0)) if wanted",
        CRITIC,
    ),
    Fault(
        "an offloaded state that comes all at once",
        "worker/rljob_worker/trainer/state_buckets.py",
        "if place > first and held + size > BUCKET_ELEMENTS:",
        "if False:",
        STATE,
    ),
    Fault(
        "a bucket that goes back before it is updated",
        "worker/rljob_worker/trainer/state_buckets.py",
        "overlap.copy(partial(_copy, bucket, home), updated)",
        "overlap.copy(partial(_copy, bucket, home), None)",
        BUFFERS,
    ),
    Fault(
        "a bucket that is updated before it is there",
        "worker/rljob_worker/trainer/state_buckets.py",
        "partial(update, number, bucket), ready)",
        "partial(update, number, bucket), None)",
        BUFFERS,
    ),
    Fault(
        "a bucket that updates its neighbours too",
        "worker/rljob_worker/trainer/megatron/optimizer_state.py",
        '[main for main in group["params"] if id(main) in wanted]',
        'list(group["params"])',
        "tests/worker/trainer/test_trainer.py::test_recompute_offload_and_memory_saver_change_no_bit",
    ),
)
