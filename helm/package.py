"""Package the chart: `python helm/package.py --helm HELM [--output dist]`, which `make chart` calls.

Writes `rljob-VERSION.tgz` and, in `rljob-VERSION-oci/`, the same as an OCI image layout, which tools copy into any
registry without a daemon: `oras cp --from-oci-layout dist/rljob-VERSION-oci:VERSION REGISTRY/charts/rljob:VERSION`.
Where the project is published is not known to a checkout: `--home`, `--source` and `--icon` put it into Chart.yaml.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "rljob"
# Media types that `helm push` uses (helm.sh/helm/v3/pkg/registry/constants.go).
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.cncf.helm.config.v1+json"
CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"


def package(helm: str, output: Path, about: dict[str, Any]) -> Path:
    """Let helm package the chart; returns the archive.

    Args:
        helm: the program.
        output: folder of the archive.
        about: fields that go over those of Chart.yaml.

    Raises:
        subprocess.CalledProcessError: helm refused; it said why.
    """
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        chart = Path(scratch) / CHART.name
        shutil.copytree(CHART, chart)
        metadata = {**yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8")), **about}
        (chart / "Chart.yaml").write_text(yaml.safe_dump(metadata, sort_keys=False), encoding="utf-8")
        shutil.copy(CHART.parents[1] / "LICENSE", chart)
        subprocess.run([helm, "lint", "--strict", "--quiet", str(chart)], check=True, timeout=120)
        subprocess.run(
            [helm, "package", str(chart), "--destination", str(output)],
            check=True,
            timeout=120,
            stdout=subprocess.DEVNULL,
        )
    return output / f"{metadata['name']}-{metadata['version']}.tgz"


def layout(archive: Path, metadata: dict[str, Any]) -> Path:
    """Write an OCI image layout with the archive as its one layer; returns its folder.

    Source: github.com/opencontainers/image-spec, image-layout.md and manifest.md, 1.1.
    """
    folder = archive.with_name(f"{archive.name.removesuffix('.tgz')}-oci")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "blobs/sha256").mkdir(parents=True)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _blob(folder, CONFIG, _json(metadata)),
        "layers": [_blob(folder, CONTENT, archive.read_bytes())],
        "annotations": {f"org.opencontainers.image.{key}": metadata[of] for key, of in _ANNOTATIONS.items()},
    }
    about = {"annotations": {"org.opencontainers.image.ref.name": metadata["version"]}}
    index = {"schemaVersion": 2, "manifests": [{**_blob(folder, MANIFEST, _json(manifest)), **about}]}
    (folder / "index.json").write_bytes(_json(index))
    (folder / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    return folder


_ANNOTATIONS = {"title": "name", "version": "version", "description": "description"}


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _blob(folder: Path, media_type: str, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    (folder / "blobs/sha256" / digest).write_bytes(content)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


def main() -> None:
    """Package the chart as the command line says."""
    parser = argparse.ArgumentParser(description="Package the chart as an archive and as an OCI image layout.")
    parser.add_argument("--helm", default="helm", help="the helm program")
    parser.add_argument("--output", type=Path, default=Path("dist"), help="folder of the results")
    parser.add_argument("--home", help="address of the project's page")
    parser.add_argument("--icon", help="address of its picture")
    parser.add_argument("--source", action="append", default=[], help="address of a repository; may be repeated")
    given = parser.parse_args()
    about = {"home": given.home, "icon": given.icon, "sources": given.source}
    try:
        archive = package(given.helm, given.output, {key: value for key, value in about.items() if value})
    except FileNotFoundError:
        sys.exit(f"{given.helm} is not there: install Helm 3, or name it with --helm")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
    shown = subprocess.run([given.helm, "show", "chart", str(archive)], check=True, timeout=60, stdout=subprocess.PIPE)
    folder = layout(archive, yaml.safe_load(shown.stdout))
    print(archive, folder, sep="\n")


if __name__ == "__main__":
    main()
