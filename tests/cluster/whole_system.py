"""The whole system on one machine: a real node, KubeRay, the operator from its chart, Prometheus."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml
from images import REPOSITORY, operator_image, worker_image
from kube import Kube, Object, wait_until
from node_cluster import NodeCluster

from rljob_api.overrides import apply_overrides

NAMESPACE = "rljob"
CHART = REPOSITORY / "helm" / "rljob"
PROMETHEUS_PORT = 9090
SCRAPE_SECONDS = 2
_USER = 1000
_KV_CACHE_BYTES = 2**26
_INSTALL_SECONDS = 180.0


class WholeSystem:
    """The system that `make cluster-up` brings up; `start` to `stop`.

    Args:
        folder: for everything but images and programs; it must be empty.
        lasting: outlive this process.
    """

    def __init__(self, folder: Path, lasting: bool = False) -> None:
        self.folder = folder
        self.cluster = NodeCluster(folder, [], lasting)
        self.worker_image = self._operator_image = ""

    def start(self) -> None:
        """Bring up everything; each part waits until it is ready."""
        self.cluster.start()
        self.worker_image, archive = worker_image()
        self.cluster.load_image(archive)
        self._operator_image, archive = operator_image()
        self.cluster.load_image(archive)
        self.cluster.use_kuberay("1.6.2")
        self.install()
        self._start_prometheus()

    def stop(self) -> None:
        """End everything at once."""
        self.cluster.stop()

    @property
    def kube(self) -> Kube:
        """A client that may do everything."""
        return self.cluster.kube

    def install(self, chart: Path = CHART, *settings: str) -> None:
        """Install the chart, or upgrade to it, with an operator image of this checkout."""
        repository, tag = self._operator_image.rsplit(":", 1)
        values = [f"image.repository={repository}", f"image.tag={tag}", "jobs.kuberayVersion=1.6.2"]
        # Checkout, Python and the shared folder of these jobs are the machine's own. The chart before knew no policy.
        values += [*(["policy.hostPaths={/}"] if chart == CHART else []), *settings]
        command = ["upgrade", "--install", "rljob", str(chart), f"--namespace={NAMESPACE}", "--create-namespace"]
        self.cluster.helm(*command, "--wait", *(f"--set={value}" for value in values), seconds=_INSTALL_SECONDS)

    def job(self, name: str, *settings: str) -> dict[str, Any]:
        """The quickstart as a job for this node."""
        return node_job(self.folder, self.worker_image, name, *settings)

    def operator_pods(self) -> list[Object]:
        """The operator's pods."""
        return self.kube.list("Pod", NAMESPACE, "app.kubernetes.io/name=rljob,app.kubernetes.io/component=operator")

    # --- Prometheus ----------------------------------------------------------------------------

    def _start_prometheus(self) -> None:
        path = self.folder / "prometheus.json"
        path.write_text(json.dumps(self._scraping()))
        (self.folder / "alerts.json").write_text(json.dumps(hurried_alerts()))
        command = [
            "prometheus",
            f"--config.file={path}",
            f"--storage.tsdb.path={self.folder / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}",
        ]
        self.cluster.keep("prometheus", command, lambda: self.cluster.http_ok(PROMETHEUS_PORT, "/-/ready"))

    def _scraping(self) -> dict[str, Any]:
        """Configuration of the scraping, as the ServiceMonitor has it. Debian's Prometheus has no discovery by
        Kubernetes: one replica is asked by its Service."""
        seconds = f"{SCRAPE_SECONDS}s"
        target = f"rljob-metrics.{NAMESPACE}.svc.cluster.local:8080"
        job = {"job_name": "rljob-operator", "honor_labels": True, "static_configs": [{"targets": [target]}]}
        return {
            "global": {"scrape_interval": seconds, "scrape_timeout": seconds, "evaluation_interval": seconds},
            "scrape_configs": [job],
            "rule_files": [str(self.folder / "alerts.json")],
        }

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Ask Prometheus now; returns its vector."""
        client = Kube(self.cluster.network, "127.0.0.1", PROMETHEUS_PORT, None, "")
        answer = client.request("GET", f"/api/v1/query?{urlencode({'query': expression})}")
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def value(self, expression: str) -> float | None:
        """Ask for one number; None where there is no series."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None

    def wait_query(self, expression: str, seconds: float) -> list[dict[str, Any]]:
        """Ask until there is a result. Raises AssertionError."""
        found: list[list[dict[str, Any]]] = [[]]

        def there() -> bool:
            found[0] = self.query(expression)
            return bool(found[0])

        assert wait_until(there, seconds, 0.5), f"Prometheus had nothing for {expression} in {seconds:.0f} s"
        return found[0]


def hurried_alerts() -> dict[str, Any]:
    """The chart's rules, looked at as often as metrics are read; a step is stalled after 15 s instead of minutes."""
    rules: dict[str, Any] = yaml.safe_load((REPOSITORY / "helm" / "rljob" / "files" / "alerts.yaml").read_text())
    for group in rules["groups"]:
        group["interval"] = f"{SCRAPE_SECONDS}s"
        for rule in group["rules"]:
            if rule.get("alert") == "RLJobStepStalled":
                assert "900" in rule["expr"]
                rule |= {"expr": rule["expr"].replace("900", "15"), "for": "5s"}
    return rules


def node_job(folder: Path, image: str, name: str, *settings: str) -> dict[str, Any]:
    """Return the quickstart as a job for the node: `path=value` settings below `spec` go over it.

    `folder`/shared/`name` is what its pods see as /shared.
    """
    shared = folder / "shared" / name
    shared.mkdir(parents=True, exist_ok=True)
    os.chown(shared, _USER, _USER)
    manifest = yaml.safe_load((REPOSITORY / "examples" / "quickstart-cluster.yaml").read_text())
    spec = manifest["spec"]
    spec["image"] = image
    spec["storage"]["volumes"] = [*_environment(), _volume("shared", "/shared", shared, read_only=False)]
    spec["rollout"]["kvCacheBytes"] = _KV_CACHE_BYTES
    spec["resources"] |= {"head": {"cpu": "200m", "memory": "3Gi"}, "worker": {"cpu": "500m", "memory": "5Gi"}}
    manifest["metadata"] = {**manifest["metadata"], "name": name, "namespace": "default"}
    changed: dict[str, Any] = apply_overrides(manifest, [f"spec.{setting}" for setting in settings])
    return changed


def printed_columns(table: str) -> dict[str, str]:
    """Return the one line of a table of `kubectl get` by column."""
    header, line = table.splitlines()
    starts = [i for i, character in enumerate(header) if character != " " and (i == 0 or header[i - 1] == " ")]
    ends = [*starts[1:], max(len(header), len(line))]
    return {header[a:b].strip(): line[a:b].strip() for a, b in zip(starts, ends)}


def _environment() -> list[Mapping[str, Any]]:
    """This checkout and its Python at their own places, and the commands where the image expects them."""
    environment = Path(sys.prefix)
    volumes = [
        _volume("commands", "/opt/rljob/bin", environment / "bin"),
        _volume("checkout", str(REPOSITORY), REPOSITORY),
    ]
    if not environment.is_relative_to(REPOSITORY):
        volumes.append(_volume("environment", str(environment), environment))
    if sys.base_prefix != "/usr":
        volumes.append(_volume("python", sys.base_prefix, Path(sys.base_prefix)))
    return volumes


def _volume(name: str, inside: str, path: Path, read_only: bool = True) -> dict[str, Any]:
    return {"name": name, "mountPath": inside, "hostPath": str(path), "readOnly": read_only}
