"""The process in which vLLM's engine core runs, for engines and judges alike."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_worker.engine.platforms import engine_platform
from rljob_worker.upstream.install import check, install
from rljob_worker.upstream.patch import Process
from rljob_worker.upstream.vllm_meeting import meet_in

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine


class VllmProcess:
    """This process, for one engine core on one kind of devices; kept as long as the core runs.

    Args:
        kind: `DeviceKind.name`.
        folder: of this host's processes, for sockets; None: a temporary one.

    Attributes:
        platform: vLLM on these devices.

    Raises:
        UserError: libraries or patches are not what this kind of device needs.
    """

    def __init__(self, kind: str, folder: str | None) -> None:
        self._kind, self._folder = kind, folder
        self.platform = engine_platform(kind)
        self.platform.prepare()
        # The workers install their own; here an error is told as one of the user's.
        check(Process.ENGINE_WORKER, kind)

    def import_vllm(self) -> None:
        """Import vLLM, with patches, and name the place where its workers meet."""
        import vllm  # noqa: F401

        # vLLM checks that the kernels of its arguments are registered.
        install(Process.ENGINE, self._kind)
        if self._folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="rljob-engine-")
        meet_in(Path(self._folder or self._temporary.name))

    def parsed(self, arguments: Mapping[str, object]) -> EngineArgs:
        """Arguments as vLLM takes them; TypeError where it has no such argument."""
        from vllm.engine.arg_utils import EngineArgs

        make: Callable[..., EngineArgs] = EngineArgs
        return make(**arguments)

    def build(self, arguments: EngineArgs) -> LLMEngine:
        """Load a model; ValueError where vLLM refuses its settings."""
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        return LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
