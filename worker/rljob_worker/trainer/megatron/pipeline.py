"""Running micro-batches through Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_worker.algorithms.output_layer import Wanted, token_table
from rljob_worker.parallel_layout import ParallelLayout
from rljob_worker.trainer.backend import Compute
from rljob_worker.trainer.batches import MicroBatch
from rljob_worker.trainer.context_parallel import joined
from rljob_worker.trainer.megatron.expert_replay import ExpertReplay
from rljob_worker.trainer.megatron.rows import PositionRotary, packed_seq_params
from rljob_worker.trainer.objective import TokenValues
from rljob_worker.trainer.row_shares import RowShare, share_of
from rljob_worker.trainer.stopping import StopAgreement
from rljob_worker.upstream.megatron_types import DistributedDataParallel

Loss = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""The output layer's result -> share of the loss, tokens (not used), result."""
ForwardStep = Callable[[Compute, Iterator[tuple[int, MicroBatch]], DistributedDataParallel], tuple[Tensor, Loss]]
"""Runs the next micro-batch through the model: its output, and what becomes of it."""


class PipelineRunner:
    """Forward and forward-backward passes of this rank's model over micro-batches.

    The output layer runs on response positions only, and gives log-probabilities, or a critic's values: with long
    prompts and large vocabularies, logits are most of the memory and a large part of the time.

    Attributes:
        forward_step: called by Megatron's schedule for each micro-batch; another one takes other shapes than rows.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        layout: ParallelLayout,
        stop: StopAgreement,
        vocabulary_group: dist.ProcessGroup | None,
        context_group: dist.ProcessGroup | None,
        replay: ExpertReplay | None = None,
    ) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        self._ddp = ddp
        self._layout = layout
        self._stop = stop
        self._vocabulary_group = vocabulary_group
        self._context_group = context_group
        self._replay = replay
        self._share: RowShare | None = None
        self._wanted: Wanted | None = None
        self.forward_step: ForwardStep = self._forward_row
        self._schedule = get_forward_backward_func()
        self._finalize = finalize_model_grads
        self._device = next(ddp.parameters()).device
        self._no_tokens = torch.zeros((), dtype=torch.int, device=self._device)
        model = ddp.module
        self._sequence_parallel = model.config.sequence_parallel
        self._row_multiple = layout.cp * (layout.tp if self._sequence_parallel else 1)
        self._gather = gather_from_sequence_parallel_region
        model.config.finalize_model_grads_func = self._finish_gradients
        self._rotary = PositionRotary(model.rotary_pos_emb)
        setattr(model, "rotary_pos_emb", self._rotary)  # noqa: B010
        if layout.last_stage:
            setattr(model.output_layer, "forward", partial(self._token_values, model.output_layer))  # noqa: B010

    def forward(self, micro_batches: Sequence[MicroBatch], compute: Compute) -> list[Tensor]:
        """Results of `compute` on the last pipeline stage, [] on the others; raises StopRequested on all ranks."""
        with torch.no_grad():
            results = self._run(micro_batches, compute, forward_only=True)
        self._stop.finish_pass()
        return results

    def forward_backward(self, micro_batches: Sequence[MicroBatch], compute: Compute) -> list[Tensor]:
        """Same as `forward`, and the gradients of the summed losses, summed over data-parallel ranks, in the
        buffers."""
        self._ddp.zero_grad_buffer()
        return self._run(micro_batches, compute, forward_only=False)

    def _run(self, micro_batches: Sequence[MicroBatch], compute: Compute, *, forward_only: bool) -> list[Tensor]:
        self._stop.begin_pass()
        if self._replay is not None:
            self._replay.begin_pass(learning=not forward_only)
        return self._schedule(
            forward_step_func=partial(self.forward_step, compute),
            data_iterator=iter(enumerate(micro_batches)),
            model=[self._ddp],
            num_microbatches=len(micro_batches),
            # Stages tell one another the shape of each micro-batch; these two are not used.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def expect(self, share: RowShare, wanted: Wanted | None) -> None:
        """Say what the output layer computes of the micro-batch that comes; `wanted` as of `Compute`."""
        self._share, self._wanted = share, wanted

    def _forward_row(
        self, compute: Compute, data: Iterator[tuple[int, MicroBatch]], model: DistributedDataParallel
    ) -> tuple[Tensor, Loss]:
        index, micro_batch = next(data)
        if self._stop.skip():
            return self._nothing(), self._no_loss
        row = micro_batch.padded(self._row_multiple)
        share = share_of(row, self._layout.cp_rank, self._layout.cp).to(self._device)
        own = share.inputs
        micro_batch = own if self._context_group is None else row.to(self._device)
        self.expect(share, compute.wanted)
        self._rotary.positions = own.position_ids[0]
        if self._replay is not None:
            self._replay.use(own)
        output = model(own.input_ids, own.position_ids, None, packed_seq_params=packed_seq_params(micro_batch))

        def loss_func(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            table = values.squeeze(0)
            tokens = TokenValues.of_table(table, compute.wanted) if compute.wanted else TokenValues.of_critic(table)
            loss, result = compute(index, micro_batch, tokens)
            return loss, self._no_tokens, result

        return output, loss_func

    def _token_values(
        self,
        layer: torch.nn.Module,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """In the place of the output layer's product: [S, 1, h] -> the table of the response tokens' values [n, 1, c],
        or a critic's [n, 1, 1].

        Of all the row's response tokens, whichever rank has which. A weight that is shared with the embedding comes
        with the call.
        """
        assert self._share is not None
        if self._sequence_parallel:
            # The gradient is whole on each rank, which keeps that of its own positions.
            hidden = self._gather(hidden, tensor_parallel_output_grad=False)
        rows = hidden.flatten(0, 1).index_select(0, self._share.inputs.rows)
        own = weight if weight is not None else layer.get_parameter("weight")
        inputs = self._share.inputs
        if self._wanted is None:
            table = torch.nn.functional.linear(rows, own, getattr(layer, "bias", None)).float()
        else:
            table = token_table(rows, own, inputs.labels, self._wanted, self._vocabulary_group, inputs.teacher)
        if self._context_group is not None:
            table = joined(table, self._share.places, self._share.count, self._context_group)
        return table.unsqueeze(1), None

    def _nothing(self) -> Tensor:
        """Output of a skipped micro-batch; it keeps the gradient path between stages."""
        model = self._ddp.module
        if not self._layout.first_stage:
            return model.decoder.input_tensor * 0.0
        config = model.config
        size = (1, 1, config.hidden_size)
        return torch.zeros(size, dtype=config.params_dtype, device=self._device, requires_grad=True)

    def _no_loss(self, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return output.float().sum() * 0.0, self._no_tokens, self._no_tokens

    def _finish_gradients(
        self, model: list[DistributedDataParallel], _num_tokens: Tensor | None = None, **kwargs: object
    ) -> None:
        # Here the whole pass has run and no peer waits for this rank any more.
        self._stop.finish_pass()
        self._finalize(model, None, **kwargs)
