"""A registry that has one image, to be pulled and nothing else: the OCI Distribution Specification's `GET`s.

    python registry.py ARCHIVE

ARCHIVE is a docker-archive file. Containerd asks a registry called `localhost` at port 80, without TLS.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tarfile
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ADDRESS = ("127.0.0.1", 80)
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Image:
    """Blobs of a docker-archive by digest, and the manifest that names them."""

    archive: Path
    members: dict[str, tarfile.TarInfo]
    manifest: bytes

    @classmethod
    def read(cls, archive: Path) -> Image:
        """Raises KeyError where a blob is missing that the archive's own manifest names."""
        with tarfile.open(archive) as file:
            content = file.extractfile("manifest.json")
            assert content is not None
            [image] = json.load(content)
            members: dict[str, tarfile.TarInfo] = {}

            def blob(name: str, kind: str) -> dict[str, Any]:
                # An archive has a layer that occurs twice once, and a link at its other places.
                member = file.getmember(name)
                while member.issym() or member.islnk():
                    member = file.getmember(str(Path(name).parent / member.linkname))
                part, digest = file.extractfile(member), hashlib.sha256()
                assert part is not None
                while chunk := part.read(_CHUNK):
                    digest.update(chunk)
                named = f"sha256:{digest.hexdigest()}"
                members[named] = member
                return {"mediaType": kind, "digest": named, "size": member.size}

            manifest = {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": blob(image["Config"], _CONFIG),
                "layers": [blob(name, _LAYER) for name in image["Layers"]],
            }
        return cls(archive, members, json.dumps(manifest).encode())


class Handler(BaseHTTPRequestHandler):
    """Answers for `image`, whatever it is called."""

    protocol_version = "HTTP/1.1"
    image: Image

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        kind, reference = ["", *self.path.strip("/").split("/")][-2:]
        if self.path == "/v2/":
            self._send("application/json", b"{}", body)
        elif kind == "manifests":
            self._send(_MANIFEST, self.image.manifest, body)
        elif kind == "blobs" and reference in self.image.members:
            member = self.image.members[reference]
            self._begin("application/octet-stream", member.size, reference)
            if body:
                with open(self.image.archive, "rb") as file, tarfile.open(fileobj=file) as archive:
                    part = archive.extractfile(member)
                    assert part is not None
                    shutil.copyfileobj(part, self.wfile, _CHUNK)
        else:
            self.send_error(404)

    def _send(self, kind: str, content: bytes, body: bool) -> None:
        self._begin(kind, len(content), f"sha256:{hashlib.sha256(content).hexdigest()}")
        if body:
            self.wfile.write(content)

    def _begin(self, kind: str, size: int, digest: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        self.send_header("Docker-Content-Digest", digest)
        self.end_headers()


if __name__ == "__main__":
    Handler.image = Image.read(Path(sys.argv[1]))
    ThreadingHTTPServer(ADDRESS, Handler).serve_forever()
