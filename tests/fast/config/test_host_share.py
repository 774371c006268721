"""A run on CPU takes its share of a host: threads, sequences at once and memory, on hosts of several sizes."""

import json

import pytest
import torch

from miles.base import host as machine
from miles.compat import border
from miles.config import host_share, parser
from miles.config.explain import explain
from miles.config.host_share import host_line
from miles.config.run_file import run_config
from miles.run import launcher
from miles.run.cpu_tuning import use_threads
from tests.fast.support.rows import rows

GIB = 2**30
# Sizes of Qwen3-0.6B: 2 (keys, values) x 28 layers x 8 heads x 128 x 2 bytes = 112 KiB for a token in bf16.
CONFIG = dict(
    model_type="qwen3",
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
)
TOKEN = 112 * 1024
LENGTHS = "--rollout-max-prompt-len 512 --rollout-max-response-len 512"  # 1024 tokens: 112 MiB for a sequence
SERVERS = "--rollout-engine sglang --rollout-num-gpus 2"


@pytest.fixture
def host(monkeypatch):
    def stand_in(gib=24, cores=2, gpu=False, bf16=True):
        monkeypatch.setattr(host_share, "memory_bytes", lambda: int(gib * GIB))
        for module in (host_share, parser):
            monkeypatch.setattr(module, "busy_cores", lambda: cores)
            monkeypatch.setattr(module, "has_gpu", lambda: gpu)
            monkeypatch.setattr(module, "has_bf16", lambda: bf16)

    return stand_in


@pytest.fixture
def model(tmp_path):
    def write(**other):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | other))
        return f"--hf-checkpoint {tmp_path}"

    return write


@pytest.fixture
def judged(command, model):
    """The settings of a command for a model whose configuration is at hand."""

    def read(flags="", **config):
        words = command(f"{model(**config)} {LENGTHS} {flags}", without="--hf-checkpoint --rollout-max-response-len")
        return parser.judge(border.read_command(words))

    return read


@pytest.mark.parametrize(("gib", "flags", "sequences"), rows(__file__, "test_the_batch_follows_the_memory"))
def test_the_batch_follows_the_memory(host, judged, gib, flags, sequences):
    host(gib)
    settings = judged(flags).settings
    assert settings.rollout.torch_engine_max_batch_size == sequences
    taken = sequences * host_share.longest_sequence(settings) * TOKEN * (1 if settings.training.bf16 else 2)
    assert taken <= gib * GIB / 4 or sequences == 1


def test_a_given_batch_stays(host, judged):
    host(1)
    settings = judged("--torch-engine-max-batch-size 300").settings
    assert settings.rollout.torch_engine_max_batch_size == 300
    assert "300 sequences at once, up to 33 of 1.0 GiB (3281.2%)" in host_line(settings)


def test_the_model_bounds_the_length(host, judged):
    host(24)
    assert (
        judged(
            "--rollout-max-response-len 100", max_position_embeddings=128
        ).settings.rollout.torch_engine_max_batch_size
        == 256
    )


@pytest.mark.parametrize(
    ("gib", "flags", "tokens"),
    [
        (64, "", 32768),
        (24, "", 27648),  # a quarter for two servers: 28,086 tokens of each
        (4, "", 4096),
        (0.1, "", 1024),  # a whole sequence, or no request would ever be answered
        (2000, "--rollout-batch-size 64", 131072),  # 128 requests of 1,024 tokens
        (2000, "--rollout-batch-size 64 --sglang-server-concurrency 100", 102400),
        (24, "--sglang-max-total-tokens 7000", 7000),
    ],
)
def test_the_cache_of_servers_follows_the_memory(host, judged, gib, flags, tokens):
    host(gib)
    settings = judged(f"{SERVERS} {flags}").settings
    assert settings.server_flags.server == ("--max-total-tokens", str(tokens))
    assert f"{tokens} tokens in the cache of each" in host_line(settings)


