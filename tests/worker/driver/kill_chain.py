"""One run, harmed and resumed again and again, and compared with the same job's calm run."""

from __future__ import annotations

import errno
import re
import signal
from pathlib import Path
from typing import Any

from fault_rows import APART, DEADLINE, ROWS, Cell, spec_of
from jobs import alive, events, finish, manifest, run, start_faulty, state_of, wait_for
from support.disk_faults import Fault

from rljob_api.wire.exit_codes import ExitCode

IMPATIENT = f'--set=spec.timeouts.phases={{"actor_train": {DEADLINE}, "rollout": {DEADLINE}}}'
"""Option of a run in which a process is stopped."""
REPLACED = ("reward", "environment")
"""Processes in whose place a run starts others."""


class Chain:
    """A run of a row that is harmed again and again; each resume carries the next fault.

    Args:
        name: of the row.
        folder: for the manifest and the run.
        calm: run folder of the same row, left alone, with a checkpoint of each step.
    """

    def __init__(self, name: str, folder: Path, calm: Path) -> None:
        self.run_folder = folder / "run"
        self.row = ROWS[name]
        spec = spec_of(name, folder)
        self._folder, self._job, self._calm = folder, manifest(folder, **spec), calm
        self._steps = spec["steps"]
        self._step = 0
        self._compared: set[str] = set()

    def strike(self, cell: Cell, delay: float) -> str:
        """Start or resume, and do a cell's fault so long after its phase began; the phase that it hit.

        The start has ended as that fault's does, and says so.
        """
        step = self.next_step()
        if cell.column == "disk":
            self._fill_the_disk(step)
            return cell.phase
        fault: dict[str, Any] = {"process": cell.process, "phase": cell.phase, "step": step, "delay": delay}
        faults = [{"do": "kill"} | fault]
        if cell.column == "SIGTERM":
            faults[0]["signal"] = signal.SIGTERM
        elif cell.column == "SIGSTOP":
            faults[0]["do"] = "stall"
            if cell.process == "driver":
                # Nothing on its machine can tell a stopped driver from a slow one, and end it.
                faults[0] |= {"seconds": 2, "then": "KILL"}
        elif cell.process in REPLACED:
            # Another one takes its place: the driver is killed in the next step.
            faults.append({"do": "kill", "process": "driver", "phase": "actor_train", "step": step + 1})
        code, output = self.go_on(faults, *([IMPATIENT] if cell.column == "SIGSTOP" else []))
        killed = [event for event in events(self.run_folder) if event["event"] == "kill"]
        of_cell = [event for event in killed if (event["process"], event["fault_of"]) == (cell.process, step)]
        assert len(of_cell) == 1, output
        done = of_cell[0]
        self._check_the_end(cell, code, output, done)
        return str(done["alive"])

    def _fill_the_disk(self, step: int) -> None:
        """No room is left where the checkpoint of a step is written."""
        full = Fault(self.run_folder, 1, errno.ENOSPC, calls="write", contains=f"/step-{step}.a", forever=True)
        marker = self._folder / f"full-{step}"
        where = ("--output", self.run_folder, *self._resume())
        code, output = run("run", self._job, *where, environment=full.environment(marker))
        assert code == ExitCode.FAILED, output
        assert marker.exists(), output
        assert "No space left on device" in output, output

    def _check_the_end(self, cell: Cell, code: int, output: str, done: dict[str, Any]) -> None:
        if cell.column == "SIGTERM":
            assert code == ExitCode.STOPPED, output
        elif cell.column == "SIGSTOP":
            self._check_the_deadline(cell, code, output, done)
        elif cell.process in REPLACED:
            assert code != 0, output
            assert events(self.run_folder)[-1]["step"] >= done["fault_of"], "the run did not outlive the process"
        else:
            assert code != 0, output
            assert cell.process == "driver" or f"{cell.process} died" in output, output

    def _check_the_deadline(self, cell: Cell, code: int, output: str, done: dict[str, Any]) -> None:
        wait_for(lambda: not alive(done["pid"]), "end of the stopped process", 60)
        if cell.process == "driver":
            assert code == -signal.SIGKILL, output
        elif cell.process == "reward":
            assert code == ExitCode.FAILED, output
            assert "reward.timeoutSeconds" in output, output
        else:
            assert code == ExitCode.DEADLINE, output
            of_engine = cell.process.startswith("engine")
            # Trainers wait for one another.
            late = cell.process if of_engine else f".*{cell.process}.*"
            assert re.search(f"{cell.phase}: {late} not finished after {DEADLINE} s", output), output
            told = [event for event in events(self.run_folder) if event["event"] == "deadline"][-1]
            assert [name for name, requests in told["engines"].items() if requests] == [cell.process] * of_engine, told
            other = "trainer-0" if of_engine else "engine-0"
            stacks = self.run_folder / "logs" / f"{other}.stacks"
            assert stacks.read_text().strip(), "those that run write their stacks"

    def next_step(self) -> int:
        """The step of the next fault."""
        self._step += APART
        assert self._step < self._steps, "too many faults hit another phase than the one meant"
        return self._step

    def go_on(self, faults: list[dict[str, Any]], *options: str) -> tuple[int, str]:
        """Start or resume with faults, to its end: exit code and output."""
        return finish(start_faulty(self._job, self.run_folder, faults, *self._resume(), *options))

    def go_on_to_the_end(self) -> None:
        code, output = run("run", self._job, "--output", self.run_folder, *self._resume())
        assert code == 0, output

    def compare(self) -> list[str]:
        """Compare each checkpoint that was not compared before with the calm run's; returns their names."""
        complete = {file.parent for file in (self.run_folder / "checkpoints").glob("step-*[0-9]/driver.json")}
        new = sorted(folder for folder in complete if folder.name not in self._compared)
        for folder in new:
            calm = self._calm / "checkpoints" / folder.name
            assert state_of(folder, self.row.ranks) == state_of(calm, self.row.ranks), folder.name
            self._compared.add(folder.name)
        return [folder.name for folder in new]

    def _resume(self) -> list[str]:
        return ["--resume"] if self.run_folder.exists() else []
