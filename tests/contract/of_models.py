"""Contracts of Megatron on devices, MindSpeed and the fused kernels."""

from __future__ import annotations

from contracts import Contract, Kind, Source

_ATTENTION, _NPU, _SEEDING, _SAVED = (
    "trainer/packed_attention.py",
    "trainer/megatron/models/megatron_npu.py",
    "trainer/megatron/models/seeding.py",
    "trainer/random_states.py",
)
_MINDSPEED_PATCH = "upstream/mindspeed.py"
_META = "torch_npu/op_plugin/meta/_meta_registrations.py"
_FEATURES = "mindspeed/features_manager/megatron_basic/requirements_basic.py"
_OPTIMIZER = "megatron/core/optimizer/__init__.py"

_KERNELS = (
    # The meta implementation takes what the operator takes; its name in Python is its own.
    Contract(
        Source.TORCH_NPU,
        Kind.FUNCTION,
        "npu_fusion_attention_forward",
        _META,
        _ATTENTION,
        "attention; the first of its results is the context",
        ("query", "key", "value", "head_num", "input_layout"),
        ("atten_mask", "scale", "keep_prob", "sparse_mode", "actual_seq_qlen", "actual_seq_kvlen"),
        spelled="npu_fusion_attention",
        executed=True,
    ),
    Contract(
        Source.TORCH_NPU,
        Kind.TEXT,
        '@impl(m, "npu_fusion_attention")\ndef npu_fusion_attention_forward(',
        _META,
        _ATTENTION,
        "the operator of that implementation",
        spelled="npu_fusion_attention",
        executed=True,
    ),
    Contract(
        Source.TORCH_NPU,
        Kind.FUNCTION,
        "npu_swiglu_meta",
        _META,
        _NPU,
        "silu(gate) * up of the halves of `dim`",
        ("x", "dim"),
        spelled="npu_swiglu",
        executed=True,
    ),
    *(
        Contract(
            Source.TORCH_NPU,
            Kind.FUNCTION,
            f"random.{name}",
            "torch_npu/npu/random.py",
            _SAVED,
            why,
            parameters,
            executed=name == "get_rng_state",
        )
        for name, why, parameters in (
            ("get_rng_state", "the device's generator, for a checkpoint", ("device",)),
            ("set_rng_state", "the same, put back", ("new_state", "device")),
        )
    ),
    *(
        Contract(
            Source.TORCH, Kind.FUNCTION, f"cuda.random.{name}", "torch/cuda/random.py", _SAVED, "as on NPUs", parameters
        )
        for name, parameters in (("get_rng_state", ("device",)), ("set_rng_state", ("new_state", "device")))
    ),
)

_MEGATRON = (
    Contract(
        Source.MEGATRON,
        Kind.FUNCTION,
        "random.model_parallel_cuda_manual_seed",
        "megatron/core/tensor_parallel/random.py",
        _SEEDING,
        "seeds the generators of tensor parallelism",
        ("seed",),
    ),
    Contract(
        Source.MEGATRON,
        Kind.TEXT,
        "from apex.optimizers import FusedAdam as Adam",
        _OPTIMIZER,
        _SEEDING,
        "name that MindSpeed's optimizer takes the place of, bound when the module is imported",
        spelled="optimizer.Adam",
    ),
    Contract(
        Source.MEGATRON,
        Kind.TEXT,
        "from torch.optim import AdamW as Adam",
        _OPTIMIZER,
        _SEEDING,
        "the same without apex",
        spelled="optimizer.Adam",
    ),
)

_MINDSPEED = tuple(
    Contract(Source.MINDSPEED, Kind.RECORDED, name, file, used_in, why, spelled=spelled, executed=True)
    for name, file, used_in, why, spelled in (
        (
            "mindspeed.megatron_adaptor",
            "mindspeed/megatron_adaptor.py",
            _MINDSPEED_PATCH,
            "patches torch and Megatron when it is imported",
            "mindspeed.megatron_adaptor",
        ),
        (
            "parser.parse_known_args()",
            "mindspeed/args_utils.py",
            _MINDSPEED_PATCH,
            "reads its settings from sys.argv then, and lets others pass",
            "sys.argv",
        ),
        (
            "--optimizer-selection=fused_torch_adamw",
            _FEATURES,
            _MINDSPEED_PATCH,
            "registers FusedTorchAdamW as apex.optimizers.FusedAdam",
            "--optimizer-selection=fused_torch_adamw",
        ),
        (
            "FusedTorchAdamW(torch.optim.adamw.AdamW)",
            "mindspeed/core/optimizer/adamw.py",
            _SEEDING,
            "keeps the count of updates in each parameter's state, as torch's does",
            "torch.optim.AdamW",
        ),
    )
)

CONTRACTS = (*_KERNELS, *_MEGATRON, *_MINDSPEED)
