"""Names that MindSpeed core_r0.16.0 replaces and the trainer's code uses; what each replacement means for us."""

from __future__ import annotations

from collections.abc import Mapping

_DDP = "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"
_CONFIG = "megatron.core.transformer.transformer_config.TransformerConfig"

JUDGED: Mapping[str, str] = {
    f"{_DDP}.start_param_sync": "the same without an overlapped gather, which no job has; takes one argument more",
    "megatron.core.optimizer.get_megatron_optimizer": (
        "notes which optimizers hold experts, for the gather above; the optimizer is Megatron's"
    ),
    "megatron.core.tensor_parallel.layers.VocabParallelEmbedding.forward": (
        "masks by multiplication in place of an indexed write; the same values, also with tensor parallelism"
    ),
    "megatron.core.transformer.attention.SelfAttention.__init__": (
        "another order of allocations where parameters are gathered while others compute; no job has that"
    ),
    f"{_CONFIG}.__init__": (
        "what MindSpeed's command line says of a field of this name comes before Megatron's default: our own command "
        "line says one thing, and the values of every field that is asked for are passed"
    ),
    f"{_CONFIG}.__init_subclass__": "gives subclasses fields of MindSpeed's; no class of ours is one",
    f"{_CONFIG}.__post_init__": "MindSpeed's own checks of its settings, and a rotary kernel that we do not ask for",
    "torch.Tensor.type": "says cuda where torch_npu says npu, as Megatron's optimizer reads it",
    "torch.Tensor.view": (
        "copies a tensor that is not contiguous, where torch refuses: what is written to the result is lost then. "
        "Views that are written to are of flat buffers and of whole parameters, which are contiguous"
    ),
    "torch.distributed.all_reduce": (
        "reduces float64 as a float copy that is thrown away: metrics are gathered and added up by each rank "
        "(trainer/objective.py), and nothing else that we reduce is float64"
    ),
    "torch.nn.parameter.Parameter.type": "as torch.Tensor.type",
}
