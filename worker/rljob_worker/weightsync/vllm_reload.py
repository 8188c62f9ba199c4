"""New weights for a running vLLM 0.23 model, on top of its layerwise reload (`model_executor/model_loader/reload`).

vLLM's own online loaders keep references to the tensors they are given until a module is complete, run every loader
twice (first on meta tensors, to count) and load into new memory. Here a module's tensors come together, so its loaders
run at once, count as they copy, and write into the memory that the engine computes with wherever the module keeps its
weights as they are in a checkpoint. Only modules that pack their weights (oneDNN, grouped expert kernels) get new
memory for the time in between. vLLM also does not notice missing weights; here every module is checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rljob_worker.weightsync.errors import WeightSyncError


class LayerwiseReload:
    """One reload of all parameters of a model; from the first call on, the model cannot run until `finish`."""

    def __init__(self, model: Any) -> None:
        """Open `model` for loading; a reload that was not finished is given up."""
        from vllm.model_executor.model_loader.reload import layerwise

        self._layerwise: Any = layerwise
        self._model = model
        self._modules: dict[str, Any] = dict(model.named_modules())
        self._open: dict[str, int] = {}
        """Modules that loaders have written to -> elements written."""
        self.loader_calls = 0
        self._copied = _CopiedElements()
        self._give_up_unfinished()
        layerwise.initialize_layerwise_reload(model)
        for name, module in self._modules.items():
            for own, parameter in module.named_parameters(recurse=False):
                parameter.weight_loader = self._loader_into(name, own, parameter)

    def _give_up_unfinished(self) -> None:
        for module in self._modules.values():
            info = self._layerwise.get_layerwise_info(module)
            if info.can_load():
                self._layerwise._place_kernel_tensors(module, info)
                info.reset()

    def _loader_into(self, module_name: str, own: str, on_meta: Any) -> Callable[..., Any]:
        original = self._layerwise._get_original_loader(on_meta)

        # Under the name by which the reload finds its way from a wrapped loader back to the original one.
        @functools.wraps(original)
        def online_process_loader(param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.loader_calls += 1
            if module_name not in self._open:
                self._materialize(module_name)
            before = self._copied.elements
            with self._copied:
                result = original(getattr(self._modules[module_name], own), *args, **kwargs)
            self._open[module_name] += self._copied.elements - before
            return result

        online_process_loader.__name__ = "online_process_loader"
        return online_process_loader

    def _materialize(self, name: str) -> None:
        """Give the module's meta tensors memory: the engine's own where that has the layout of the checkpoint."""
        module = self._modules[name]
        info = self._layerwise.get_layerwise_info(module)
        if not info.can_load():
            raise WeightSyncError(f"{name} was given weights again after it was complete")
        parameters, buffers = info.kernel_tensors
        for own, in_use in (parameters | buffers).items():
            on_meta = getattr(module, own, None)
            if on_meta is None or not on_meta.is_meta or not _same_layout(on_meta, in_use):
                continue
            # A loader needs the attributes that the parameter had when it was made (`output_dim` and such).
            place = in_use.data
            place.__class__ = on_meta.__class__
            place.__dict__ = on_meta.__dict__.copy()
            setattr(module, own, place)
        self._layerwise.materialize_layer(module, info)
        self._open[name] = 0

    def complete_modules(self, where: str) -> None:
        """Pack what has been loaded since the last call and put it where the engine computes with it.

        Raises:
            WeightSyncError: a module got only some of its elements, or too many.
        """
        for name, loaded in self._open.items():
            module = self._modules[name]
            expected = sum(parameter.numel() for parameter in module.parameters(recurse=False)) - _padding(module)
            if loaded != expected:
                raise WeightSyncError(f"{where}: the engine's {name} got {loaded} of its {expected} elements")
            self._complete(module)
        self._open.clear()

    def _complete(self, module: Any) -> None:
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        info = self._layerwise.get_layerwise_info(module)
        if hasattr(module, "_already_called_process_weights_after_loading"):
            del module._already_called_process_weights_after_loading
        for tensor in self._layerwise.get_layer_tensors(module).values():
            tensor.weight_loader = self._layerwise._get_original_loader(tensor)
        if isinstance(getattr(module, "quant_method", None), QuantizeMethodBase) and not self._ready_as_is(
            module, info
        ):
            module.quant_method.process_weights_after_loading(module)
        parameters, buffers = info.kernel_tensors
        for own, in_use in (parameters | buffers).items():
            new = getattr(module, own)
            if new.data_ptr() != in_use.data_ptr() or not _same_layout(new, in_use):
                in_use.data.copy_(new)
        self._layerwise._place_kernel_tensors(module, info)
        info.reset()

    def _ready_as_is(self, module: Any, info: Any) -> bool:
        """Whether the module computes with its parameters alone, which are new already.

        On CPU, `cpu_linear` is what multiplies. Where it is a plain function of the weight, as on CPUs whose
        instructions oneDNN's packed kernels do not support, there is nothing packed that would be out of date, and
        finding that out again takes vLLM longer than the copy.
        """
        multiply = getattr(module, "cpu_linear", None)
        if not isinstance(multiply, FunctionType) or multiply.__closure__ or multiply.__defaults__:
            return False
        return all(
            getattr(module, own).data_ptr() == in_use.data_ptr() for own, in_use in info.kernel_tensors[0].items()
        )

    def finish(self, where: str, model_config: Any) -> None:
        """Make the model ready to run; WeightSyncError naming a parameter that was not loaded."""
        tied = self._tied_modules(where)
        self._layerwise.finalize_layerwise_reload(self._model, model_config)
        for module in tied:
            # The shared parameter is new, but what was packed out of it for this module is not.
            module.quant_method.process_weights_after_loading(module)
        for name, parameter in self._model.named_parameters():
            if parameter.is_meta:
                raise WeightSyncError(f"{where}: the engine's {name} has no weights")

    def _tied_modules(self, where: str) -> list[Any]:
        """Modules that got nothing because all their parameters belong to modules that did; any other is an error."""
        waiting: dict[str, dict[str, Any]] = {}
        loaded: set[int] = set()
        for name, module in self._modules.items():
            info = self._layerwise.get_layerwise_info(module)
            if not info.can_load():
                loaded |= {id(parameter) for parameter in module.parameters(recurse=False)}
            elif info.kernel_tensors[0]:
                waiting[name] = info.kernel_tensors[0]
        for name, parameters in waiting.items():
            for own, parameter in parameters.items():
                if id(parameter) not in loaded:
                    raise WeightSyncError(f"{where}: the engine's {name}.{own} was not loaded")
        return [self._modules[name] for name in waiting]


class _CopiedElements(TorchDispatchMode):
    """Counts the elements that `copy_` writes; whatever a loader cuts or transposes before, it ends in that."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Guarding the counter against being compiled takes longer than counting.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def _same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()


def _padding(module: Any) -> int:
    """Elements of a vocabulary shard that no checkpoint has; its loader fills them with zeros."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if not isinstance(module, VocabParallelEmbedding):
        return 0
    rows = module.num_embeddings_per_partition - module.shard_indices.num_org_elements
    return int(rows * module.embedding_dim + (rows if getattr(module, "bias", None) is not None else 0))
