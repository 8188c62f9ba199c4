"""A contract: one name of somebody else's software that RLJob's device code relies on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Source(StrEnum):
    """The software in which a contract holds."""

    TORCH_NPU = "torch_npu 2.10.0.post4"
    UPSTREAM_SAVER = "torch_memory_saver 0.0.10"
    ASCEND_SAVER = "sgl-kernel-npu f425bdf1 (contrib/torch_memory_saver)"
    MINDSPEED = "MindSpeed core_r0.16.0 (e4772499)"
    VLLM_ASCEND = "vllm-ascend 0.23.0"
    VLLM = "vllm (installed)"
    MEGATRON = "megatron-core (installed)"
    TORCH = "torch (installed)"
    RAY = "ray (installed)"


class Kind(StrEnum):
    """The check of a contract."""

    FUNCTION = "function"
    """Defined in a Python file, with these parameters first and these keywords among them; may be `Class.method`."""
    ATTRIBUTE = "attribute"
    """`Class.attribute`: a field of the class, or assigned to in a method of it."""
    SYMBOL = "symbol"
    """Exported by a shared library."""
    TEXT = "text"
    """These characters in a file: an environment variable, a key, a message."""
    RECORDED = "recorded"
    """Read from the revision that the source names; no package carries it, so no test can look again."""


@dataclass(frozen=True, slots=True)
class Contract:
    """One name that the code relies on."""

    source: Source
    kind: Kind
    name: str
    file: str
    """Path in the package, or in the repository."""
    used_in: str
    """Our file, below worker/rljob_worker or crds/rljob_api."""
    why: str
    parameters: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    """Parameters that are passed by name."""
    spelled: str = ""
    """The name as our file writes it, where that is not the last part of `name`."""
    executed: bool = False
    """Whether tests run it for real, over stand-ins for what lies under it: `test_npu.py`, of vllm-ascend
    `test_npu_engine.py`, what a job does beside `test_npu_job.py`; of MindSpeed, which is in no package index,
    `test_mindspeed.py` by hand."""

    @property
    def seen(self) -> str:
        """The most that was seen of it."""
        if self.executed:
            return "executed"
        by_kind = {Kind.FUNCTION: "signature", Kind.ATTRIBUTE: "name", Kind.SYMBOL: "name", Kind.TEXT: "name"}
        return by_kind.get(self.kind, "read")

    @property
    def plain(self) -> str:
        """The name without its module."""
        return self.name if self.kind is Kind.TEXT else self.name.rsplit(".", 1)[-1]

    @property
    def short(self) -> str:
        """The name as our file writes it."""
        return self.spelled or self.plain
