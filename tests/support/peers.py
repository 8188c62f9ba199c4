"""The reward functions of `examples/peers`, called directly, as the frameworks that they were written for do."""

from __future__ import annotations

import importlib.util
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

PEERS = Path(__file__).parents[2] / "examples" / "peers"


class SlimeSample(SimpleNamespace):
    """Attributes of `slime.utils.types.Sample`, which is not installed, that those functions read."""

    class Status(Enum):
        """Some of slime's own states."""

        COMPLETED = "completed"
        TRUNCATED = "truncated"


def peer(name: str) -> ModuleType:
    """The module, imported where slime is."""
    found = importlib.util.spec_from_file_location(f"peer_{name}", PEERS / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    types = SimpleNamespace(Sample=SlimeSample)
    with patch.dict(sys.modules, {"slime": ModuleType("slime"), "slime.utils": types, "slime.utils.types": types}):
        found.loader.exec_module(module)
    return module
