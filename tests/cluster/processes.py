"""Programs that run beside the tests: started with a log, awaited with a deadline, ended for certain."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from network import Network
from support.warm.client import WarmProcess

TERM_SECONDS = 10.0
_MANNERS = {"GOGC": "400"}
"""Go's programs collect garbage a quarter as often: the tests have memory to spare, and few processors."""


class Process:
    """One running program; its output goes to `<folder>/<name>.log`, over all its starts."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._process = self._start(network, command, {**_MANNERS, **os.environ, **(environment or {})})

    def _start(
        self, network: Network, command: Sequence[str], environment: dict[str, str]
    ) -> subprocess.Popen[bytes] | WarmProcess:
        with self.log.open("ab") as log:
            return network.spawn(command, log, environment)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def wait_for(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until `ready` says so. Raises RuntimeError with the end of the log when the program ends or it takes
        longer."""
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.running:
                raise RuntimeError(f"{self.name} ended with {self._process.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} was not ready after {seconds:.0f} s:\n{self.tail()}")
            time.sleep(0.05)

    def stop(self, seconds: float = TERM_SECONDS) -> int:
        """End it, with SIGKILL when SIGTERM did not do it in time; return its exit status."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + seconds
            while self.running and time.monotonic() < deadline:
                time.sleep(0.02)
        return self.kill()

    def kill(self) -> int:
        """End it at once."""
        if self.running:
            self._process.send_signal(signal.SIGKILL)
        return self._process.wait(timeout=TERM_SECONDS)

    def wait(self, seconds: float) -> int:
        """Wait for its end and return its exit status."""
        return self._process.wait(timeout=seconds)

    def resident_bytes(self) -> int:
        """Memory that it holds at the moment."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"{self.name} has ended")

    def cpu_seconds(self) -> float:
        """Processor time that it has used, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def tail(self, lines: int = 30) -> str:
        """The last lines of its log, and where the log is."""
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join([*text[-lines:], f"(log: {self.log})"])
