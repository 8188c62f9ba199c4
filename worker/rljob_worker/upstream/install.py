"""The one entry by which a process changes upstream's software, and all the changes."""

from __future__ import annotations

import os
from functools import cache

from rljob_worker.errors import UserError
from rljob_worker.upstream import (
    megatron,
    megatron_moe,
    megatron_rotary,
    mindspeed,
    process_groups,
    ray_node,
    torch_cpu,
    torch_gloo,
    vllm_device,
    vllm_drafts,
    vllm_linear,
    vllm_meeting,
    vllm_models,
    vllm_moe,
    vllm_norms,
    vllm_sampler,
    vllm_waits,
)
from rljob_worker.upstream.patch import Patch, Process, installed_version

PATCHES: tuple[Patch, ...] = (
    *ray_node.PATCHES,
    *mindspeed.PATCHES,
    *torch_cpu.PATCHES,
    *megatron.PATCHES,
    *megatron_moe.PATCHES,
    *megatron_rotary.PATCHES,
    *torch_gloo.PATCHES,
    *process_groups.PATCHES,
    *vllm_meeting.PATCHES,
    *vllm_models.PATCHES,
    *vllm_norms.PATCHES,
    *vllm_linear.PATCHES,
    *vllm_moe.PATCHES,
    *vllm_sampler.PATCHES,
    *vllm_drafts.PATCHES,
    *vllm_waits.PATCHES,
    *vllm_device.PATCHES,
)
"""In the order in which they are installed: MindSpeed before anything of Megatron is imported."""

_installed: set[str] = set()


def patches_of(process: Process, device: str, backend: str = "") -> list[Patch]:
    """The patches of a kind of process on a kind of device (`Device.name`); a trainer's by its training backend.

    Raises:
        ValueError: a trainer without a backend, or another process with one.
    """
    if (process is Process.TRAINER) != bool(backend):
        raise ValueError(f"{process} with the training backend {backend!r}: trainers have one, and nothing else has")
    return [
        patch
        for patch in PATCHES
        if process in patch.processes and device in patch.devices and patch.backend in ("", backend)
    ]


def check(process: Process, device: str, backend: str = "") -> None:
    """Hold the installed versions against those that the patches of a process were made for.

    Raises:
        UserError: names each patch to look at, with its file and its test.
    """
    problems = [
        f"{', '.join(wrong)}: patch {patch.name} ({patch.file}) is for "
        f"{', '.join(f'{package} {versions}' for package, versions in patch.versions.items())}; its test: {patch.test}"
        for patch in patches_of(process, device, backend)
        if (wrong := patch.outside({package: _version(package) for package in patch.versions}))
    ]
    if problems:
        raise UserError(
            f"{process}: installed versions for which RLJob has not been adapted (docs/upstream.md says how):\n  "
            + "\n  ".join(problems)
        )


def install(process: Process, device: str, backend: str = "") -> None:
    """Check and apply the patches of this process; those that are there already stay as they are.

    Args:
        process: what this process is.
        device: kind of device that it computes on (`Device.name`).
        backend: of a trainer (`TrainingBackend`).

    Raises:
        UserError: a version is outside of a patch's range, or a package that a patch starts does not load.
    """
    check(process, device, backend)
    for patch in patches_of(process, device, backend):
        if patch.scoped or patch.name in _installed or (patch.variable and os.environ.get(patch.variable) != "1"):
            continue
        patch.apply()
        _installed.add(patch.name)


@cache
def _version(package: str) -> str | None:
    return installed_version(package)
