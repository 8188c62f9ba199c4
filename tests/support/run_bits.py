"""Run small jobs and print a digest of what each computed, to show that a change of the code changes no bit.

    python tests/support/run_bits.py [--into FOLDER] [--write FILE] [--against FILE] [ROW or MANIFEST ...]
    python tests/support/run_bits.py --begin FOLDER
    python tests/support/run_bits.py --resume FOLDER --unverified FOLDER ...

Without a name: every row of `bits.yaml`. A row that cannot have the same bits twice is audited and one of its steps
replayed instead. `--begin` leaves runs that are half done, for `--resume` of the next version, or for `--unverified`
of one that takes checkpoints without checksums only on request. `--against` compares with what `--write` or the
standard output of another version holds, and ends with 1 where a digest differs.

Floating point depends on the processor, so that digests are comparable on one machine only, and are kept outside the
tree. The code that runs is the one that `python` imports.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open

ROWS = Path(__file__).with_name("bits.yaml")
SECONDS = 900.0
UNVERIFIED = "--trust-unverified"
QUIET = {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
Digests = dict[str, str]


def computed_values(record: dict) -> dict:
    """Computed values of a step: no time and no memory reading."""
    metrics = {name: value for name, value in record["metrics"].items() if not name.startswith("perf/")}
    return {"step": record["step"], "applied": record["applied"], "metrics": metrics}


def digest_of_steps(run: Path) -> str:
    lines = (run / "steps.jsonl").read_text().splitlines()
    return _sha(json.dumps([computed_values(json.loads(line)) for line in lines], sort_keys=True).encode())


def digest_of_trajectories(run: Path) -> str:
    return _digest_of_files(run / "trajectories")


def digest_of_checkpoint(run: Path) -> str:
    """Tensors of the newest checkpoint by name, whatever else its files hold."""
    digest = hashlib.sha256()
    for path in sorted(_newest_checkpoint(run).glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name).contiguous().flatten()
                digest.update(f"{path.name} {name} {tensor.dtype}".encode())
                digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def digest_of_driver(run: Path) -> str:
    """Digest of the driver's saved state: the data's cursor and the groups that are open, as JSON."""
    state = json.loads((_newest_checkpoint(run) / "driver.json").read_text())
    kept = {name: state.get(name) for name in ("step", "weight_version", "data_cursor", "carried", "world_size")}
    return _sha(json.dumps(kept, sort_keys=True).encode())


def digests_of(run: Path) -> Digests:
    """Column -> digest, of a run folder."""
    digests = {
        "steps": digest_of_steps(run),
        "trajectories": digest_of_trajectories(run),
        "checkpoint": digest_of_checkpoint(run),
        "driver": digest_of_driver(run),
    }
    return digests | ({"journal": _digest_of_files(run / "journal")} if (run / "journal").is_dir() else {})


def _newest_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))


def _digest_of_files(folder: Path) -> str:
    return _sha(b"".join(gzip.decompress(path.read_bytes()) for path in sorted(folder.iterdir())))


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class Rows:
    """The runs of `bits.yaml`, in a folder.

    Args:
        into: where manifests, run folders and logs go.
    """

    def __init__(self, into: Path) -> None:
        into.mkdir(parents=True, exist_ok=True)
        self._into = into
        content = yaml.safe_load(ROWS.read_text())
        self._base = content["base"]
        self.rows: dict[str, Any] = content["rows"]
        self._free: list[str] = content["free"]
        self._resumed: str = content["resumed"]
        self._replayed: dict[str, int] = content["replayed"]

    def digests(self, name: str) -> Iterator[tuple[str, Digests]]:
        """Run a row, or a manifest that is given as a file, and say what it computed."""
        manifest = self.manifest(name) if name in self.rows else Path(name)
        run = self._into / manifest.stem
        self._rljob(run.name, "run", manifest, "--output", run)
        if name not in self._free:
            yield run.name, digests_of(run)
        if step := self._replayed.get(name):
            yield from self._replay(run, step)

    def begin(self) -> None:
        """Run the first half of the row that others resume."""
        steps = self._steps(self._resumed) // 2
        run = self._into / self._resumed
        self._rljob(run.name, "run", self.manifest(self._resumed), "--output", run, "--set", f"spec.steps={steps}")

    def resume(self, begun: Path, trust: bool) -> Iterator[tuple[str, Digests]]:
        """End a copy of what another version began, and say what it computed; then replay a step that it sampled."""
        run = self._into / f"{self._resumed}-{'unverified' if trust else 'resumed'}"
        shutil.copytree(begun / self._resumed, run)
        options = [UNVERIFIED] if trust and UNVERIFIED in self._rljob("help", "run", "--help") else []
        self._rljob(run.name, "run", self.manifest(self._resumed), "--output", run, "--resume", *options)
        yield run.name, digests_of(run)
        yield from self._replay(run, self._steps(self._resumed) // 2, *options)

    def _replay(self, run: Path, step: int, *options: str) -> Iterator[tuple[str, Digests]]:
        audited = self._rljob(f"{run.name}-audit", "audit", run)
        options = tuple(one for one in options if one in self._rljob("help", "replay", "--help"))
        replayed = self._rljob(f"{run.name}-replay", "replay", run, "--step", str(step), *options)
        again = next(line for line in replayed.splitlines() if line.startswith("sampled again"))
        trained = next((line for line in replayed.splitlines() if line.startswith("trained again")), "")
        assert audited
        whole = all(len(set(_counts(line))) <= 1 for line in (again, trained))
        yield f"{run.name}-replay", {"audit": "whole", "replay": "whole" if whole else again}

    def _steps(self, name: str) -> int:
        return int({**self._base, **self.rows[name]}["steps"])

    def manifest(self, name: str) -> Path:
        document = {
            "apiVersion": "rljob.dev/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": name},
            "spec": laid_over(self._base, self.rows[name]),
        }
        path = self._into / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    def _rljob(self, log: str, *arguments: str | Path) -> str:
        """Its output; ends this program where it fails."""
        from support.warm.client import WarmProcess
        from support.warm.protocol import DRIVER

        options = ["--no-report"] if arguments[0] == "run" and "--help" not in arguments else []
        argv = ["-m", "rljob_worker.cli.main", *map(str, arguments), *options]
        process = WarmProcess(DRIVER, argv, {**os.environ, **QUIET})
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            sys.exit(f"{log}: not ended after {SECONDS} s")
        (self._into / f"{log}.log").write_text(output)
        if process.returncode:
            sys.exit(f"{log}: exit code {process.returncode}; see {self._into / log}.log\n{output[-2000:]}")
        return output


def _counts(line: str) -> list[str]:
    """The numbers of "N of M"."""
    words = line.split()
    return [words[index + offset] for index, word in enumerate(words) if word == "of" for offset in (-1, 1)][:2]


def laid_over(base: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with another laid over it, to any depth; null removes a key."""
    result = dict(base)
    for key, value in row.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = laid_over(result[key], value)
        else:
            result[key] = value
    return {key: value for key, value in result.items() if value is not None}


