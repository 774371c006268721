"""A model that is only on the hub is judged by its config before anything starts. The hub is a server of the test."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 128,
    "intermediate_size": 16,
}
CONFIGS = {
    "of/qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 4, **SIZES},
    "of/foo": {"model_type": "foo", "architectures": ["FooForCausalLM"], **SIZES},
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
def explained(command, tmp_path):
    """Run a command with ``--explain`` against the hub of this file, or without one."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.asked = 0

    def run(name, flags="", last="--explain", **environment):
        words = [*command(flags, without="--hf-checkpoint"), "--hf-checkpoint", name, "--actor-num-gpus-per-node", "1"]
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        program = [sys.executable, "-m", "miles", "train", *words, *last.split()]
        return subprocess.run(program, env={**os.environ, **hub, **environment}, capture_output=True, text=True)

    yield run
    server.shutdown()
    server.server_close()


def test_config_is_fetched_once_and_judged(explained):
    refused = explained("of/qwen3", "--num-layers 4")
    assert refused.returncode == 2 and "--num-layers 4: contradicts --hf-checkpoint" in refused.stderr
    assert "Traceback" not in refused.stderr and Hub.asked > 0
    Hub.asked = 0
    assert explained("of/qwen3", "--num-layers 2").returncode == 0
    assert Hub.asked == 0  # the cache has it


def test_bridge_is_judged_by_the_config(explained):
    converted = explained("of/qwen3", "--megatron-to-hf-mode bridge")
    assert converted.returncode == 0 and "miles converts this family itself" in converted.stdout
    unknown = explained("of/foo", "--megatron-to-hf-mode bridge")
    assert unknown.returncode == 2 and "its config has model_type foo" in unknown.stderr
    for family in ("deepseek_v3", "glm4_moe", "qwen3_moe", "with --megatron-to-hf-mode bridge, mistral"):
        assert family in unknown.stderr


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
    assert refused.returncode == 2 and sentence in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the Hugging Face hub cannot be reached"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids to fetch it"),
    ],
)
def test_without_the_hub_a_note_says_that_the_model_is_judged_later(explained, environment, why):
    accepted = explained("of/qwen3", "--num-layers 4", **environment)
    assert accepted.returncode == 0, accepted.stderr
    assert why in accepted.stdout and Hub.asked == 0
    refused = explained("of/qwen3", last="", **environment)
    assert refused.returncode == 2 and "--hf-checkpoint of/qwen3: " in refused.stderr and why in refused.stderr
    assert "; check the network, or give a folder" in refused.stderr


def test_wrong_flags_are_reported_without_the_hub(explained):
    refused = explained("of/qwen3", "--num-layers 4 --eps-clip -1")
    assert refused.returncode == 2 and "--eps-clip" in refused.stderr and Hub.asked == 0
