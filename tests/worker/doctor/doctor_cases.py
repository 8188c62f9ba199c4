"""A healthy 8 x 910B node, as facts, and what one fault changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rljob_api.roles import MEMORY_SAVER_LIBRARY
from rljob_api.validation import load_manifest
from rljob_api.wanted import Wanted
from rljob_worker.doctor.examine import examine
from rljob_worker.doctor.facts import Interface, NodeFacts, NpuPort, ProcessFacts, SaverFile, StoragePath
from rljob_worker.doctor.findings import Finding, Status
from rljob_worker.doctor.parsers import Chip, DeviceTable

GIB = 2**30
SPEC = load_manifest(
    {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "a"},
        "spec": {
            "steps": 1,
            "model": {"path": "/models/Qwen3-4B"},
            "data": {"path": "/data/x.jsonl"},
            "reward": {"name": "math"},
            "rollout": {"promptsPerStep": 8, "samplesPerPrompt": 8, "maxResponseTokens": 16, "tensorParallel": 2},
            "training": {"tensorParallel": 2},
            "resources": {"profile": "ascend-a2", "devicesPerNode": 8},
        },
    }
).spec
WANTED = Wanted.of(SPEC)


def role(variables: dict[str, str]) -> ProcessFacts:
    return ProcessFacts(
        variables=variables, libraries=(MEMORY_SAVER_LIBRARY,) * ("LD_PRELOAD" in variables), saver_hooked=True
    )


def node(**changes: Any) -> NodeFacts:
    """A node on which everything is right, but for the changes."""
    return replace(
        NodeFacts(
            host="a",
            kind="npu",
            versions={
                "python": "3.12.11", "torch": "2.10.0+cpu", "torch_npu": "2.10.0.post4", "vllm": "0.23.0+empty",
                "vllm-ascend": "0.23.0.post1", "megatron-core": "0.16.1", "transformers": "5.5.4", "ray": "2.60.0",
                "torch_memory_saver": "0.0.8", "cann": "9.1.0", "driver": "26.0.rc1", "firmware": "7.8.0.6.201",
                "rljob": "0.1.0",
            },
            packages="0123456789ab",
            built_for="A2",
            device_files=tuple(range(8)),
            devices=DeviceTable("26.0.rc1", tuple(Chip(i, "910B1", "OK", 3400, 65536) for i in range(8))),
            firmware_range=("7.0.0", "8.9.9"),
            ports=tuple(NpuPort(i, "UP", False, f"10.0.0.{i + 1}") for i in range(8)),
            interfaces=(Interface("eth0", True), Interface("lo", True)),
            shared_memory_total=64 * GIB,
            shared_memory_free=64 * GIB,
            host_total=768 * GIB,
            host_free=700 * GIB,
            trainer=role({**WANTED.trainer, "HCCL_SOCKET_IFNAME": "=eth0"}),
            rollout=role({**WANTED.rollout, "HCCL_SOCKET_IFNAME": "=eth0"}),
            saver=SaverFile(MEMORY_SAVER_LIBRARY, "Ascend", "ab" * 32, "ab" * 32),
            saver_copies=("/x/torch_memory_saver_hook_mode_preload.abi3.so",),
            model=StoragePath("/models/Qwen3-4B", True, "/models/Qwen3-4B", False),
            runs=StoragePath("/storage/runs", False, "/storage", True),
        ),
        **changes,
    )  # fmt: skip


def changed(facts: NodeFacts, **versions: str) -> NodeFacts:
    """Other versions; an empty one is not installed."""
    return replace(facts, versions={k: v for k, v in {**facts.versions, **versions}.items() if v})


def bad(facts: NodeFacts, wanted: Wanted | None = WANTED) -> dict[str, Finding]:
    """Warnings and problems, by name."""
    return {f.name: f for f in examine(facts, wanted) if f.status in (Status.WARNING, Status.PROBLEM)}


def problems(facts: NodeFacts, wanted: Wanted | None = WANTED) -> set[str]:
    """Names of the problems."""
    return {name for name, finding in bad(facts, wanted).items() if finding.status is Status.PROBLEM}
