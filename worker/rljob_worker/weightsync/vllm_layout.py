"""Places of the tensors of a checkpoint in a running vLLM 0.23 model.

vLLM's own loaders are the only ones that know: fused parameters, shards, experts, padding. They run once, over tensors
that have no memory, and every copy that they would make is noted. From then on a sync makes these copies itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from rljob_worker.errors import WeightSyncError
from rljob_worker.tensor_slice import storage_of
from rljob_worker.upstream.patch import put
from rljob_worker.upstream.vllm_types import AttentionLayer, ModelConfig
from rljob_worker.weightsync.places import Copy, Places, View
from rljob_worker.weightsync.vllm_module import Module, find_tables

if TYPE_CHECKING:
    from rljob_worker.upstream.vllm_types import Model

_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


class ModelLayout(Places):
    """Places of each tensor of a checkpoint in one model; made once, good for as long as `holds`."""

    def __init__(self, model: Model, tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        """Run the loaders of `model` over tensors of these names and shapes, without memory.

        Raises:
            WeightSyncError: the model has no parameter for a tensor, a module got too few or too many elements, a
                parameter gets nothing, or a loader changes values on the way.
        """
        self._model = model
        copies: dict[str, list[Copy]] = {name: [] for name in tensors}
        with _on_meta(model) as modules:
            trace = _Trace(modules, copies)
            given = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in tensors.items()}
            trace.run(model, given)
            self._tied = _check_complete(modules, trace.elements)
        find_tables(modules.values())
        self.modules = {name: module for name, module in modules.items() if module.tensors}
        super().__init__(tensors, copies, self.modules)
        for module in self.modules.values():
            module.scratch = self.scratch
        self._in_place = [
            parameter
            for module in self.modules.values()
            if module.lands_in_place()
            for parameter in module.in_use[0].values()
        ]
        self._owned = [
            (module.module._parameters, name, parameter)
            for module in self.modules.values()
            for name, parameter in module.in_use[0].items()
        ]
        self._addresses = self._addresses_now()
        self._attentions = list(_attention_layers(model))
        self._on_device = any(parameter.device.type != "cpu" for parameter in model.parameters())

    def holds(self, model: Model) -> bool:
        """Whether `model` still computes with the parameters that were there, where they were in memory."""
        if model is not self._model or self._addresses_now() != self._addresses:
            return False
        return all(parameters.get(name) is parameter for parameters, name, parameter in self._owned)

    def _addresses_now(self) -> list[int]:
        # vLLM's parameters are classes that look at each call.
        with torch._C.DisableTorchFunctionSubclass():
            return [parameter.data_ptr() for parameter in self._in_place]

    def finish(self, model_config: ModelConfig) -> None:
        """Make the model ready to run when every module is complete."""
        for module in self._tied:
            # The shared parameter is new, but what was packed out of it for this module is not.
            if not module.lands_in_place():
                module.pack()
        for layer in self._attentions:
            layer.process_weights_after_loading(model_config.dtype)
        # The others have set constants alone, which stay.
        self._attentions = [layer for layer in self._attentions if _derives_from_weights(layer)]
        if self._on_device:
            self.scratch.drop()  # memory that the KV cache needs


def _attention_layers(model: Model) -> Iterator[AttentionLayer]:
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    for layer in model.modules():
        if isinstance(layer, (Attention, MLAAttention)):
            found: AttentionLayer = layer
            yield found


def _derives_from_weights(layer: AttentionLayer) -> bool:
    """Whether an attention layer, or what computes it, makes anything of loaded weights."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionImplBase

    if type(layer).process_weights_after_loading is not Attention.process_weights_after_loading:
        return True
    made = type(layer.impl).process_weights_after_loading
    return made is not AttentionImplBase.process_weights_after_loading


