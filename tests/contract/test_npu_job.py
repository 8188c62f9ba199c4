"""A job from `rljob run` to its last checkpoint with `profile: ascend-a2`, on torch_npu's wheel and vllm-ascend's.

MindSpeed is the real one where it is importable; `cann/last` stands in for it elsewhere.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cann.build import Cann
from jobs import manifest, run
from support.step_lines import read_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 20
SPEC: dict[str, Any] = {
    "steps": STEPS,
    "checkpoint": {"everySteps": 10, "keep": 1},
    "training": {"precision": "fp32", "optimizer": {"lr": 1.0e-3}},
    "weightSync": {"probeEverySteps": 5},
    "memorySaver": {"trainMemoryMargin": "256Mi"},
    "timeouts": {"startSeconds": 240, "phaseSeconds": 60},
}
DEVICES = 2
LAYOUT = {"rollout": {"promptsPerStep": 8, "samplesPerPrompt": 4, "maxResponseTokens": 4, "ignoreEos": True}}


def environment(cann: Cann, folder: Path) -> dict[str, str]:
    """That of a shell on a machine with NPUs, after CANN's set_env.sh."""
    path = [*cann.path, *(entry for entry in sys.path if entry), str(Path(__file__).parent / "cann" / "last")]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "LD_LIBRARY_PATH": str(cann.folder / "lib"),
        "ASCEND_TOOLKIT_HOME": str(cann.folder),
        "NPU_FOLDER": str(folder),
        "NPU_COUNT": str(DEVICES),
    }


def test_a_job_on_npus_learns_as_on_cpus(cann: Cann, tmp_path: Path) -> None:
    devices = tmp_path / "devices"
    devices.mkdir()
    runs = {}
    for profile in ("cpu", "ascend-a2"):
        folder = tmp_path / profile
        folder.mkdir()
        resources = {"profile": profile, "nodes": 1, "devicesPerNode": DEVICES}
        job = manifest(folder, **SPEC, **LAYOUT, resources=resources)
        on_npu = profile != "cpu"
        code, output = run(
            "run", job, "--output", folder / "run", environment=environment(cann, devices) if on_npu else None,
            cold=on_npu,
        )
        assert code == 0, output
        runs[profile] = read_steps(folder / "run")
    for name in ("rollout/raw_reward", "train/loss", "train/grad_norm", "train/entropy_loss"):
        cpu, npu = (np.array([step["metrics"][name] for step in runs[profile]]) for profile in runs)
        print(name, np.abs(cpu - npu).max(), cpu[:6], npu[:6])
