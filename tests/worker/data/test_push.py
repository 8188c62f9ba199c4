"""Uploading an exported model: the real huggingface_hub against a stand-in for the hub's HTTP API."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from rljob_worker.data.hub import check_push, push_folder
from rljob_worker.errors import JobError, UserError


class Hub(ThreadingHTTPServer):
    """Repositories by id: whether each is private, and its files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.private: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.refusal = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_POST(self) -> None:
        body, hub = self.body(), self.server
        if hub.refusal or self.headers.get("Authorization") != "Bearer the-token":
            return self.answer({"error": "no"}, hub.refusal or 401)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in hub.private:
                return self.answer({"url": f"{hub.url}/{name}"}, 409)
            hub.private[name] = asked.get("visibility") == "private" or asked.get("private") is True
            return self.answer({"url": f"{hub.url}/{name}"})
        if self.path.startswith("/api/models/org/model/preupload/"):
            files = json.loads(body)["files"]
            modes = {f["path"]: "lfs" if f["path"].endswith(".safetensors") else "regular" for f in files}
            return self.answer(
                {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
            )
        if self.path == "/org/model.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            return self.answer(
                {
                    "transfer": "basic",
                    "objects": [o | {"actions": {"upload": {"href": f"{hub.url}/blob/{o['oid']}"}}} for o in objects],
                }
            )
        assert self.path == "/api/models/org/model/commit/main", self.path
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                hub.messages.append(value["summary"])
            elif line["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            else:
                hub.files[value["path"]] = hub.blobs[value["oid"]]
        url = f"{hub.url}/org/model/commit/abc"
        return self.answer({"success": True, "commitOid": "a" * 40, "commitUrl": url, "pullRequestUrl": None})

    def do_PUT(self) -> None:
        self.server.blobs[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != "Bearer the-token":
            return self.answer({"error": "no"}, 401)
        self.answer({"id": "org/model", "sha": "0" * 40, "private": True, "siblings": [], "tags": [], "downloads": 0})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "the-token")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # Xet's storage is no part of the HTTP API: files go the way that a client without it takes.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    return tmp_path


@pytest.mark.parametrize("private", [True, False])
def test_all_files_arrive_in_one_commit_of_a_repository(hub: Hub, exported: Path, private: bool) -> None:
    check_push("org/model")
    url = push_folder(exported, "org/model", "my-job: step 20", private=private)
    assert url == f"{hub.url}/org/model"
    assert hub.private == {"org/model": private}
    assert hub.files == {path.name: path.read_bytes() for path in exported.iterdir()}
    assert hub.messages == ["my-job: step 20"]


def test_a_repository_that_is_there_stays_as_visible_as_it_is(hub: Hub, exported: Path) -> None:
    hub.private["org/model"] = False
    push_folder(exported, "org/model", "again", private=True)
    assert hub.private == {"org/model": False}
    assert len(hub.files) == 2


def test_a_wrong_token_is_the_users_and_a_hub_that_is_down_is_not(
    hub: Hub, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "another")
    with pytest.raises(UserError, match=r"--push-to: .* is exported, but pushing it to org/model failed: .*401"):
        push_folder(exported, "org/model", "m", private=True)
    hub.refusal = 500
    with pytest.raises(JobError, match="500"):
        push_folder(exported, "org/model", "m", private=True)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(JobError, match="is exported"):
        push_folder(exported, "org/model", "m", private=True)
    assert not hub.files


def test_names_and_a_missing_token_are_refused_before_anything_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model", "a/b/c", "-x/y", "org/"):
        with pytest.raises(UserError, match="is not the id of a repository: ORG/NAME"):
            check_push(name)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="there is no token; set HF_TOKEN"):
        check_push("org/model")
