"""The recipe for Kubeflow's OptimizationJob: its objects by the CRDs, its trials by RLJob's types, a trial's report."""

from __future__ import annotations

import copy
import gzip
import importlib.util
import json
import re
import shlex
import ssl
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from jsonschema import Draft4Validator
from record_cases import write_run
from schema_evaluator import admit, broken_rules

from rljob_api.validation import apply_overrides

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "kubeflow"
CRDS = Path(__file__).parent / "kubeflow"
REFUSED = {
    "more trials at once than in all": ("spec.parallelTrials", 9, "parallelTrials cannot exceed numTrials"),
    "a grid over a range": (
        "spec.searchAlgorithm",
        {"grid": {}},
        "Grid search requires all parameters to be Categorical",
    ),
    "a logarithm of zero": ("spec.parameters.0.searchSpace.logUniform.min", "0", "min must be strictly greater than 0"),
    "no objective": ("spec.objectives", [], "is too short|non-empty|should have at least 1 items"),
    "a number for a text": ("spec.parameters.0.searchSpace.logUniform.max", 1e-4, "of type '?string"),
    "a field that there is not": ("spec.trialTemplate", {}, "Additional properties|unknown field"),
}
"""A fault -> the path in the recipe, its value, and the words of a reader of the schema or of an API server."""


def crd(kind: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(gzip.decompress((CRDS / f"{kind.lower()}s.json.gz").read_bytes()))
    return content


def closed(schema: Any) -> Any:
    """A schema that refuses unknown fields, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    known = isinstance(schema.get("properties"), dict) and "type" in schema
    return {key: closed(value) for key, value in schema.items()} | ({"additionalProperties": False} if known else {})


def schema(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = closed(crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    return found


def recipe() -> dict[str, dict[str, Any]]:
    objects = yaml.safe_load_all((RECIPE / "optimization-job.yaml").read_text())
    return {one["kind"]: one for one in objects}


def problems(manifest: dict[str, Any]) -> list[str]:
    """Complaints of an API server that has the CRD."""
    of = schema(manifest["kind"])
    stored = admit(manifest, of)
    said = [error.message for error in Draft4Validator(of).iter_errors(stored)]
    return said or [message for _, message in broken_rules(stored, schema=of)]


def changed(path: str, value: Any) -> dict[str, Any]:
    job = copy.deepcopy(recipe()["OptimizationJob"])
    *parents, last = path.split(".")
    place: Any = job
    for name in parents:
        place = place[int(name) if isinstance(place, list) else name]
    place[last] = value
    return job


def test_the_crds_take_the_recipe() -> None:
    objects = recipe()
    assert set(objects) == {"TrainingRuntime", "OptimizationJob"}
    assert {kind: problems(one) for kind, one in objects.items()} == {"TrainingRuntime": [], "OptimizationJob": []}
    runtime = objects["TrainingRuntime"]
    template = objects["OptimizationJob"]["spec"]["trainJobTemplate"]["spec"]
    assert template["runtimeRef"] == {"name": runtime["metadata"]["name"], "kind": "TrainingRuntime"}
    [step] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert step["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


@pytest.mark.parametrize("what", REFUSED)
def test_the_crds_refuse_what_is_wrong(what: str) -> None:
    path, value, said = REFUSED[what]
    assert re.search(said, "\n".join(problems(changed(path, value))))


def test_each_parameter_of_a_trial_is_a_field_of_a_job() -> None:
    spec = recipe()["OptimizationJob"]["spec"]
    text = " ".join(spec["trainJobTemplate"]["spec"]["trainer"]["args"])
    chosen = {"lr": "0.00001", "samples": "8"}
    assert {one["name"] for one in spec["parameters"]} == set(re.findall(r"{{\.(\w+)}}", text)) == set(chosen)
    for name, value in chosen.items():
        text = text.replace(f"{{{{.{name}}}}}", value)
    words = shlex.split(text.replace("\\\n", " "))
    overrides = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    job = apply_overrides(yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text()), overrides)
    assert job["spec"]["training"]["optimizer"]["lr"] == 0.00001
    assert job["spec"]["rollout"]["samplesPerPrompt"] == 8


def reporter() -> Any:
    spec = importlib.util.spec_from_file_location("report_metrics", RECIPE / "report_metrics.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def certificate(folder: Path) -> Path:
    """A key and its own certificate for 127.0.0.1, in one file."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "t")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now - timedelta(days=1), now + timedelta(days=1)
    ).add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
    kinds = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    file = folder / "both.pem"
    file.write_bytes(key.private_bytes(*kinds) + made.sign(key, hashes.SHA256()).public_bytes(kinds[0]))
    return file


def test_a_trial_reports_its_reward_and_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = write_run(tmp_path / "run", 25)
    got: list[tuple[str | None, Any]] = []

    class Controller(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.append((self.headers["Authorization"], body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    both = certificate(tmp_path)
    (tmp_path / "token").write_text("secret\n")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    with HTTPServer(("127.0.0.1", 0), Controller) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://127.0.0.1:{server.server_port}/status")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(both))
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
        report = reporter()
        report.send(report.values(str(tmp_path / "run")))
        thread.join()
    [(authorization, body)] = got
    assert authorization == "Bearer secret"
    sent = {one["name"]: float(one["value"]) for one in body["trainerStatus"]["metrics"]}
    rewards = [record.metrics["rollout/raw_reward"] for record in records[-10:]]
    assert sent["reward"] == pytest.approx(sum(rewards) / 10)
    assert set(sent) == {"reward", "eval/synthetic", "eval/synthetic/pass@1"}
