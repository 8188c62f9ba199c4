"""Megatron's flat parameter and gradient buffers sleep in the arena, and train on after waking up."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.warm.protocol import TRAINER
from support.warm.scripts import run_text

SCRIPT = """
import sys
from contextlib import contextmanager
from rljob_worker.upstream.install import install
from rljob_worker.upstream.patch import Process
install(Process.TRAINER, "cpu", "Megatron")
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from rljob_worker.memory.arena import Arena, Tag
from rljob_worker.trainer.megatron.models.seeding import seed_cpu
from rljob_worker.trainer.megatron.flat_buffers import move_buffers

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
parallel_state.initialize_model_parallel()
seed_cpu(1)

def build():
    torch.manual_seed(5)
    module = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    return DistributedDataParallel(config, ddp_config, module)

def gradients(ddp):
    torch.manual_seed(9)
    ddp.zero_grad_buffer()
    ddp(torch.randn(4, 64)).square().sum().backward()
    ddp.finish_grad_sync()
    return [parameter.main_grad.clone() for parameter in ddp.parameters()]

plain = build()
arena = Arena(1 << 28)
ddp = build()
buffer = ddp.buffers[0]
theirs = [StorageWeakRef(flat.untyped_storage()) for flat in (buffer.param_data, buffer.grad_data)]
emptied = []

@contextmanager
def region(tag):
    assert emptied and all(flat.expired() for flat in theirs), "two of them at a time"
    with arena.region(tag):
        yield

(parameters,) = move_buffers(ddp, region, lambda: emptied.append(True))
with torch.no_grad():
    for moved, there in zip(ddp.parameters(), plain.parameters()):
        moved.copy_(there)
assert parameters is buffer.param_data
for parameter in ddp.parameters():
    assert arena.tag_of(parameter) is Tag.BACKUP
    assert arena.tag_of(parameter.main_grad) is Tag.DISCARD
for bucket in buffer.buckets:
    assert arena.tag_of(bucket.grad_data) is Tag.DISCARD
expected = gradients(plain)
assert all(torch.equal(a, b) for a, b in zip(gradients(ddp), expected))
weights = [parameter.detach().clone() for parameter in plain.parameters()]
for _ in range(3):
    arena.pause()
    assert arena.resident_bytes() == 0
    assert all(torch.equal(arena.backup_view(p), w) for p, w in zip(ddp.parameters(), weights))
    arena.resume()
    assert not buffer.grad_data.any()
    assert all(torch.equal(a, b) for a, b in zip(gradients(ddp), expected))
print("done")
"""


@pytest.mark.slow
def test_flat_buffers_sleep_and_train_on(tmp_path: Path) -> None:
    assert "done\n" in run_text(TRAINER, SCRIPT, tmp_path, tmp_path / "store")