@pytest.mark.parametrize("flags", ["--device cuda", "--device cuda --rollout-engine torch"])
def test_nothing_is_chosen_on_cuda(host, judged, flags):
    host(1)
    settings = judged(flags).settings
    assert settings.rollout.torch_engine_max_batch_size == 256 and not settings.server_flags.server
    assert host_line(settings).startswith("CUDA; 8 trainer ranks; ")


def test_a_gpu_is_cuda(host, judged):
    host(gib=1, gpu=True)
    assert host_line(judged().settings) == "CUDA; 8 trainer ranks; batch and memory share as SGLang chooses them"
    assert host_line(judged("--sglang-mem-fraction-static 0.7").settings).endswith("memory share 0.7 of SGLang")


@pytest.mark.parametrize("missing", ["num_hidden_layers", "num_attention_heads num_key_value_heads"])
def test_a_model_of_unknown_size_gets_the_usual_values(host, command, judged, missing):
    host(1)
    config = dict.fromkeys(missing.split())
    settings = judged("", **config).settings
    assert settings.rollout.torch_engine_max_batch_size == 256
    assert judged(SERVERS, **config).settings.server_flags.server == ("--max-total-tokens", "32768")
    assert "a part of 1.0 GiB that is not known" in host_line(settings)
    elsewhere = parser.judge(border.read_command(command())).settings
    assert elsewhere.rollout.torch_engine_max_batch_size == 256
    assert "a part of 1.0 GiB that is not known" in host_line(elsewhere)


@pytest.mark.parametrize(
    ("cores", "flags", "said"),
    [
        (16, "", "16 cores, 8 trainer ranks of 2 threads, the torch engine of 1 thread"),
        (16, "--colocate", "8 trainer ranks of 2 threads, the torch engine of 16 threads"),
        (16, "--actor-num-gpus-per-node 3 --async-steps 1", "3 trainer ranks of 4 threads, the torch engine of 4 thr"),
        (1, "", "CPU with 1 core, 1 trainer rank of 1 thread, the torch engine of 1 thread"),
        (4, SERVERS, "2 trainer ranks of 2 threads, 2 servers of sglang of 1 thread"),
        (4, "--debug-rollout-only", "CPU with 4 cores, the torch engine of 1 thread"),
    ],
)
def test_threads_are_those_of_the_processes(host, judged, cores, flags, said):
    host(cores=cores)
    settings = judged(flags).settings
    assert said in host_line(settings)
    before = torch.get_num_threads()
    try:
        use_threads("cpu", host_share.sharers_of_trainer(settings))
        threads = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert f"rank of {threads} thread" in said or f"ranks of {threads} thread" in said or not settings.trains


@pytest.mark.parametrize(("quota", "cores"), [(None, 6), (2.5, 2), (0.4, 1), (64.0, 6)])
def test_a_quota_counts(monkeypatch, quota, cores):
    monkeypatch.setattr(machine, "num_cores", lambda: 6)
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    assert machine.busy_cores() == cores


@pytest.mark.parametrize("flags", ["", SERVERS])
def test_explain_says_what_the_run_says(host, judged, tmp_path, capsys, flags):
    host(4, cores=6)
    result = judged(f"{flags} --output-dir {tmp_path / 'run'}")
    launcher._print_notes([], result)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("CPU with 6 cores")]
    assert line in " ".join(explain(result).split())
    assert "of 4.0 GiB (" in line


@pytest.mark.parametrize("flags", ["", SERVERS, "--fp32"])
def test_a_repeated_run_has_the_same_values_on_another_host(host, judged, tmp_path, flags):
    host(4, cores=6)
    first = judged(flags).settings
    (tmp_path / "run.yaml").write_text(run_config(first))
    host(1000, cores=64)
    again = parser.judge(border.read_command(["--config", str(tmp_path / "run.yaml")])).settings
    assert again == first
    assert again != judged(flags).settings, "a new run takes more of the larger host"


def test_the_line_names_the_precision_of_a_cpu_without_bf16(host, judged):
    host(bf16=False)
    assert "2 cores without bf16 arithmetic, so in fp32, " in host_share.host_line(judged().settings)
