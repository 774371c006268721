"""Which backend and which engine a command gets that names none."""

import json
from socket import socket

import pytest

from miles.base.flags import FlagError
from miles.base.host import has_bf16
from miles.compat import border
from miles.config import parser
from miles.config.choice import ChosenValue, JoinedCluster, choose_backend, choose_device, choose_engine, joined_cluster
from miles.config.explain import explain
from tests.fast.config.conftest import minimal
from tests.fast.support.rows import rows


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(parser, "has_gpu", lambda: False)


@pytest.mark.parametrize(("flags", "backend", "engine"), rows(__file__, "test_choice"))
def test_choice(accepted, flags, backend, engine):
    settings = accepted(flags).settings
    assert (settings.training.train_backend, settings.rollout.rollout_engine) == (backend, engine)


HYBRID = dict(model_type="qwen3_next", num_hidden_layers=4, hidden_size=32, layer_types=["linear_attention"] * 4)


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        (HYBRID, "fsdp"),
        ({"model_type": "qwen3_5_moe", "text_config": HYBRID | {"model_type": "qwen3_5_moe_text"}}, "fsdp"),
        (dict(model_type="glm4", num_hidden_layers=4, hidden_size=32), "fsdp"),
        (dict(model_type="not_compared", num_hidden_layers=4), "megatron"),
        (dict(model_type="glm4", num_hidden_layers=4, layer_types=["sliding_attention"], sliding_window=8), "megatron"),
        (dict(model_type="qwen3", num_hidden_layers=4), "megatron"),
    ],
)
def test_a_model_that_only_fsdp_trains_chooses_it(command, tmp_path, config, backend):
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = border.read_command(command(f"--hf-checkpoint {tmp_path} --num-layers 4", without="--hf-checkpoint"))
    assert read.settings.training.train_backend == backend
    assert ("has --num-layers, but the Megatron backend has no layers for" in read.choice) == (backend == "fsdp")
    flags = f"--hf-checkpoint {tmp_path} --num-layers 4 --train-backend megatron"
    read = border.read_command(command(flags, without="--hf-checkpoint"))
    assert read.settings.training.train_backend == "megatron"


# Of scripts for Qwen3-Next and Nemotron-H: what Megatron would need to know of their layers.
LAYERS = (
    "--use-gated-attention --attention-output-gate --linear-attention-freq 4 --linear-num-key-heads 16 "
    "--squared-relu --hybrid-override-pattern MEM* --mamba-num-heads 8 --spec some_models.hybrid get_spec"
)


