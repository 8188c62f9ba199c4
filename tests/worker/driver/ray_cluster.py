"""A Ray cluster as KubeRay makes one, but of processes on this machine: a head without CPUs, and worker nodes.

Each worker node has an address of its own on the loopback network.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from jobs import REPOSITORY, wait_for
from support.ports import free_port
from support.warm import ray_nodes
from support.warm.client import variables

from rljob_api.profiles.base import BACKEND_AUTOLOAD_VARIABLE
from rljob_worker.host.files import log_tail

ENTRYPOINT = "trap : TERM; printenv RLJOB_MANIFEST | base64 -d | gunzip | rljob run - --output {folder} --resume auto"
START_SECONDS = 240
STOP_SECONDS = 60
_PAUSE = 0.2
"""Between two questions to Ray's dashboard, which computes for each."""
EXIT_CODES = "exit-codes"
_AGENT_PORTS = ("dashboard-agent-grpc", "metrics-export", "dashboard-agent-listen", "runtime-env-agent")
_RLJOB = """#!{python}
import sys
from rljob_worker.cli.main import main
code = main()
with open({file!r}, "a") as file:
    file.write(f"{{code}}\\n")
sys.exit(code)
"""


def resources(nodes: int, devices: int) -> dict[str, Any]:
    """`spec.resources` of a job that gives each device a CPU."""
    return {"profile": "cpu", "nodes": nodes, "devicesPerNode": devices, "threadsPerDevice": 1}


@contextmanager
def ray_cluster(folder: Path, cpus: Mapping[str, int]) -> Iterator[RayCluster]:
    """A cluster with a worker node at each address, of so many CPUs."""
    made = RayCluster(folder)
    try:
        for address, count in cpus.items():
            made.add_node(address, count)
        yield made
    finally:
        made.close()


