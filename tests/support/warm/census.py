"""A profile hook that records a step's paths: the driver's data classes, and the files that a weight passes.

A process that is forked with the variable CENSUS writes `ROLE.json` there: names, of the step that it did last.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

from protocol import DRIVER, ENGINE, TRAINER

PACKAGE = "rljob_worker"
OF_A_ROW = {"rljob_worker.types.Prompt"}
"""Made when the data is read, before any step; the other data classes of that time are one for a whole data set."""


def watch(role: str, folder: Path) -> None:
    """Have this process write down what it goes through.

    Args:
        role: of this process.
        folder: where its file is written.
    """
    if role == DRIVER:
        _watch_data_classes(folder / f"{role}.json")
    elif role == TRAINER:
        from rljob_worker.trainer.trainer import Trainer

        _watch_tensors(Trainer, "send_weights", folder / f"{role}.json")
    elif role == ENGINE:
        from rljob_worker.engine.engine import Engine

        _watch_tensors(Engine, "receive_weights", folder / f"{role}.json")


def _watch_data_classes(path: Path) -> None:
    """Names of the data classes of which an object is made between a prompt of the data and the step's `TrainBatch`."""
    found: set[str] = set()

    def hook(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code.co_name == "next_prompts" and code.co_filename.endswith("data/dataset.py"):
            found.intersection_update(OF_A_ROW)
        elif code.co_name == "__init__" and code.co_filename == "<string>":
            kind = type(frame.f_locals["self"])
            if kind.__module__.startswith(PACKAGE):
                found.add(f"{kind.__module__}.{kind.__qualname__}")
                if kind.__name__ == "TrainBatch":
                    path.write_text(json.dumps(sorted(found)))

    threading.setprofile(hook)
    sys.setprofile(hook)


def _watch_tensors(kind: type, method: str, path: Path) -> None:
    """Files of this package from the method down to each function that gets a tensor."""
    import torch

    original: Callable[..., Any] = getattr(kind, method)
    found: set[str] = set()

    def hook(frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not any(isinstance(value, torch.Tensor) for value in list(frame.f_locals.values())):
            return
        above: FrameType | None = frame
        while above is not None and above.f_code is not original.__code__:
            if PACKAGE in above.f_globals.get("__name__", ""):
                found.add(above.f_globals["__name__"])
            above = above.f_back
        found.add(kind.__module__)

    @wraps(original)
    def watched(*arguments: object, **named: object) -> object:
        sys.setprofile(hook)
        try:
            return original(*arguments, **named)
        finally:
            sys.setprofile(None)
            path.write_text(json.dumps(sorted(found)))

    setattr(kind, method, watched)
