"""Run manifests and print a digest of what each computed, to show that a change of the code changes no bit.

    python tests/support/run_bits.py [--into FOLDER] [MANIFEST ...]

Without a manifest: the quickstart, the MoE example and `two-trainers.yaml`. Floating point depends on the processor, so
that digests are comparable on one machine only. The code that runs is the one that `python` imports.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ("examples/quickstart.yaml", "examples/qwen3-moe-ep2.yaml", "tests/support/two-trainers.yaml")


def computed_values(record: dict) -> dict:
    """What a step computed: no time and no memory reading."""
    metrics = {name: value for name, value in record["metrics"].items() if not name.startswith("perf/")}
    return {"step": record["step"], "applied": record["applied"], "metrics": metrics}


def digest_of_steps(run: Path) -> str:
    lines = (run / "steps.jsonl").read_text().splitlines()
    return _sha(json.dumps([computed_values(json.loads(line)) for line in lines], sort_keys=True).encode())


def digest_of_trajectories(run: Path) -> str:
    return _sha(b"".join(gzip.decompress(path.read_bytes()) for path in sorted((run / "trajectories").iterdir())))


def digest_of_checkpoint(run: Path) -> str:
    """Tensors of the newest checkpoint by name, whatever else its files hold."""
    newest = max((run / "checkpoints").glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))
    digest = hashlib.sha256()
    for path in sorted(newest.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name).contiguous().flatten()
                digest.update(f"{path.name} {name} {tensor.dtype}".encode())
                digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("manifests", nargs="*", default=[str(ROOT / name) for name in MANIFESTS])
    parser.add_argument("--into", type=Path, help="folder for the runs; default: a temporary one")
    arguments = parser.parse_args()
    into = arguments.into or Path(tempfile.mkdtemp(prefix="run-bits-"))
    for manifest in arguments.manifests:
        run = into / Path(manifest).stem
        command = [sys.executable, "-m", "rljob_worker.cli.main", "run", manifest, "--output", str(run)]
        with open(into / f"{run.name}.log", "wb") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=900).returncode
        if code:
            sys.exit(f"{manifest}: exit code {code}; see {log.name}")
        print(f"{run.name:16} steps {digest_of_steps(run)}  trajectories {digest_of_trajectories(run)}  ", end="")
        print(f"checkpoint {digest_of_checkpoint(run)}", flush=True)


if __name__ == "__main__":
    main()