def test_flags_of_its_layers_are_noted(accepted, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    result = accepted(f"--hf-checkpoint {tmp_path} --num-layers 4 --hidden-size 32 {LAYERS}", without="--hf-checkpoint")
    noted = {note.written.split()[0] for note in result.accepted}
    assert noted >= {flag for flag in LAYERS.split() if flag.startswith("--")}
    assert not result.settings.parallel.pads


def test_the_block_of_another_model_is_refused(refusals, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    messages = refusals(f"--hf-checkpoint {tmp_path} --num-layers 48 --hidden-size 32", without="--hf-checkpoint")
    assert messages == (
        "--num-layers 48: contradicts --hf-checkpoint, whose config.json gives --num-layers 4; drop it",
    )


def test_megatron_refuses_these_layers(refusals):
    messages = refusals(f"--train-backend megatron {LAYERS}")
    named = {message.split()[0].rstrip(":") for message in messages}
    assert named >= {"--use-gated-attention", "--squared-relu", "--hybrid-override-pattern"}


def test_a_gpu_of_this_host_chooses_sglang(accepted, monkeypatch):
    monkeypatch.setattr(parser, "has_gpu", lambda: True)
    assert accepted().settings.rollout.rollout_engine == "sglang"
    assert accepted("--device cpu").settings.rollout.rollout_engine == "torch"


def test_explain_says_what_was_chosen_and_why(accepted):
    text = " ".join(explain(accepted("--num-layers 4 --device cuda")).split())
    assert "backend megatron (the command has --num-layers), engine sglang (--device cuda)" in text


@pytest.mark.parametrize(
    ("flags", "gpu", "cores", "ranks"),
    [
        ("", False, 16, 8),
        ("", False, 1, 1),
        ("", True, 64, 8),
        ("--device cpu", True, 6, 3),
        ("--device cuda", False, 2, 8),
        ("--actor-num-gpus-per-node 4", True, 64, 4),
    ],
)
def test_number_of_ranks(command, monkeypatch, flags, gpu, cores, ranks):
    monkeypatch.setattr(parser, "has_gpu", lambda: gpu)
    monkeypatch.setattr(parser, "busy_cores", lambda: cores)
    validated = parser.judge(border.read_command(command(flags)))
    assert validated.settings.cluster.world_size == ranks
    assert ("per node" in validated.choice) == ("--actor" not in flags)


@pytest.mark.parametrize(
    ("has_bf16", "flags", "bf16"),
    [
        (True, "", True),
        (True, "--fp32", False),
        (False, "", False),
        (False, "--bf16", True),
        (False, "--device cuda", True),
        (False, "--rehearse", True),
    ],
)
def test_precision(accepted, monkeypatch, has_bf16, flags, bf16):
    monkeypatch.setattr(parser, "has_bf16", lambda: has_bf16)
    validated = accepted(flags)
    assert validated.settings.training.bf16 is bf16
    assert ("bf16 compute; fp32 master weights" in explain(validated)) == bf16


def test_one_precision(refusals):
    assert refusals("--bf16 --fp32") == ("--fp32: contradicts --bf16; keep one of the two",)


@pytest.mark.parametrize(("flags", "noted"), [("", False), ("--bf16", True), ("--bf16 --device cuda", False)])
def test_emulated_bf16_is_noted(accepted, monkeypatch, flags, noted):
    monkeypatch.setattr(parser, "has_bf16", lambda: False)
    assert any("emulates bf16 arithmetic" in note for note in accepted(flags).notes) == noted


OPTIMIZER = "--weight-decay 0.1 --adam-beta2 0.98 --lr-decay-style constant"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--train-backend fsdp", "--weight-decay 0.01, --adam-beta2 0.999, --lr-decay-style linear: the defaults"),
        ("--train-backend fsdp --weight-decay 0.1 --adam-beta2 0.9", "--lr-decay-style linear: the defaults"),
    ],
)
def test_other_defaults_are_noted(accepted, flags, said):
    assert any(note.startswith(said) or said in note for note in accepted(flags).notes)


@pytest.mark.parametrize("flags", ["", f"--train-backend fsdp {OPTIMIZER}", "--train-backend megatron --device cuda"])
def test_and_only_where_they_matter(accepted, flags):
    notes = accepted(f"--fp32 {flags}").notes
    assert not any("the defaults" in note for note in notes)


def test_features_of_the_cpu(tmp_path):
    for features, is_supported in (("fma avx512_bf16", True), ("fp asimd bf16", True), ("fma avx512f", False)):
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: {features} sse\n")
        assert has_bf16(str(tmp_path / "cpuinfo")) is is_supported
    assert not has_bf16(str(tmp_path / "nothing"))


def test_the_flag_itself_is_the_reason_if_it_is_given():
    assert choose_backend("fsdp", ["--num-layers"]).why == "--train-backend"
    assert choose_engine("torch", ["--sglang-dtype"], ChosenValue("cuda", "--device cuda")).value == "torch"


HEAD = "10.0.0.1:6379"


@pytest.mark.parametrize(
    ("choice", "has_gpu", "gpus", "device", "why"),
    [
        ("auto", False, 2, "cuda", f"the Ray cluster at {HEAD} has 2 GPUs"),
        ("auto", False, 1, "cuda", f"the Ray cluster at {HEAD} has 1 GPU"),
        ("auto", False, 0, "cpu", f"this host has no GPU; the Ray cluster at {HEAD} has no GPU"),
        ("auto", True, 0, "cuda", "this host has a GPU"),
        ("cpu", True, 2, "cpu", "--device cpu"),
        ("cuda", False, 0, "cuda", "--device cuda"),
    ],
)
def test_a_flag_decides_then_this_host_then_the_cluster(choice, has_gpu, gpus, device, why):
    assert choose_device(choice, has_gpu, JoinedCluster(HEAD, gpus)) == ChosenValue(device, why)


