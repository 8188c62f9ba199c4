"""Trainers on real MindSpeed, or on plain Megatron; `test_mindspeed.py` starts them and compares what they wrote.

Called as `python mindspeed_ranks.py mindspeed|plain RANK FOLDER LAUNCH CASE...`, otherwise as
`tests/worker/trainer/cases.py`, whose cases these are. With MindSpeed the layers are those of NPUs
(`trainer/megatron/models/megatron_npu.py`), over the torch_npu of this folder.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def use_mindspeed() -> None:
    """Set up as a trainer's process on NPUs, before anything of Megatron is imported; tensors stay on the CPU."""
    sys.path.insert(0, str(HERE))
    import torch_npu  # noqa: F401

    from rljob_worker.trainer.megatron.models import platforms
    from rljob_worker.upstream import install, mindspeed, torch_cpu

    # torch first: MindSpeed wraps what it finds, which on an NPU is what torch_npu made of it.
    for patch in (*torch_cpu.PATCHES, *mindspeed.PATCHES):
        patch.apply()
        install._installed.add(patch.name)
    cpu, npu = (platforms.megatron_platform(kind) for kind in ("cpu", "npu"))

    def seed(number: int) -> None:
        """The check of the optimizer is that of NPUs, the generators are the CPU's."""
        from rljob_worker.trainer.megatron.models import seeding

        seed_device, seeding.seed_device = seeding.seed_device, seeding.seed_cpu
        try:
            npu.seed(number)
        finally:
            seeding.seed_device = seed_device

    platforms._PLATFORMS["cpu"] = replace(npu, seed=seed, keep_pipeline_outputs=cpu.keep_pipeline_outputs)


def released(process: Any, **training: Any) -> dict[str, Any]:
    """Steps between which the process groups are given up and rebuilt."""
    from cases import pieces, step

    trainer = process.trainer(memorySaver={"releaseProcessGroups": True}, **training)
    metrics = []
    for seed in range(3):
        metrics.append(step(trainer, seed).metrics)
        asleep = trainer.sleep()
        assert asleep.transition is not None
        assert asleep.transition.changed
        trainer.wake_up()
    result = {"metrics": metrics, "applied": [True] * 3, "scores": [], "pieces": pieces(trainer)}
    trainer.close()
    return result


def write_names(folder: Path) -> None:
    """Every name that MindSpeed has replaced, and with what."""
    from mindspeed.patch_utils import MindSpeedPatchesManager

    def text(function: Any) -> str:
        return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"

    names = {
        name: [text(function) for function in (patch.patch_func, *patch.wrappers) if function is not None]
        for name, patch in MindSpeedPatchesManager.patches_info.items()
    }
    (folder / "names.json").write_text(json.dumps(names))


def main(kind: str, rank: int, folder: Path, launch: str, names: list[str]) -> None:
    if kind == "mindspeed":
        use_mindspeed()
    import cases

    cases.CASES |= {
        "one_bias": lambda process: cases.steps(process, model="bias"),
        "tp_bias": lambda process: cases.steps(process, model="bias", tensorParallel=2),
        "dp_moe": lambda process: cases.steps(process, model="moe"),
        "released_dp": released,
        "released_tp": lambda process: released(process, tensorParallel=2),
        "released_ep": lambda process: released(process, model="moe", expertParallel=2),
    }
    cases.main(rank, folder, launch, names)
    if kind == "mindspeed" and rank == 0:
        write_names(folder)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5:])
