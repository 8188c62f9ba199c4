"""A contributor's cluster on this machine: `python local_cluster.py up|down|demo`.

It lives in a network, mounts and processes of its own (nothing outside is touched), in
`${XDG_CACHE_HOME:-~/.cache}/rljob/cluster`, until `down` or the next start of the machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from machine import end_machine
from node_cluster import missing_for_nodes, remove_cgroups
from programs import folder as programs_folder
from programs import missing_to_build, missing_to_run, program
from small_jobs import FINAL
from whole_system import PROMETHEUS_PORT, WholeSystem, node_job, printed_columns

FOLDER = programs_folder().parent / "cluster"
STATE = FOLDER / "cluster.json"
JOB_SECONDS = 1800.0


def up() -> None:
    """Bring the cluster up, unless it is."""
    if "image" in (_state() or {}):
        print(f"The cluster runs already (in {FOLDER}).")
        _say_how()
        return
    if problem := missing_to_run() or missing_to_build() or missing_for_nodes():
        sys.exit(problem)
    down()
    FOLDER.mkdir(parents=True)
    started = time.monotonic()
    system = WholeSystem(FOLDER, lasting=True)
    machine = system.cluster.machine.pid
    state = {"pid": machine, "began": _began(machine)}
    # Whatever happens from here on, `down` finds it.
    STATE.write_text(json.dumps(state))
    try:
        system.start()
    except BaseException:
        system.stop()
        raise
    _write_wrapper("kubectl", program("kubectl"), machine)
    _write_wrapper("helm", program("helm"), machine)
    _write_wrapper("curl", Path(shutil.which("curl") or "/usr/bin/curl"), machine)
    STATE.write_text(json.dumps({**state, "image": system.worker_image}))
    print(f"The cluster is up after {time.monotonic() - started:.0f} s.")
    _say_how()


def down() -> None:
    """End the cluster and remove what it left."""
    state = _state()
    if state is not None:
        end_machine(state["pid"])
        remove_cgroups(f"rljob-{state['pid']}")
        print("The cluster is gone.")
    shutil.rmtree(FOLDER, ignore_errors=True)


def demo() -> None:
    """Apply the quickstart and follow it to its end."""
    up()
    state = _state()
    assert state is not None
    name = f"quickstart-{time.strftime('%H%M%S')}"
    manifest = FOLDER / f"{name}.json"
    manifest.write_text(json.dumps(node_job(FOLDER, state["image"], name), indent=1))
    print(f"\n$ kubectl apply -f {manifest}")
    print(_kubectl("apply", "-f", str(manifest)), end="")
    print("$ kubectl get rljobs -o wide --watch")
    phase = _follow(name)
    print(_kubectl("rljob", "status", name))
    if phase != "Succeeded":
        sys.exit(f"{name}: {phase}\n{_kubectl('rljob', 'why', name)}")
    [run] = (FOLDER / "shared" / name / "default").glob("[!.]*")
    print(f"report      {run / 'report.html'}")
    print(f"            {run / 'report.png'}")
    print(f"Prometheus  {FOLDER}/bin/curl -s 'http://127.0.0.1:{PROMETHEUS_PORT}/api/v1/query?query=rljob_step'")


def _follow(name: str) -> str:
    deadline = time.monotonic() + JOB_SECONDS
    shown: dict[str, str] = {}
    while time.monotonic() < deadline:
        cells = printed_columns(_kubectl("get", "rljob", name, "-o", "wide"))
        if not shown:
            _print_row(cells, cells)
        if {**shown, "AGE": cells["AGE"]} != cells:
            _print_row(cells, cells.values())
            shown = cells
        phase = _kubectl("get", "rljob", name, "-o", "jsonpath={.status.phase}")
        if phase in FINAL:
            return phase
        time.sleep(2)
    return f"not done after {JOB_SECONDS:.0f} s"


def _print_row(columns: Iterable[str], cells: Iterable[str]) -> None:
    print("  ".join(f"{cell:<{max(len(column), 9)}}" for column, cell in zip(columns, cells)).rstrip(), flush=True)


def _kubectl(*arguments: str) -> str:
    done = subprocess.run([FOLDER / "bin" / "kubectl", *arguments], capture_output=True, text=True, timeout=60)
    if done.returncode:
        sys.exit(f"`kubectl {' '.join(arguments)}`: {done.stderr}")
    return done.stdout


def _write_wrapper(name: str, path: Path, machine: int) -> None:
    """Write a command that runs inside the cluster's network as its administrator."""
    wrapper = FOLDER / "bin" / name
    wrapper.parent.mkdir(exist_ok=True)
    environment = f"KUBECONFIG={FOLDER / 'kubeconfig'} PATH={Path(sys.prefix) / 'bin'}:$PATH"
    wrapper.write_text(f'#!/bin/sh\nexec env {environment} nsenter --net=/proc/{machine}/ns/net -- {path} "$@"\n')
    wrapper.chmod(0o755)


def _say_how() -> None:
    print(f"  {FOLDER}/bin/kubectl get pods --all-namespaces")
    print(f"  {FOLDER}/bin/helm list --all-namespaces")
    print(f"  {FOLDER}/bin/curl -s http://127.0.0.1:{PROMETHEUS_PORT}/api/v1/targets     (Prometheus)")
    print("  make demo-cluster     make cluster-down")


def _state() -> dict[str, Any] | None:
    """State written by `up`, where that cluster still runs; it has an `image` once it is up."""
    if not STATE.exists():
        return None
    state: dict[str, Any] = json.loads(STATE.read_text())
    return state if _began(state["pid"]) == state["began"] else None


def _began(pid: int) -> str:
    """When a process began, in ticks since the machine's start: process ids are used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def main() -> None:
    """Do what the command line says."""
    commands = {"up": up, "down": down, "demo": demo}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=commands)
    commands[parser.parse_args().command]()


if __name__ == "__main__":
    main()
