"""``miles export --push-to-hub``: against a server on this machine that answers as the hub does."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

from miles.commands import export
from miles.observe.run_files import RunFiles, RunHeader


class Hub(BaseHTTPRequestHandler):
    """Knows one user, ``me``, and stores what a commit has."""

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        state, token = self.server.state, self.headers.get("Authorization", "")
        state.asked.append(self.path)
        if token not in ("Bearer writes", "Bearer reads"):
            return self.answer(401, {"error": "Invalid username or password."})
        if self.path == "/api/whoami-v2":
            return self.answer(200, {"name": "me"})
        if token == "Bearer reads":
            return self.answer(403, {"error": "this token has no right to write"})
        if self.path == "/api/repos/create":
            state.created = json.loads(body)
            return self.answer(200, {"url": f"http://{self.headers['Host']}/me/mine"})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            return self.answer(
                200, {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in files]}
            )
        if "/commit/" in self.path:
            rows = [json.loads(line) for line in body.splitlines()]
            state.files |= {
                row["value"]["path"]: base64.b64decode(row["value"]["content"]) for row in rows if row["key"] == "file"
            }
            url = f"http://{self.headers['Host']}/me/mine/commit/0"
            return self.answer(200, {"commitUrl": url, "commitOid": "0" * 40, "success": True})
        if self.path.endswith("/auth-check/write"):
            return self.answer(200, {})
        return self.answer(404, {"error": "no such address"})

    def answer(self, status: int, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.state = SimpleNamespace(asked=[], created={}, files={})
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    server.state.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", server.state.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    yield server.state
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_export_is_pushed_with_a_card(run, hub, tiny_model, tmp_path, monkeypatch, capsys):
    header = RunHeader.load(run.folder)
    data = [{"source": "hf:some/set:train"}, {"source": "rows.jsonl", "bytes": 7, "sha256": "abc"}]
    header.settings["tracking"]["wandb_key"] = "sesame"
    RunHeader("miles", header.settings, "Each step learns.", "", 2, header.defaults, {"data": data}, header.run).save(
        run.folder
    )
    for step in range(1, 3):
        RunFiles(run.folder).append_metrics(step, {"rollout/reward": step / 4, "eval/own/reward": 0.125, "train/x": 9})
    monkeypatch.setenv("HF_TOKEN", "writes")
    export.main([str(run.folder), str(tmp_path / "out"), "--push-to-hub", "mine", "--private"])
    assert capsys.readouterr().out.splitlines()[-1] == f"{hub.url}/me/mine"
    assert hub.created["name"] == "mine" and "private" in (*hub.created, *hub.created.values())
    assert hub.asked.index("/api/repos/create") < next(i for i, path in enumerate(hub.asked) if "/commit/" in path)
    (tmp_path / "pulled").mkdir()
    for name, content in hub.files.items():
        (tmp_path / "pulled" / name).write_bytes(content)
    AutoModelForCausalLM.from_pretrained(tmp_path / "pulled")
    card = hub.files["README.md"].decode()
    assert card.startswith(
        "---\nlibrary_name: transformers\ndatasets: [some/set]\ntags: [miles, reinforcement-learning]\n---"
    )
    assert "after 1 of 2 optimizer steps" in card and "Each step learns." in card
    assert "| step | rollout/reward | eval/own/reward |\n|---|---|---|\n| 1 | 0.250 | 0.125 |\n\n" in card
    assert "- `hf:some/set:train`\n- `rows.jsonl` (7 bytes, SHA-256 `abc`)" in card
    assert (
        "miles train \\\n    --" in card and f"--hf-checkpoint {tiny_model} \\\n" in card and "--rm-type length" in card
    )
    assert "sesame" not in card and "--rollout-seed" not in card, "no secrets and no defaults"


@pytest.mark.parametrize(
    ("token", "told"),
    [
        (None, "Token is required"),
        ("wrong", "Invalid user token"),
        ("reads", "no right to write"),
        ("writes", "[Errno 111]"),
    ],
)
def test_a_token_that_may_not_write_is_told_before_the_export(token, told, run, hub, tmp_path, monkeypatch, capsys):
    if token == "writes":
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    if token is None:
        monkeypatch.delenv("HF_TOKEN", raising=False)
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(SystemExit) as ended:
        export.main([str(run.folder), str(tmp_path / "out"), "--push-to-hub", "mine"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "--push-to-hub mine: the hub refuses it, or cannot be reached (" in error
    assert told in error and "HF_TOKEN, or hf auth login" in error
    assert not (tmp_path / "out").exists() and not hub.files
