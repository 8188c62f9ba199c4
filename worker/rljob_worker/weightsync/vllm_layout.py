"""Places of the tensors of a checkpoint in a running vLLM 0.23 model.

vLLM's own loaders are the only ones that know: fused parameters, shards, experts, padding. They run once, over tensors
that have no memory, and every copy that they would make is noted. From then on a sync makes these copies itself.

Parameters that the engine computes with as they are in a checkpoint are written where they are. Modules that pack their
weights out of sight (oneDNN, grouped expert kernels) get parameters in the checkpoint's layout for the time in between,
which vLLM packs, and the result goes into the memory that the engine computes with.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Protocol

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from rljob_worker.devices import packed_linear
from rljob_worker.errors import WeightSyncError
from rljob_worker.tensor_slice import Part, storage_of
from rljob_worker.upstream.patch import put
from rljob_worker.upstream.vllm_types import AttentionLayer, ModelConfig

if TYPE_CHECKING:
    from rljob_worker.upstream.vllm_types import Model
    from rljob_worker.weightsync.slots import Batch

_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a tensor's memory, as `torch.as_strided` has them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements from the tensor's first one."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """The view that `tensor` is of a tensor that begins where its storage does."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of `tensor`."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Taken:
    """Pieces and groups of a bucket of which a worker has a part."""

    groups: list[bool]
    untaken: list[int]
    """Numbers of pieces, tensor by tensor."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of a checkpoint's tensor, and where they go."""

    module: str
    parameter: str
    """Name inside the module."""
    source: View
    target: View


class Scratch:
    """Memory for the parameters of one module after the other, kept: new pages cost more than the copy into them."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """A tensor of the shape, strides and dtype of `like`, with any values; of a device, or torch's default one."""
        for position, tensor in enumerate(self._free):
            if same_layout(tensor, like):
                return self._free.pop(position)
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)

    def give_back(self, tensors: list[torch.Tensor]) -> None:
        """Nobody uses them any more."""
        self._free += tensors

    def drop(self) -> None:
        """Free the memory."""
        self._free = []


class Owner(Protocol):
    """A module of the engine, which has places."""

    name: str
    tensors: set[str]
    """Names of what it is loaded from."""

    @property
    def fills(self) -> Sequence[object]:
        """Padding that no sync brings."""
        ...

    def parameter(self, name: str) -> torch.Tensor:
        """The one that copies go to now."""
        ...

    def lands_in_place(self) -> bool:
        """Whether it computes with what copies are made into, as it is."""
        ...

    def keeps_layout(self) -> bool:
        """Whether what it computes with is in the layout of what comes."""
        ...

    def begin(self) -> None:
        """Have places in the layout of what comes."""
        ...

    def complete(self) -> None:
        """All of it has come."""
        ...

    def place_back(self) -> None:
        """Be as before `begin`."""
        ...