class RayCluster:
    """Head and worker nodes; `close` ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Ray's sockets lie in it, and their paths may have 107 bytes.
        self._temporary = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = self._make_environment()
        self._port, self._dashboard = free_port(), free_port()
        head = ["--head", f"--port={self._port}", "--num-cpus=0", f"--ray-client-server-port={free_port()}"]
        head += ["--dashboard-host=127.0.0.1", f"--dashboard-port={self._dashboard}", f"--temp-dir={self._temporary}"]
        self._start("head", head)
        try:
            wait_for(lambda: self._running("head") and self._ready(), "the head's job API", START_SECONDS, _PAUSE)
        except AssertionError:
            self.close()
            raise

    def _make_environment(self) -> dict[str, str]:
        """That of the pods: the image's, and what the operator sets."""
        bin_folder = self.folder / "bin"
        bin_folder.mkdir()
        rljob = bin_folder / "rljob"
        rljob.write_text(_RLJOB.format(python=sys.executable, file=str(self.folder / EXIT_CODES)))
        rljob.chmod(0o755)
        paths = [str(bin_folder), str(Path(sys.executable).parent), os.environ["PATH"]]
        packages = [str(REPOSITORY / "crds"), str(REPOSITORY / "worker")]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RLJOB_"))}
        return kept | {
            "PATH": os.pathsep.join(paths),
            "PYTHONPATH": os.pathsep.join(packages),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Else Ray asks for the token that a script of this user may have left in its home folder.
            "RAY_AUTH_MODE": "disabled",
            # As `rljob run` has it on a machine: what trainers and engines are forked from is then the same.
            BACKEND_AUTOLOAD_VARIABLE: "0",
            # A lost node is noticed after 5 failed checks; a slow one has 10 seconds for each.
            "RAY_health_check_period_ms": "1000",
            # A machine that is busy with other tests starts the dashboard's parts slowly.
            "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(START_SECONDS),
            "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": str(START_SECONDS),
            "RAY_raylet_start_wait_time_s": str(START_SECONDS),
            "RAY_agent_register_timeout_ms": str(1000 * START_SECONDS),
            "RLJOB_DRIVER_TOKEN": "secret",
        }

    def add_node(self, address: str, cpus: int, hide: Path | None = None) -> None:
        """Start a worker node, whose trainers and engines are forked; with `hide`, it sees an empty folder there, and
        they start as users' do: a fork would see what is there."""
        # Not for the head: its children, the job's supervisor among them, would not learn how their children ended.
        more = {
            "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true",
            "RAY_process_group_cleanup_enabled": "false",
        }
        arguments = [f"--address=127.0.0.1:{self._port}", f"--node-ip-address={address}", f"--num-cpus={cpus}"]
        if hide is None:
            more |= variables()
        self._start(address, arguments, more, hide)
        try:
            wait_for(lambda: self._running(address) and self._joined(address), f"node {address}", START_SECONDS, _PAUSE)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._last_words()}") from None

    def _last_words(self) -> str:
        """The ends of the logs that were written last: Ray's own folder goes when the cluster does."""
        logs = (self._temporary / "session_latest" / "logs").glob("*.*")
        newest = sorted((log for log in logs if log.is_file()), key=lambda log: log.stat().st_mtime)[-12:]
        return "\n".join(log_tail(log, log.name, 15) for log in newest)

    def _start(
        self, name: str, arguments: list[str], more: dict[str, str] | None = None, hide: Path | None = None
    ) -> None:
        command = [sys.executable, "-P", ray_nodes.__file__, "start", "--disable-usage-stats", *arguments]
        command += ["--min-worker-port=0", "--max-worker-port=0"]
        command += [f"--{name}-port={free_port()}" for name in _AGENT_PORTS]
        if hide is not None:
            command = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hide), *command]
        with open(self.folder / f"{name}.log", "ab") as log:
            self._nodes[name] = subprocess.Popen(
                command,
                env=self._environment | (more or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill_node(self, address: str) -> None:
        """End all of a node's processes without a word, as a lost machine does."""
        process = self._nodes.pop(address)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def wait_for_loss(self, address: str) -> None:
        """Wait until the head has noticed that a node is gone."""
        wait_for(lambda: not self._joined(address), f"loss of {address}", START_SECONDS, _PAUSE)

    def close(self) -> None:
        for name in list(self._nodes):
            self.kill_node(name)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _running(self, name: str) -> bool:
        # Not --block: it would end a node whose client server, which nobody uses, is slow to start.
        log = self.folder / f"{name}.log"
        assert not self._nodes[name].poll(), f"{name} did not start:\n{log.read_text()[-2000:]}"
        return True

    def _joined(self, address: str) -> bool:
        return address in [row["node_ip"] for row in self.alive("nodes")]

    def _ready(self) -> bool:
        try:
            return bool(self._request("/api/version"))
        except OSError:
            return False

    def _request(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._dashboard}{path}",
            data,
            {"Content-Type": "application/json"},
            method=method or ("GET" if body is None else "POST"),
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    # --- what the operator does ---------------------------------------------------------------

    def submit(self, job: Path, run_folder: Path, submission: str) -> None:
        """Submit a manifest as the operator does."""
        text = json.dumps(yaml.safe_load(job.read_text())).encode()
        variables = {
            "RLJOB_MANIFEST": base64.b64encode(gzip.compress(text)).decode(),
            "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
        }
        body = {
            "entrypoint": ENTRYPOINT.format(folder=run_folder),
            "submission_id": submission,
            "runtime_env": {"env_vars": variables},
            "entrypoint_num_cpus": 0,
        }
        assert self._request("/api/jobs/", body)["submission_id"] == submission

    def stop(self, submission: str) -> None:
        self._request(f"/api/jobs/{submission}/stop", method="POST")

    def job(self, submission: str) -> dict[str, Any]:
        return dict(self._request(f"/api/jobs/{submission}"))

    def logs(self, submission: str) -> str:
        return str(self._request(f"/api/jobs/{submission}/logs")["logs"])

    def end_of(self, submission: str, seconds: float) -> dict[str, Any]:
        """The job's information once it has ended."""
        ended = ("STOPPED", "SUCCEEDED", "FAILED")
        wait_for(lambda: self.job(submission)["status"] in ended, f"end of {submission}", seconds, _PAUSE)
        return self.job(submission)

    def exit_codes(self) -> list[int]:
        """Exit codes of `rljob run`, oldest first."""
        file = self.folder / EXIT_CODES
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def alive(self, what: str) -> list[dict[str, Any]]:
        """Living `actors` or `nodes`, by Ray's state API."""
        rows = self._request(f"/api/v0/{what}?limit=1000&detail=false")["data"]["result"]["result"]
        return [row for row in rows if row["state"] == "ALIVE"]
