"""One run, harmed and resumed again and again, and compared with the same job's calm run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs import events, finish, manifest, run, start_faulty, state_of


class Chain:
    """A run that is killed again and again; each resume carries the next fault.

    Args:
        folder: for the manifest and the run.
        calm: run folder of the same job, left alone, all of whose checkpoints were kept.
        spec: fields of the job, with `steps`.
        ranks: trainers, each with a file in a checkpoint.
        apart: steps between two faults; at least two checkpoints' distance, so that each start saves one of its own.
    """

    def __init__(self, folder: Path, calm: Path, spec: dict[str, Any], ranks: int = 1, apart: int = 4) -> None:
        self.run_folder = folder / "run"
        self._job, self._calm = manifest(folder, **spec), calm
        self._steps, self._ranks, self._apart = spec["steps"], ranks, apart
        self._step = 0
        self._compared: set[str] = set()

    def kill(self, process: str, phase: str, delay: float, *, ends: bool = True) -> tuple[dict[str, Any], str]:
        """Start or resume, and kill a process so long after the phase began; the event, and what the driver said.

        With `ends=False` the run is expected to outlive that process; its driver is killed in the next step.
        """
        step = self.next_step()
        faults = [{"do": "kill", "process": process, "phase": phase, "step": step, "delay": delay}]
        if not ends:
            faults.append({"do": "kill", "process": "driver", "phase": "actor_train", "step": step + 1})
        code, output = self.go_on(faults)
        assert code != 0, output
        kill = [event for event in events(self.run_folder) if event["event"] == "kill"][-len(faults)]
        assert (kill["process"], kill["step"]) == (process, step - 1), "the fault of an earlier start"
        return kill, output

    def next_step(self) -> int:
        """The step of the next fault."""
        self._step += self._apart
        assert self._step < self._steps, "too many kills hit another phase than the one meant"
        return self._step

    def go_on(self, faults: list[dict[str, Any]]) -> tuple[int, str]:
        """Start or resume with faults, to its end: exit code and output."""
        return finish(start_faulty(self._job, self.run_folder, faults, *self._resume()))

    def go_on_to_the_end(self) -> None:
        code, output = run("run", self._job, "--output", self.run_folder, *self._resume())
        assert code == 0, output

    def compare(self) -> list[str]:
        """Compare each checkpoint that was not compared before with the calm run's; returns their names."""
        complete = {file.parent for file in (self.run_folder / "checkpoints").glob("step-*[0-9]/driver.json")}
        new = sorted(folder for folder in complete if folder.name not in self._compared)
        for folder in new:
            calm = self._calm / "checkpoints" / folder.name
            assert state_of(folder, self._ranks) == state_of(calm, self._ranks), folder.name
            self._compared.add(folder.name)
        return [folder.name for folder in new]

    def _resume(self) -> list[str]:
        return ["--resume"] if self.run_folder.exists() else []
