"""The chart as it is shipped: helm's archive, and the same as an OCI image layout."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import yaml
from helm_chart import ROOT, helm_program, render


def test_archive_and_layout_hold_the_chart(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "helm/package.py"), f"--helm={helm_program()}", f"--output={tmp_path}"]
    done = subprocess.run([*command, "--home=https://rl.example"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    archive, folder = map(Path, done.stdout.split())
    assert render(chart=archive) == render()
    shown = subprocess.run([helm_program(), "show", "chart", archive], capture_output=True, timeout=60)
    about = yaml.safe_load(shown.stdout)
    assert (about["home"], about["name"], about["maintainers"][0]["name"]) == (
        "https://rl.example", "rljob", "The RLJob authors",
    )  # fmt: skip

    def blob(descriptor: dict[str, object]) -> bytes:
        content = (folder / "blobs" / str(descriptor["digest"]).replace(":", "/")).read_bytes()
        assert (f"sha256:{hashlib.sha256(content).hexdigest()}", len(content)) == (
            descriptor["digest"], descriptor["size"],
        )  # fmt: skip
        return content

    (entry,) = json.loads((folder / "index.json").read_text())["manifests"]
    assert entry["annotations"]["org.opencontainers.image.ref.name"] == "0.1.0"
    manifest = json.loads(blob(entry))
    assert json.loads(blob(manifest["config"])) == about
    (layer,) = manifest["layers"]
    assert layer["mediaType"] == "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
    assert blob(layer) == archive.read_bytes()
    assert json.loads((folder / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
