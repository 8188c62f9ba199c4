"""Environments for tests, which run in hosts: `FILE.py:Class` of this file."""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Began = tuple[str, dict[str, Any]]
Stepped = tuple[Any, Any, Any, Any, Any]


class Counting:
    """Says its seed and how many steps it made; some actions misbehave."""

    def __init__(self, length: int = 100, folder: str = "") -> None:
        self.length, self.folder = length, folder

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Began:
        self.seed, self.steps = seed, 0
        if options.get("hang"):
            time.sleep(600)
        return f"seed {seed} {sorted(options)}", {"size": 2, "text": "left alone"}

    def step(self, action: str) -> Stepped:
        if action == "die":
            os._exit(7)
        if action == "hang":
            time.sleep(600)
        if action == "rest":
            time.sleep(1.0)
        if action == "exit":
            sys.exit(0)
        if action == "raise":
            raise LookupError("no such door")
        if action == "write":
            # It has found the descriptor on which its host answers.
            socket.socket(fileno=int(sys.argv[1])).sendall(b"\x00\x00\x00\x02hi")
            time.sleep(600)
        if action == "lie":
            # What is not JSON cannot be sent by mistake: an answer to another call.
            from multiprocessing.connection import Connection

            Connection(os.dup(int(sys.argv[1]))).send_bytes(b'[0, "stepped", ["", 0, false, false, {}]]')
        self.steps += 1
        wrong: dict[str, Stepped] = {
            "number": (7, 0.0, False, False, {}),
            "long": ("y" * (2**20 + 1), 0.0, False, False, {}),
            "surrogate": ("\ud800", 0.0, False, False, {}),
            "nan": ("", float("nan"), False, False, {}),
            "text reward": ("", "1", False, False, {}),
            "flag": ("", 0.0, "no", False, {}),
            "four": ("", 0.0, False, {}),  # type: ignore[dict-item]
            "info": ("", 0.0, False, False, [1]),
            "infinite": ("", 0.0, False, False, {"x": float("inf")}),
            "many": ("", 0.0, False, False, {str(i): i for i in range(33)}),
        }
        if action in wrong:
            return wrong[action]
        print(f"\x1b[2Jstep of {self.seed}")
        return (
            f"{self.seed}: {self.steps} {action}",
            self.steps,
            self.steps >= self.length,
            False,
            {"steps": self.steps},
        )

    def close(self) -> None:
        if self.folder:
            (Path(self.folder) / f"closed-{self.seed}").touch()


class DiesOnce(Counting):
    """Dies at a step of one seed, once."""

    def step(self, action: str) -> Stepped:
        mark = Path(self.folder) / f"died-{self.seed}"
        if action == "die once" and not mark.exists():
            mark.touch()
            os._exit(1)
        if action == "hang once" and not mark.exists():
            mark.touch()
            time.sleep(600)
        return super().step(action)


class Forgets(DiesOnce):
    """Gives something else when it is made anew."""

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Began:
        began = super().reset(seed=seed, options=options)
        return began if not (Path(self.folder) / f"died-{seed}").exists() else ("another world", {})


class Global:
    """Draws from the module `random`, which all of a process share."""

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Began:
        random.seed(seed)
        return "begin", {}

    def step(self, action: str) -> Stepped:
        return str(random.random()), 0.0, False, False, {}


class ClassCounter:
    """Counts in an attribute of the class."""

    steps = 0

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Began:
        return "begin", {}

    def step(self, action: str) -> Stepped:
        ClassCounter.steps += 1
        return str(ClassCounter.steps), 0.0, False, False, {}


class Clock:
    """Shows the time."""

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Began:
        return str(time.monotonic_ns()), {}

    def step(self, action: str) -> Stepped:
        return str(time.monotonic_ns()), 0.0, False, False, {}


class Strict(Counting):
    """Raises at what is no action."""

    def step(self, action: str) -> Stepped:
        return super().step({"go": "go"}[action])


class Deaf(Counting):
    """Says that it takes what it does not take."""

    examples = ("<go>",)

    def step(self, action: str) -> Stepped:
        return "", 0.0, False, False, {"valid": 0.0}


class NoSeed(Counting):
    def reset(self) -> Began:  # type: ignore[override]
        return "", {}


class NoAction(Counting):
    def step(self) -> Stepped:  # type: ignore[override]
        return "", 0.0, False, False, {}


class Async(Counting):
    async def step(self, action: str) -> Stepped:  # type: ignore[override]
        return "", 0.0, False, False, {}


class NoStep:
    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Began:
        return "", {}


class Numbers(Counting):
    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Began:
        return 3, {}  # type: ignore[return-value]


def function() -> None: ...
