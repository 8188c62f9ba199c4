from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from model_cases import CASES, CONFIGS, LAYOUTS

WORKER = Path(__file__).with_name("megatron_ranks.py")


@pytest.fixture(scope="session")
def hf_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint by transformers for each model, with norms and biases away from their neutral values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    root = tmp_path_factory.mktemp("hf")
    ids = torch.randint(0, 96, (3, 17), generator=torch.Generator().manual_seed(1))
    torch.save(ids, root / "ids.pt")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for name, config in CONFIGS.items():
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
            model.save_pretrained(root / name)
            torch.save(model(ids).logits, root / name / "logits.pt")
    return {name: root / name for name in CONFIGS}


@pytest.fixture(scope="session")
def megatron_results(hf_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One launch of two ranks that runs every case; what it writes is described in megatron_ranks.py."""
    out = tmp_path_factory.mktemp("megatron")
    cases = [
        {"name": f"{model}-{layout}", "folder": str(hf_folders[model]), "sizes": LAYOUTS[layout]}
        for model, layout in CASES
    ]
    (out / "cases.json").write_text(json.dumps(cases))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    logs = [out / f"rank-{rank}.log" for rank in range(2)]
    ranks = [
        subprocess.Popen([sys.executable, str(WORKER), str(out), str(rank)], env=environment, stderr=log.open("w"))
        for rank, log in enumerate(logs)
    ]
    deadline = time.monotonic() + 300
    try:
        while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
            assert not any(process.poll() for process in ranks), "\n".join(log.read_text() for log in logs)
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
            process.wait(timeout=30)
    assert all(process.returncode == 0 for process in ranks), "\n".join(log.read_text() for log in logs)
    return out
