"""The command lines of tests/gpu are accepted for CUDA on a machine without a GPU, and servers get their flags."""

import pytest

from miles.config.parser import parse
from miles.config.servers.passed_on import ServerFlags
from miles.config.validate import validate
from miles.engine.servers.keys import keys_of
from miles.engine.sglang.engine import server_program
from tests.fast.run.runs.launches import small_run
from tests.gpu import server_speed
from tests.gpu.sglang_engine import BY_KIND, settings_of
from tests.gpu.test_sglang_runs_gpu import DETERMINISTIC, KILLED, LORA, flags


def server_words(settings):
    spec = server_program(settings, "cuda", 0, keys_of(ServerFlags(), external=False))
    return spec.arguments("127.0.0.1", 1)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next", "stop", "deterministic"])
def test_the_engine_of_a_family(kind, tiny_model, tmp_path):
    words = server_words(settings_of(kind, tiny_model, tmp_path, "cuda"))
    assert "--disable-radix-cache" in words and words[words.index("--max-total-tokens") + 1] == "8192"
    assert ("--max-mamba-cache-size" in words) is (kind == "qwen3_next") and kind in (*BY_KIND, "qwen3", "stop")
    assert ("--enable-deterministic-inference" in words) is (kind == "deterministic")
    assert ("--skip-tokenizer-init" in words) is (kind != "stop")
    assert "--enable-memory-saver" not in words


def test_runs_with_one_gpu(tiny_model, tmp_path):
    usual = [str(word) for word in small_run(tmp_path, tiny_model) if word != "--fp32"]
    (tmp_path / "prompts.jsonl").write_text('{"input": "1 + 1 =", "label": "2"}\n')
    settings = [validate(parse([*usual, *flags(more)])).settings for more in (DETERMINISTIC, LORA, KILLED)]
    assert [s.cluster.device for s in settings] == ["cuda"] * 3
    assert [s.sglang.use_fault_tolerance for s in settings] == [False, False, True]
    assert "--enable-deterministic-inference" in server_words(settings[0])
    assert settings[1].lora.trains_adapter and settings[1].training.bf16


@pytest.mark.parametrize("has_saver", [True, False])
def test_servers_whose_speed_is_measured(tiny_model, tmp_path, monkeypatch, has_saver):
    monkeypatch.setattr(server_speed, "find_spec", lambda name: has_saver or None)
    graphs, eager = (
        server_words(server_speed.settings_of(tiny_model, tmp_path, "cuda", more))
        for more in ("", server_speed.WITHOUT_GRAPHS)
    )
    assert eager[eager.index("--cuda-graph-backend-decode") + 1] == "disabled"
    assert (
        "--cuda-graph-backend-decode" not in graphs and graphs[graphs.index("--cuda-graph-max-bs-decode") + 1] == "64"
    )
    assert ("--enable-memory-saver" in graphs) is has_saver
