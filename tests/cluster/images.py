"""Images for the node's pods: the project's own Dockerfiles on a Debian base, built with buildah, without a registry.

Everything is kept in `${XDG_CACHE_HOME:-~/.cache}/rljob/images`, named by what it is made of.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from programs import folder as programs_folder
from programs import locked, program

REPOSITORY = Path(__file__).parents[2]
SUITE = "bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-pip", "python3-venv")
OPERATOR_IMAGE = "localhost/rljob-operator"
WORKER_IMAGE = "localhost/rljob-worker-cpu"
PAUSE_IMAGE = "localhost/pause:1"
BUILD_SECONDS = 1800.0
_HOME_MODE = 0o755
"""Mode of /root: this machine's Python, which is mounted at its own place, may be below it, and pods are not root."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def folder() -> Path:
    """Return the folder that holds the images."""
    return programs_folder().parent / "images"


def operator_image() -> tuple[str, Path]:
    """Return name and archive of the operator's image; builds it where its parts have changed."""
    parts = ["images/operator", "requirements/operator.txt", "crds/rljob_api", "operator/rljob_operator"]
    return _built(OPERATOR_IMAGE, "images/operator/Dockerfile", parts)


def worker_image() -> tuple[str, Path]:
    """Return name and archive of the worker's image without its Python environment, which is mounted (6 GB)."""
    return _built(WORKER_IMAGE, "images/worker-cpu/Dockerfile", ["images/worker-cpu"], "system")


def pause_image() -> Path:
    """Return the archive of the image whose process holds a pod's namespaces."""
    archive = folder() / f"{program('pause').parent.name}.tar"
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        _write_archive(archive, PAUSE_IMAGE, program("pause"))
    return archive


def _built(name: str, dockerfile: str, parts: list[str], target: str = "") -> tuple[str, Path]:
    base = base_image()
    key = _digest([base, target, *(_content(REPOSITORY / part) for part in parts)])
    archive = folder() / f"{name.rpartition('/')[2]}-{key}.tar"
    image = f"{name}:{key}"
    with locked(folder() / "images.lock"):
        if archive.exists():
            return image, archive
        started = time.monotonic()
        print(f"Building {image} ...", flush=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder()) as scratch:
            settings = Path(scratch) / "pip.conf"
            settings.write_text(_pip_settings())
            _buildah(
                "bud", "--isolation", "chroot", "--network", "host", "--layers", "--quiet",
                "--volume", f"{settings}:/etc/pip.conf:ro", "--volume", "/etc/ssl/certs:/etc/ssl/certs:ro",
                "--build-arg", f"BASE_IMAGE={base}", *(["--target", target] if target else []),
                "--file", str(REPOSITORY / dockerfile), "--tag", image, str(REPOSITORY),
            )  # fmt: skip
            new = Path(scratch) / "image.tar"
            _buildah("push", "--quiet", image, f"docker-archive:{new}:{image}")
            for old in folder().glob(f"{name.rpartition('/')[2]}-*.tar"):
                old.unlink()
            new.rename(archive)
        print(f"Built {image} in {time.monotonic() - started:.0f} s", flush=True)
    return image, archive


def base_image() -> str:
    """Return the name of a Debian image with Python; makes it with debootstrap where it is not there yet."""
    name = f"localhost/rljob-base:{_digest([SUITE, *PACKAGES, oct(_HOME_MODE)])}"
    with locked(folder() / "images.lock"):
        if name in _buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
            return name
        started = time.monotonic()
        print(f"Making {name} with debootstrap ...", flush=True)
        with tempfile.TemporaryDirectory(prefix=".base-", dir=folder()) as scratch:
            include = f"--include={','.join(PACKAGES)}"
            _run("debootstrap", "--variant=minbase", include, SUITE, f"{scratch}/root")
            shutil.rmtree(f"{scratch}/root/var/cache/apt/archives", ignore_errors=True)
            os.chmod(f"{scratch}/root/root", _HOME_MODE)
            container = _buildah("from", "scratch").strip()
            _buildah("copy", "--quiet", container, f"{scratch}/root", "/")
            _buildah("config", "--cmd", "/bin/bash", container)
            _buildah("commit", "--quiet", "--rm", container, name)
        print(f"Made {name} in {time.monotonic() - started:.0f} s", flush=True)
    return name


def _buildah(*arguments: str) -> str:
    storage = ["--root", str(folder() / "storage"), "--runroot", str(folder() / "run"), "--storage-driver", "overlay"]
    return _run("buildah", *storage, *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
    if done.returncode:
        said = (done.stdout + done.stderr)[-4000:]
        raise RuntimeError(f"`{' '.join(command)}` ended with {done.returncode}:\n{said}")
    return done.stdout


def _pip_settings() -> str:
    """This machine's pip settings for the build alone: they must not become part of the image."""
    lines = _run(sys.executable, "-m", "pip", "config", "list").splitlines()
    settings = dict(line.split("=", 1) for line in lines if "=" in line)
    chosen = {key.rpartition(".")[2]: value.strip("'") for key, value in settings.items()}
    kept = {key: value for key, value in chosen.items() if key in ("index-url", "extra-index-url", "trusted-host")}
    return "[global]\n" + "".join(f"{key} = {value}\n" for key, value in kept.items())


def _content(path: Path) -> str:
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return _digest([f"{file.relative_to(REPOSITORY)} {file.read_bytes()!r}" for file in files if file.suffix != ".pyc"])


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _write_archive(archive: Path, name: str, executable: Path) -> None:
    """Write an image of one file in the format of `docker save`."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(executable, arcname=executable.name)
    config = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Entrypoint": [f"/{executable.name}"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    new = archive.with_suffix(f".{os.getpid()}")
    with tarfile.open(new, mode="w") as tar:
        for file, content in (
            ("config.json", json.dumps(config).encode()),
            ("layer.tar", layer.getvalue()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(file)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    new.rename(archive)
