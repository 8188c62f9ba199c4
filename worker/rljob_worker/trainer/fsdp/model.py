"""transformers' model over the ranks: what is gathered together, and what a pass computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rljob_worker.algorithms.output_layer import Wanted, table_of_logits, token_table
from rljob_worker.models.hf_model import gathered_apart, has_packed_attention, plain_head
from rljob_worker.trainer.batches import MicroBatch
from rljob_worker.trainer.context_parallel import joined
from rljob_worker.trainer.fsdp.pictures import see_once
from rljob_worker.trainer.objective import TokenValues
from rljob_worker.trainer.row_shares import RowShare

if TYPE_CHECKING:
    from rljob_worker.models.hf_model import HfModel
    from rljob_worker.models.pictures import PictureFacts


class _Inputs(TypedDict, total=False):
    row_bounds: Sequence[int]
    context_group: dist.ProcessGroup
    pixel_values: Tensor
    image_grid_thw: Tensor


class ShardedModel:
    """A model whose parameters are divided row by row, and gathered unit by unit for what is computed with them.

    Gradients are summed over the ranks in fp32.

    Args:
        model: as `build_hf_model` made it.
        mesh: of the ranks that divide a copy; with a first dimension over the copies, where there are several.
        dtype: of what is gathered and computed with; None: that of each parameter, where adapters are trained beside a
            base that is in the format of computation as it is. Rounded adapters would be others than those handed over.
        recompute: whether layers are computed again in the backward pass.
        reshard_after_forward: whether a layer's parameters are gathered again for it.
        critic: whether its head gives values, and no logits.
        pictures: how it takes them; None: not at all.
        context_group: the ranks that divide each row; None where this one has whole rows.

    Attributes:
        passed: parameters of the layers that a token passes.
    """

    def __init__(
        self,
        model: HfModel,
        mesh: DeviceMesh,
        dtype: torch.dtype | None,
        *,
        recompute: bool,
        reshard_after_forward: bool = True,
        critic: bool = False,
        pictures: PictureFacts | None = None,
        context_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.module = model
        self._context_group = context_group
        self._pictures = pictures
        self.passed = _passed(model)
        self._packed = has_packed_attention(model)
        if pictures is not None:
            see_once(model, lambda: self._micro_batch.pictures if self._micro_batch is not None else ())
        self._micro_batch: MicroBatch | None = None
        self._wanted: Wanted | None = None
        self._made = 0
        if recompute:
            _recompute_layers(model)
        head = model.get_output_embeddings()
        self._plain = plain_head(model) and not critic
        if self._plain:
            setattr(head, "forward", partial(self._token_values, head))  # noqa: B010
        else:
            head.register_forward_pre_hook(self._select)
        self._units = _sharded_units(model, mesh, dtype, reshard_after_forward)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Around passes: nothing is gathered afterwards.

        After one without gradients the root stays gathered, and other values that are then written into the shards
        would not be computed with.
        """
        try:
            yield
        finally:
            for unit in self._units:
                unit.reshard()

    def tokens(self, share: RowShare, wanted: Wanted | None) -> TokenValues:
        """Log-probabilities and entropies of the response tokens, or values; only their rows reach the head.

        Of all the row's response tokens, whichever rank has which.
        """
        micro_batch = share.inputs
        self._micro_batch, self._wanted = micro_batch, wanted
        output = self.module(
            input_ids=micro_batch.input_ids,
            position_ids=micro_batch.position_ids,
            use_cache=False,
            **self._beside(micro_batch),
        )
        table = output.logits.squeeze(0)
        if self._plain and table.data_ptr() != self._made:
            raise RuntimeError(f"{type(self.module).__name__} changes its logits, which its config does not say")
        if wanted is not None and not self._plain:
            table = table_of_logits(table, micro_batch.labels, wanted, micro_batch.teacher)
        if self._context_group is not None:
            table = joined(table, share.places, share.count, self._context_group)
        return TokenValues.of_critic(table) if wanted is None else TokenValues.of_table(table, wanted)

    def _beside(self, micro_batch: MicroBatch) -> _Inputs:
        """Inputs beside a row's tokens: where samples begin, and their pictures."""
        inputs: _Inputs = {"row_bounds": micro_batch.bounds.tolist()} if self._packed else {}
        if self._context_group is not None:
            inputs["context_group"] = self._context_group
        if micro_batch.patches is not None and micro_batch.grids is not None:
            if self._pictures is None:
                raise ValueError(f"{type(self.module).__name__} takes no pictures, and the batch has some")
            inputs["pixel_values"] = self._pictures.pixel_values(micro_batch.patches)
            inputs["image_grid_thw"] = micro_batch.grids
        return inputs

    def take_gradients(self) -> dict[str, Tensor]:
        """This rank's rows of the gradients, by parameter that is trained; none are left in the model.

        Raises:
            RuntimeError: a parameter has none.
        """
        found = {}
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            gradient, parameter.grad = parameter.grad, None
            if not isinstance(gradient, DTensor):
                raise RuntimeError(f"{name} got no gradient: no part of the model that was computed uses it")
            found[name] = gradient.to_local()
        return found

    def drop_gradients(self) -> None:
        """Forget what a pass that was given up has left."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def _select(self, _head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = args
        return (self._rows(hidden).unsqueeze(0), *rest)

    def _rows(self, hidden: Tensor) -> Tensor:
        assert self._micro_batch is not None
        return hidden.flatten(0, 1).index_select(0, self._micro_batch.rows)

    def _token_values(self, head: nn.Module, hidden: Tensor) -> Tensor:
        """In the place of the head's product: [1, S, h] -> the table of the response tokens' values [1, n, c]."""
        assert self._micro_batch is not None
        assert self._wanted is not None
        here = self._micro_batch
        weight = head.get_parameter("weight")
        table = token_table(self._rows(hidden), weight, here.labels, self._wanted, None, here.teacher).unsqueeze(0)
        self._made = table.data_ptr()
        return table


def _passed(model: HfModel) -> float:
    """Parameters of the layers that a token passes: of experts, which are one parameter of three dimensions, some."""
    chosen: int = getattr(model.config, "num_experts_per_tok", None) or 1
    layers = model.get_decoder().layers.parameters()
    return float(sum(p.numel() * (chosen / p.shape[0] if p.dim() == 3 else 1.0) for p in layers))


def _recompute_layers(model: HfModel) -> None:
    """Layers alone are in training mode, by which transformers recomputes; what is in them, dropout as well, is not."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.get_decoder().layers:
        layer.training = True


def _sharded_units(
    model: HfModel, mesh: DeviceMesh, dtype: torch.dtype | None, reshard_after_forward: bool
) -> list[FSDPModule]:
    """A unit for each layer, the embedding and the head, and the root for the rest."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    units: list[FSDPModule] = []
    for module in [*gathered_apart(model), model]:
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        # The loss is a share of the whole batch's already: gradients are added up. Neither gloo nor HCCL divides as
        # they add.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
        units.append(sharded)
    return units