@contextmanager
def _on_meta(model: Model) -> Iterator[dict[str, Module]]:
    """The modules of the model, whose parameters are on meta inside, in the layout of a checkpoint."""
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise.initialize_layerwise_reload(model)
    modules = {}
    for name, module in model.named_modules():
        info = layerwise.get_layerwise_info(module)
        assert info.kernel_tensors is not None, "the reload has set what the model computes with aside"
        parameters, buffers = info.kernel_tensors
        modules[name] = Module(name, module, layerwise.get_layer_tensors(module), (parameters, buffers))
    try:
        yield modules
    finally:
        for module in modules.values():
            for tensor in module.in_checkpoint.values():
                put(tensor, weight_loader=layerwise._get_original_loader(tensor))
            module.place_back()
            layerwise.get_layerwise_info(module.module).reset()
        model._do_torchao_reload = model._original_do_torchao_reload


class _Trace(TorchDispatchMode):
    """Notes what loaders do to parameters."""

    def __init__(self, modules: Mapping[str, Module], copies: dict[str, list[Copy]]) -> None:
        super().__init__()
        self._modules, self._copies = modules, copies
        self._parameters: dict[int, tuple[str, str]] = {}
        self._given: dict[int, str] = {}
        self.elements: dict[str, int] = {}
        """Modules that loaders have written to -> elements written."""

    def run(self, model: Model, given: Mapping[str, torch.Tensor]) -> None:
        """Load `given`; WeightSyncError when the model has no use for one of them."""
        from vllm.model_executor.model_loader.reload import layerwise

        called: set[str] = set()
        self._given = {storage_of(tensor): name for name, tensor in given.items()}
        for name, module in self._modules.items():
            for own, parameter in module.module.named_parameters(recurse=False):
                self._parameters[storage_of(parameter)] = (name, own)
                put(parameter, weight_loader=self._traced(layerwise._get_original_loader(parameter), called))
        model.load_weights(iter(given.items()))
        # `load_weights` skips names it does not know without a word: the only trace is that no loader was called.
        for name in given:
            if name not in called:
                raise WeightSyncError(f"the engine's model has no parameter for {name}")

    def _traced(self, original: Callable[..., object], called: set[str]) -> Callable[..., object]:
        # Under the name by which the reload finds its way from a wrapped loader back to the original one.
        @functools.wraps(original)
        def online_process_loader(param: torch.Tensor, *args: object, **kwargs: object) -> object:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            called.update(self._given[storage_of(tensor)] for tensor in tensors if storage_of(tensor) in self._given)
            with self:
                return original(param, *args, **kwargs)

        online_process_loader.__name__ = "online_process_loader"
        return online_process_loader

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            place = self._parameters.get(storage_of(args[0]))
            if place is not None:
                self._note(func, place, args[0], args[1:])
        return func(*args, **(kwargs or {}))

    def _note(
        self, func: OpOverload[..., object], place: tuple[str, str], target: torch.Tensor, args: Sequence[object]
    ) -> None:
        module = self._modules[place[0]]
        self.elements[place[0]] = self.elements.get(place[0], 0) + target.numel()
        if func in _FILLS:
            value = args[0] if args else 0.0
            assert isinstance(value, int | float)
            module.fills.append((place[1], View.of(target), value))
            return
        source = args[0] if func is torch.ops.aten.copy_.default else None
        name = self._given.get(storage_of(source)) if isinstance(source, torch.Tensor) else None
        if name is None or not isinstance(source, torch.Tensor):
            raise WeightSyncError(f"the loader of the engine's {'.'.join(place)} does more than copy: {func}")
        module.tensors.add(name)
        self._copies[name].append(Copy(*place, View.of(source), View.of(target)))


def _check_complete(modules: Mapping[str, Module], elements: Mapping[str, int]) -> list[Module]:
    """Modules that get nothing because all their parameters belong to modules that do; any other is an error."""
    loaded: set[int] = set()
    waiting = []
    for name, module in modules.items():
        parameters = module.in_use[0]
        if name in elements:
            expected = sum(parameter.numel() for parameter in module.module.parameters(recurse=False))
            if elements[name] != expected:
                raise WeightSyncError(f"the engine's {name} got {elements[name]} of its {expected} elements")
            loaded |= {id(parameter) for parameter in parameters.values()}
        elif parameters:
            waiting.append(module)
    for module in waiting:
        for own, parameter in module.in_use[0].items():
            if id(parameter) not in loaded:
                raise WeightSyncError(f"the engine's {module.name}.{own} was not loaded")
    return waiting