@pytest.fixture
def cluster(monkeypatch):
    """Answer for the cluster at ``HEAD``, and list its calls."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    asked = []

    def has(gpus, fault=""):
        monkeypatch.setattr(parser, "joined_cluster", lambda address: asked.append(address) or answer)
        answer = JoinedCluster(HEAD, gpus, fault)
        return asked

    return has


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_gpus_of_the_cluster_choose_sglang_and_cuda(accepted, cluster, monkeypatch, way):
    asked = cluster(2)
    if way == "variable":
        monkeypatch.setenv("RAY_ADDRESS", HEAD)
    validated = accepted(f"--ray-address {HEAD}" if way == "flag" else "")
    settings = validated.settings
    assert (settings.rollout.rollout_engine, settings.cluster.device) == ("sglang", "cuda")
    assert settings.cluster.ray_address == HEAD and asked == [HEAD]
    assert f"engine sglang (the Ray cluster at {HEAD} has 2 GPUs)" in validated.choice
    named = accepted(f"--ray-address {HEAD} --rollout-engine torch").choice
    assert f"engine torch (--rollout-engine), device cuda (the Ray cluster at {HEAD} has 2 GPUs)" in named


def test_a_cluster_without_gpus_chooses_the_cpu(accepted, cluster):
    cluster(0)
    validated = accepted(f"--ray-address {HEAD}")
    assert (validated.settings.rollout.rollout_engine, validated.settings.cluster.device) == ("torch", "auto")
    assert f"the Ray cluster at {HEAD} has no GPU)" in validated.choice
    assert not any("--ray-address" in note for note in validated.notes)


def test_gpus_that_are_not_known_are_noted(accepted, cluster):
    cluster(None, "Connection refused")
    validated = accepted(f"--ray-address {HEAD}")
    assert validated.settings.rollout.rollout_engine == "torch"
    (note,) = [note for note in validated.notes if "--ray-address" in note]
    assert note == (
        f"--ray-address {HEAD}: the GPUs of the cluster are not known (Connection refused), so the run is planned for "
        "CPU; give --device cuda if the cluster has GPUs, else --device cpu"
    )
    assert "are not known (Connection refused)" in validated.choice
    with pytest.raises(FlagError) as told:
        parser.judge(border.read_command(minimal(f"--ray-address {HEAD}")), starts=True)
    assert any(message.startswith(f"--ray-address {HEAD}: no Ray cluster answers") for message in told.value.messages)


@pytest.mark.parametrize("flags", ["--device cpu", "--device cuda", "--device cpu --ray-address auto"])
def test_a_cluster_is_not_asked_if_a_flag_decides(accepted, cluster, monkeypatch, flags):
    asked = cluster(2)
    monkeypatch.setenv("RAY_ADDRESS", HEAD)
    accepted(flags)
    assert not asked


def test_nor_if_this_host_has_a_gpu(accepted, cluster, monkeypatch):
    asked = cluster(0)
    monkeypatch.setattr(parser, "has_gpu", lambda: True)
    assert accepted(f"--ray-address {HEAD}").settings.rollout.rollout_engine == "sglang"
    assert not asked


@pytest.mark.parametrize("address", ["http://10.0.0.1:8265", "ray://10.0.0.1:10001", "10.0.0.1", "local"])
def test_nor_if_a_run_cannot_join_it(refusals, cluster, address):
    asked = cluster(2)
    (message,) = refusals(f"--ray-address {address}")
    assert message.startswith(f"--ray-address {address}: ") and not asked


def test_ray_is_not_imported_if_nothing_listens(monkeypatch, tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ray_cluster = joined_cluster(f"127.0.0.1:{closed.getsockname()[1]}")
    assert (ray_cluster.gpus, ray_cluster.fault) == (None, "Connection refused")
