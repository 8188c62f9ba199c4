"""One of two ranks that run the cases of `cases.json`: `python megatron_ranks.py FOLDER RANK`.

For each case, writes `NAME.logits.pt` (all columns, padding included), `NAME.rank-R.pt` (`parameters` and the rank's
`layout`) and, for tp1, `NAME.training.pt` (recompute setting -> loss of predicting each next token, and gradients).
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

from rljob_worker.upstream.install import install
from rljob_worker.upstream.patch import Process

install(Process.TRAINER, "cpu", "Megatron")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from rljob_worker.models.config import ModelConfig  # noqa: E402
from rljob_worker.models.hf_io import load_hf_weights  # noqa: E402
from rljob_worker.trainer.megatron.models.build import build_gpt_model  # noqa: E402
from rljob_worker.trainer.megatron.models.convert import local_pieces  # noqa: E402
from rljob_worker.trainer.megatron.models.seeding import seed_cpu  # noqa: E402
from rljob_worker.trainer.megatron.parallel_state import megatron_layout  # noqa: E402


def loaded_model(
    folder: str, sizes: tuple[int, int, int], dtype: torch.dtype, recompute: str
) -> tuple[torch.nn.Module, ModelConfig]:
    tp, pp, ep = sizes
    cfg = ModelConfig.from_hf(folder)
    model = build_gpt_model(cfg, tp=tp, pp=pp, ep=ep, dtype=dtype, recompute=recompute, device="cpu")
    load_hf_weights(local_pieces(model, cfg, megatron_layout()), folder)
    return model, cfg


def logits_of(model: torch.nn.Module, cfg: ModelConfig, ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] with the vocabulary gathered, on the last pipeline stage; differentiable at tp 1."""
    length = ids.shape[1]
    if model.config.sequence_parallel:
        ids = F.pad(ids, (0, -length % model.config.tensor_model_parallel_size))
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    if not parallel_state.is_pipeline_first_stage():
        hidden = torch.empty(ids.shape[1], ids.shape[0], cfg.hidden_size)
        dist.recv(hidden, src=parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    output = model(ids, positions, None)
    if not parallel_state.is_pipeline_last_stage():
        dist.send(output.contiguous(), dst=parallel_state.get_pipeline_model_parallel_next_rank())
        return output
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return output
    parts = [torch.empty_like(output) for _ in range(group.size())]
    dist.all_gather(parts, output.contiguous(), group=group)
    return torch.cat(parts, dim=-1)[:, :length]


def run_case(case: dict, out: Path, ids: torch.Tensor, rank: int) -> None:
    tp, pp, ep = case["sizes"]
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1 if ep > 1 else None,
    )
    seed_cpu(1)
    model, cfg = loaded_model(case["folder"], case["sizes"], torch.float32, "None")
    with torch.no_grad():
        logits = logits_of(model, cfg, ids)
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        torch.save(logits, out / f"{case['name']}.logits.pt")
    saved = {
        "parameters": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "layout": megatron_layout(),
    }
    torch.save(saved, out / f"{case['name']}.rank-{rank}.pt")
    if case["sizes"] == [1, 1, 1] and rank == 0:
        training = {setting: loss_and_gradients(case, ids, setting) for setting in ("None", "Full", "Selective")}
        torch.save(training, out / f"{case['name']}.training.pt")
    parallel_state.destroy_model_parallel()


def loss_and_gradients(case: dict, ids: torch.Tensor, recompute: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model, cfg = loaded_model(case["folder"], case["sizes"], torch.float32, recompute)
    logits = logits_of(model.train(), cfg, ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def main() -> None:
    out, rank = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    cases = json.loads((out / "cases.json").read_text())
    ids = torch.load(Path(cases[0]["folder"]).parent / "ids.pt")
    for case in cases:
        run_case(case, out, ids, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
