"""A model that is only on the hub is judged by its config before anything starts. The hub is a server of the test."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from miles.commands import train
from miles.compat.border import parse_or_exit
from tests.fast.config.conftest import QWEN3

CONFIGS = {
    "of/qwen3": QWEN3 | {"architectures": ["Qwen3ForCausalLM"]},
    "of/foo": QWEN3 | {"model_type": "foo", "architectures": ["FooForCausalLM"]},
    "of/broken": "no config",
    "of/empty": None,
}
COMMIT = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """Answers huggingface_hub's questions: whether there is such a model, and the text of its config.json."""

    asked = 0

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        Hub.asked += 1
        name = "/".join(self.path.removeprefix("/api/models").strip("/").split("/")[:2])
        config = CONFIGS.get(name)
        if name not in CONFIGS:
            self.send({"error": "no such model"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif self.path.startswith("/api/models"):
            self.send({"id": name, "sha": COMMIT, "modelId": name})
        elif config is None:
            self.send({}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            self.send(config, 200, {"ETag": f'"{hash(name)}"', "X-Repo-Commit": COMMIT})

    def send(self, value, status=200, headers=()):
        body = json.dumps(value).encode()
        self.send_response(status)
        for key, text in {**dict(headers), "Content-Length": len(body), "Content-Type": "application/json"}.items():
            self.send_header(key, str(text))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *words):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Have huggingface_hub ask the hub of this file, with an empty cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.asked = 0
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield
    server.shutdown()
    server.server_close()


@pytest.fixture
def explained(hub, command, capsys):
    """Return the end of ``miles train --explain``, or of the check of a command that starts."""

    def run(name, flags="", starts=False):
        words = [*command(flags, without="--hf-checkpoint"), "--hf-checkpoint", name, "--actor-num-gpus-per-node", "1"]
        status = 0
        try:
            if starts:
                parse_or_exit(words, starts=True)
            else:
                train.main([*words, "--explain"])
        except SystemExit as end:
            status = end.code
        return SimpleNamespace(returncode=status, **capsys.readouterr()._asdict())

    return run


def test_config_is_fetched_once_and_judged(explained):
    refused = explained("of/qwen3", "--num-layers 5")
    assert refused.returncode == 2 and "--num-layers 5: contradicts --hf-checkpoint" in refused.err
    assert Hub.asked > 0
    Hub.asked = 0
    assert explained("of/qwen3", "--num-layers 4").returncode == 0
    assert Hub.asked == 0  # the cache has it


def test_bridge_is_judged_by_the_config(explained):
    converted = explained("of/qwen3", "--megatron-to-hf-mode bridge")
    assert converted.returncode == 0 and "miles converts this family itself" in converted.out
    unknown = explained("of/foo", "--megatron-to-hf-mode bridge")
    assert unknown.returncode == 2 and "its config has model_type foo" in unknown.err
    for family in ("deepseek_v3", "glm4_moe", "qwen3_moe", "with --megatron-to-hf-mode bridge, mistral"):
        assert family in unknown.err


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("of/none", "--hf-checkpoint of/none: the Hugging Face hub has no such model, or does not show it to you; "),
        ("of/empty", "--hf-checkpoint of/empty: on the Hugging Face hub it has no config.json; give a model in"),
        ("of/broken", "--hf-checkpoint of/broken: its config.json is broken: it is not a JSON object"),
    ],
)
def test_model_that_cannot_be_had_is_refused(explained, name, sentence):
    refused = explained(name)
    assert refused.returncode == 2 and sentence in refused.err


@pytest.mark.parametrize(
    ("constant", "value", "why"),
    [
        ("ENDPOINT", "http://127.0.0.1:9", "the Hugging Face hub cannot be reached"),
        ("HF_HUB_OFFLINE", True, "HF_HUB_OFFLINE forbids to fetch it"),
    ],
)
def test_without_the_hub_a_note_says_that_the_model_is_judged_later(explained, monkeypatch, constant, value, why):
    monkeypatch.setattr(constants, constant, value)
    accepted = explained("of/qwen3", "--num-layers 5")
    assert accepted.returncode == 0, accepted.err
    assert why in accepted.out and Hub.asked == 0
    refused = explained("of/qwen3", starts=True)
    assert refused.returncode == 2 and "--hf-checkpoint of/qwen3: " in refused.err and why in refused.err
    assert "; check the network, or give a folder" in refused.err


def test_wrong_flags_are_reported_without_the_hub(explained):
    refused = explained("of/qwen3", "--num-layers 5 --eps-clip -1")
    assert refused.returncode == 2 and "--eps-clip" in refused.err and Hub.asked == 0