class Places(ABC):
    """The place of each tensor of a sync.

    Args:
        tensors: shapes of all of them.
        copies: what is copied of each, found once.
        owners: by name.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[int, ...]], copies: Mapping[str, list[Copy]], owners: Mapping[str, Owner]
    ) -> None:
        self.copies = copies
        self._owners = owners
        self.scratch = Scratch()
        self.taken = {name: part_of(found, tuple(tensors[name])) for name, found in copies.items() if found}
        """The part of each tensor that goes to one place as it is; None where it does not."""
        self.owners = {
            name: [owners[owner] for owner in dict.fromkeys(copy.module for copy in found)]
            for name, found in copies.items()
        }
        """The modules that each tensor goes to."""
        self.kept: dict[int, list[Batch | None]] = {}
        """Bucket -> how all of it lands, by group of pieces, where no module's parameters come and go."""
        self.of_bucket: dict[int, Taken] = {}
        """Bucket -> what this worker has a part of."""

    def copy(self, name: str, whole: torch.Tensor) -> None:
        """Copy a whole tensor to its places."""
        for source, target in self.pairs(name, whole):
            target.copy_(source)

    def pairs(self, name: str, whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of a whole tensor, and their places."""
        return [(copy.source.on(whole), self._target(copy)) for copy in self.copies[name]]

    def place(self, name: str, first: int, count: int) -> tuple[Part | None, torch.Tensor]:
        """Find the place of some rows of a tensor that `taken` has a part of.

        Args:
            name: the tensor.
            first: index of the first row.
            count: rows.

        Returns:
            A part of a tensor of these rows alone, None where none of them is taken; and the memory that has that part.
        """
        taken, part = self.taken[name], self.part(name, first, count)
        assert taken is not None
        target = self._target(self.copies[name][0])
        if taken.dim != 0:
            return taken, target.narrow(0, first, count)
        if part is None:
            return None, target
        rows = count if part.dim is None else part.length
        return part, target.narrow(0, max(taken.start, first) - taken.start, rows)

    def part(self, name: str, first: int, count: int) -> Part | None:
        """The part of some rows that is taken of a tensor that `taken` has a part of; None: none."""
        taken = self.taken[name]
        assert taken is not None
        if taken.dim != 0:
            return taken
        start, end = max(taken.start, first), min(taken.start + taken.length, first + count)
        if start >= end:
            return None
        return Part() if end - start == count else Part(0, start - first, end - start)

    def _target(self, copy: Copy) -> torch.Tensor:
        return copy.target.on(self._owners[copy.module].parameter(copy.parameter))

    def packed(self) -> Iterator[str]:
        """Names of modules whose parameters are in another layout than a checkpoint's."""
        return (name for name, module in self._owners.items() if not module.keeps_layout())

    def place_back(self) -> None:
        """Give up what an unfinished sync has begun."""
        for module in self._owners.values():
            module.place_back()

    @abstractmethod
    def finish(self, model_config: ModelConfig) -> None:
        """Make the model ready to run when all tensors are there."""

    @abstractmethod
    def holds(self, model: Model) -> bool:
        """Whether the places are still what `model` computes with."""


def part_of(copies: Sequence[Copy], shape: tuple[int, ...]) -> Part | None:
    """The part of a tensor of `shape` that goes to one place as it is; None where it is none, or changes its shape."""
    source, target = copies[0].source, copies[0].target
    if len(copies) > 1 or source.stride != _strides(shape) or source.shape != target.shape:
        return None
    cut = [dim for dim, length in enumerate(shape) if source.shape[dim] != length]
    if not cut:
        return Part()
    return Part(cut[0], source.offset // source.stride[cut[0]], source.shape[cut[0]]) if len(cut) == 1 else None


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, strides and number format."""
    return one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()


@dataclass(slots=True)
class Module:
    """A module of the engine that owns parameters."""

    name: str
    module: torch.nn.Module
    in_checkpoint: dict[str, torch.Tensor]
    """Its parameters and buffers as loaders expect them, on meta."""
    in_use: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
    """The parameters and buffers that it computes with."""
    fills: list[tuple[str, View, float]] = field(default_factory=list)
    """Padding that no checkpoint has."""
    tensors: set[str] = field(default_factory=set)
    """Names of what it is loaded from."""
    never_multiplies: bool = False
    """It is a table to look things up in, though vLLM on CPU packs it for products like any other weight."""
    order: packed_linear.Order | None = None
    """Order of what torch packed of its weight; None where that is not known (yet)."""
    scratch: Scratch = field(default_factory=Scratch)
    taken: list[torch.Tensor] = field(default_factory=list)
    """Parts of the scratch memory that it uses."""
    in_place: bool | None = None
    """Result of `lands_in_place`."""

    def parameter(self, name: str) -> torch.Tensor:
        """The one that copies go to now."""
        parameter: torch.Tensor = getattr(self.module, name)
        return parameter.data

    def begin(self) -> None:
        """Give it parameters in the checkpoint's layout, unless it has them."""
        if self.lands_in_place():
            return
        in_use = self.in_use[0] | self.in_use[1]
        self._remove()
        for name, wanted in self.in_checkpoint.items():
            current = in_use.get(name)
            if current is not None and same_layout(wanted, current):
                place = current.data
            else:
                self.taken.append(self.scratch.take(wanted))
                place = self.taken[-1].detach()
            # Loading and packing need the attributes that the parameter had when it was made (`output_dim` and such).
            place.__class__ = wanted.__class__
            place.__dict__ = wanted.__dict__.copy()
            if isinstance(place, torch.nn.Parameter):
                self.module.register_parameter(name, place)
            else:
                self.module.register_buffer(name, place)

    def complete(self) -> None:
        """Pack what it was given, and put it where the engine computes with it."""
        for name, view, value in self.fills:
            view.on(self.parameter(name)).fill_(value)
        if self.lands_in_place():
            return
        if hasattr(self.module, "_already_called_process_weights_after_loading"):
            del self.module._already_called_process_weights_after_loading
        self.pack()
        parameters, buffers = self.in_use
        for name, current in (parameters | buffers).items():
            new = getattr(self.module, name)
            if self.order is not None and new.shape != current.shape:
                continue  # what vLLM leaves of a weight that it has packed
            if new.data_ptr() != current.data_ptr() or not same_layout(new, current):
                current.data.copy_(new)
        self.place_back()

    def pack(self) -> None:
        """Do what vLLM does with a module's parameters once they are loaded, in memory that is there if possible."""
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        weight, packed = getattr(self.module, "weight", None), self._packed()
        if self.order is not None and weight is not None and packed is not None:
            packed_linear.repack(packed, weight.data, self.order)
            return
        method = getattr(self.module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(self.module)
        packed = self._packed()
        if weight is not None and packed is not None:
            self.order = packed_linear.order_of(packed, weight.data)

    def _packed(self) -> torch.Tensor | None:
        """Weight as packed by torch, where `cpu_linear` multiplies with that one."""
        for cell in getattr(getattr(self.module, "cpu_linear", None), "__closure__", None) or ():
            if isinstance(cell.cell_contents, torch.Tensor) and cell.cell_contents.is_mkldnn:
                return cell.cell_contents
        return None

    def place_back(self) -> None:
        """Put the parameters and buffers back that it computes with."""
        self._remove()
        self.scratch.give_back(self.taken)
        self.taken = []
        for name, parameter in self.in_use[0].items():
            assert isinstance(parameter, torch.nn.Parameter)
            self.module.register_parameter(name, parameter)
        for name, buffer in self.in_use[1].items():
            self.module.register_buffer(name, buffer)

    def _remove(self) -> None:
        for own in (self.module._parameters, self.module._buffers):
            for name in [name for name, tensor in own.items() if tensor is not None]:
                delattr(self.module, name)

    def lands_in_place(self) -> bool:
        """Whether it computes with its parameters alone, as they are in a checkpoint.

        On CPU, `cpu_linear` is what multiplies, and where it is a plain function of the weight nothing is packed, as on
        CPUs whose instructions oneDNN's packed kernels do not support.
        """
        if self.in_place is None:
            self.in_place = self._computes_as_loaded()
        return self.in_place

    def keeps_layout(self) -> bool:
        """Whether its parameters are as in a checkpoint: new ones are written where those are, and nothing else."""
        wanted = self.in_checkpoint
        return all(name in wanted and same_layout(wanted[name], now) for name, now in self.in_use[0].items())

    def _computes_as_loaded(self) -> bool:
        if not self.keeps_layout():
            return False
        if getattr(self.module, "quant_method", None) is None:
            return True
        multiply = getattr(self.module, "cpu_linear", None)
        if multiply is None:
            return False
        plain = isinstance(multiply, FunctionType) and not multiply.__closure__ and not multiply.__defaults__
        return plain or self.never_multiplies


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
        _find_tables(modules.values())
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


def _find_tables(modules: Iterable[Module]) -> None:
    """Mark the embeddings of models that have a head of their own; elsewhere the embeddings are the head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules = list(modules)
    if not any(module.tensors and isinstance(module.module, ParallelLMHead) for module in modules):
        return
    for module in modules:
        kind = module.module
        module.never_multiplies = isinstance(kind, VocabParallelEmbedding) and not isinstance(kind, ParallelLMHead)
