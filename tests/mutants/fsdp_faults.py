"""Faults of FSDP's jobs, made by hand."""

from __future__ import annotations

from mutants.fault import Fault

MODELS = "tests/worker/models/test_transformers_model.py"
ROWS = "tests/worker/planning/test_fsdp_rows.py"
ADAPTERS = "tests/worker/models/test_adapters.py"
ADAPTED_RANKS = "tests/worker/trainer/test_fsdp_lora.py"

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
)
