"""Log-probabilities by transformers of tokens that were sampled by the weights of several steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jobs import run
from transformers import AutoModelForCausalLM

from rljob_worker.checkpoints.reader import Checkpoints
from rljob_worker.flow import TokenStream


def check_carried_log_probs(run_folder: Path, versions: list[int], folder: Path) -> None:
    """Score the responses that checkpoints carry over by the checkpoints that sampled parts of them.

    Args:
        run_folder: has a checkpoint of each step.
        versions: of weights; the two checkpoints after each of them carry tokens of it.
        folder: for exports.
    """
    store = Checkpoints(run_folder / "checkpoints")
    scored = later = 0
    for version in versions:
        code, output = run("export", run_folder, "--step", str(version), "--to", folder / str(version))
        assert code == 0, output
        model = AutoModelForCausalLM.from_pretrained(folder / str(version), dtype=torch.float32)
        for one in (*store.read(version + 1).carried, *store.read(version + 2).carried):
            for episode in one["episodes"]:
                stream = TokenStream.from_json(episode["stream"])
                ids = torch.from_numpy(stream.ids.copy())
                with torch.no_grad():
                    logits = model(ids.unsqueeze(0)).logits[0, :-1]
                log_probs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
                distance = np.abs(log_probs - stream.log_probs[1:])
                mine = stream.versions[1:] == version
                assert not mine.any() or distance[mine].max() < 1e-4
                scored += int(mine.sum())
                later += int((distance[stream.versions[1:] > version] > 1e-4).sum())
    assert scored > 10, "too few tokens to say anything"
    assert later > 10, "other weights say the same: nothing was compared"
