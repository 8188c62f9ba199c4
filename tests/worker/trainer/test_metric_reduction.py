"""Metrics of a step over the ranks, also where a library has put its own `all_reduce` in the place of torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.warm.protocol import TRAINER
from support.warm.scripts import answer_in, run_script

RANK = """
import json, sys
import torch
import torch.distributed as dist
from rljob_worker.trainer.objective import MetricReduction

rank, store, broken = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "broken"
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
if broken:
    # As MindSpeed's torch_all_reduce_double_dtype_bypass_wrapper: doubles are reduced as a copy that nobody keeps.
    plain = dist.all_reduce
    dist.all_reduce = lambda x, *a, **k: plain(x.float() if x.dtype == torch.float64 else x, *a, **k)
names = ["loss", "train_rollout_logprob_abs_diff_max"]
reduction = MetricReduction(contributes=True, world_size=2)
rows = [torch.tensor([1.0 + rank, 0.5 * rank]), torch.tensor([2.0, 0.25])]
first = reduction.reduce(names, rows)
bad = reduction.reduce(names, [torch.tensor([float("nan") if rank else 1.0, 1.0])])
print(json.dumps([first, bad["loss"] != bad["loss"]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("all_reduce", ["plain", "broken"])
def test_metrics_are_of_all_ranks_and_equal_on_each(tmp_path: Path, all_reduce: str) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    ranks = ([rank, tmp_path / "store", all_reduce] for rank in range(2))
    said = list(map(answer_in, run_script(TRAINER, tmp_path / "rank.py", *ranks)))
    sums = {"loss": 1.0 + 2.0 + 2.0 + 2.0, "train_rollout_logprob_abs_diff_max": 0.5}
    assert said == [[sums, True]] * 2, "the sum and the maximum over both, and a NaN of one is everybody's"
