"""`hone export --push`: to a server of this test that speaks the hub's calls."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

TOKEN = "hf_not_a_real_token_0123456789"


class Hub(ThreadingHTTPServer):
    """Repositories in memory: create, preupload, LFS batch, upload, commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, Any]] = {}
        self.blobs: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()
        self.refuses = False
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments: Any) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, content: Any, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self.answer({"siblings": [], "id": self.path, "sha": "0" * 40})

    def do_PUT(self) -> None:
        self.server.blobs[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        body = self.body()
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.refuses:
            self.answer({"error": "no"}, 403)
        elif self.path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request.get('organization', 'me')}/{request['name']}"
            self.server.repos[name] = {"asked": request, "files": {}}
            self.answer({"url": f"{self.server.url}/{name}"})
        elif self.path == "/api/validate-yaml":
            assert "library_name: transformers" in json.loads(body)["content"]
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = ("lfs" if f["path"].endswith(".safetensors") else "regular" for f in files)
            self.answer({"files": [{"path": f["path"], "uploadMode": m, "shouldIgnore": False}
                                   for f, m in zip(files, modes, strict=True)]})  # fmt: skip
        elif self.path.endswith("/info/lfs/objects/batch"):
            request = json.loads(body)["objects"]
            link = lambda oid: {"upload": {"href": f"{self.server.url}/blobs/{oid}"}}  # noqa: E731
            self.answer({"transfer": "basic", "objects": [{**o, "actions": link(o["oid"])}
                                                          for o in request]})  # fmt: skip
        elif "/commit/" in self.path:
            self.commit(self.path.split("/api/models/")[1].split("/commit/")[0], body)
        else:
            self.answer({"error": self.path}, 404)

    def commit(self, repo: str, body: bytes) -> None:
        files = self.server.repos[repo]["files"]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
                assert hashlib.sha256(files[value["path"]]).hexdigest() == value["oid"]
        address = f"{self.server.url}/{repo}/commit/1"
        self.answer({"commitUrl": address, "commitOid": "1" * 40, "success": True})


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def exported(
    folder: Path, *arguments: str, token: str | None = TOKEN, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`hone export` of a run, in a process of its own: the hub's library reads its environment once."""
    own = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder)}
    own.pop("HF_TOKEN", None)
    own |= {"HF_TOKEN": token} if token else {}
    return subprocess.run(
        [sys.executable, "-m", "hone.cli", "export", "run", "out", *arguments],
        cwd=folder, env=own | environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder whose checkpoint holds an export."""
    model = tmp_path / "run" / "global_step_2" / "actor" / "huggingface"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights" * 100)
    (tmp_path / "run" / "global_step_2" / "trainer_state.json").write_text("{}")
    from hone.tracking.manifest import write_manifest

    write_manifest(tmp_path / "run" / "global_step_2")
    return tmp_path


@pytest.mark.slow
def test_an_export_is_pushed_with_its_card_and_the_token_is_never_shown(
    hub: Hub, run: Path
) -> None:
    done = exported(run, "--push", "team/model", "--private", HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    repo = hub.repos["team/model"]
    request = repo["asked"]  # the field depends on the library's version
    assert request.get("private") is True or request.get("visibility") == "private"
    assert set(repo["files"]) == {"README.md", "config.json", "model.safetensors"}
    assert repo["files"]["model.safetensors"] == b"weights" * 100
    assert b"library_name: transformers" in repo["files"]["README.md"]
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert f"pushed to {hub.url}/team/model" in done.stdout
    assert TOKEN not in done.stdout + done.stderr
    assert not any(TOKEN.encode() in p.read_bytes() for p in run.rglob("*") if p.is_file())


@pytest.mark.slow
def test_a_push_that_fails_keeps_the_export_and_says_how_to_try_again(hub: Hub, run: Path) -> None:
    hub.refuses = True
    done = exported(run, "--push", "team/model", HF_ENDPOINT=hub.url)
    assert done.returncode == 2
    assert "answered 403 Forbidden" in done.stderr
    assert "`hf upload team/model out` tries again" in done.stderr
    assert (run / "out" / "config.json").is_file()
    assert TOKEN not in done.stdout + done.stderr


def test_what_cannot_be_pushed_is_refused_before_anything_is_written(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.trainer import export as module

    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(module.ExportError, match="set HF_TOKEN"):
        module.check_push("team/model")
    with pytest.raises(module.ExportError, match="OWNER/NAME"):
        module.check_push("a/b/c")
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: True)
    with pytest.raises(module.ExportError, match="HF_HUB_OFFLINE is set"):
        module.check_push("team/model")