def table_line(name: str, digests: Digests) -> str:
    return f"{name:22} " + "  ".join(f"{column} {digest}" for column, digest in digests.items())


def read_table(path: Path) -> dict[str, str]:
    """Row -> the rest of its line."""
    lines = (line.split(maxsplit=1) for line in path.read_text().splitlines() if line.strip())
    return {name: " ".join(rest.split()) for name, rest in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ROW or MANIFEST")
    parser.add_argument("--into", type=Path, help="folder for the runs; default: a temporary one, which is removed")
    parser.add_argument("--begin", type=Path, metavar="FOLDER", help="leave half of a run there")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="end what --begin left there")
    parser.add_argument("--unverified", type=Path, metavar="FOLDER", help="the same, without checksums")
    parser.add_argument("--write", type=Path, metavar="FILE", help="add the table to it")
    parser.add_argument("--against", type=Path, metavar="FILE", help="table to compare with")
    arguments = parser.parse_args()
    if arguments.begin:
        Rows(arguments.begin).begin()
        return
    with tempfile.TemporaryDirectory(prefix="run-bits-") as temporary:
        rows = Rows(arguments.into or Path(temporary))
        expected = read_table(arguments.against) if arguments.against else {}
        others = sum(is_other(line, expected, arguments) for line in _lines(rows, arguments))
    if others:
        sys.exit(f"{others} rows differ")


def _lines(rows: Rows, arguments: argparse.Namespace) -> Iterator[str]:
    resumed = [(folder, trust) for folder, trust in ((arguments.resume, False), (arguments.unverified, True)) if folder]
    for name in arguments.names or ([] if resumed else rows.rows):
        for row in rows.digests(name):
            yield table_line(*row)
    for folder, trust in resumed:
        for row in rows.resume(folder, trust):
            yield table_line(*row)


def is_other(line: str, expected: Mapping[str, str], arguments: argparse.Namespace) -> bool:
    """Print a line; whether it is another than was expected."""
    name, rest = line.split(maxsplit=1)
    other = arguments.against is not None and expected.get(name) != " ".join(rest.split())
    print(line + (f"   DIFFERS: {expected.get(name, 'no such row')}" if other else ""), flush=True)
    if arguments.write:
        with open(arguments.write, "a") as file:
            file.write(line + "\n")
    return other


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    main()
