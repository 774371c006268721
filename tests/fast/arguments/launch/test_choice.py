"""Which backend and which engine a command gets that names none."""

import pytest

from miles.arguments import parser
from miles.arguments.explain import explain
from miles.arguments.launch.choice import choose_backend, choose_engine
from miles.host.machine import has_bf16


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(parser, "has_gpu", lambda: False)


@pytest.mark.parametrize(
    ("flags", "backend", "engine"),
    [
        ("", "fsdp", "torch"),
        ("--device cpu", "fsdp", "torch"),
        ("--device cuda", "fsdp", "sglang"),
        ("--tensor-model-parallel-size 2", "megatron", "torch"),
        ("--tensor-model-parallel-size=2", "megatron", "torch"),
        ("--num-layers 4", "megatron", "torch"),
        ("--attention-backend flash", "megatron", "torch"),
        ("--no-bias-swiglu-fusion", "megatron", "torch"),
        ("--sglang-mem-fraction-static 0.7", "fsdp", "sglang"),
        ("--sglang-server-concurrency 7", "fsdp", "sglang"),
        ("--num-layers 4 --sglang-dtype float32", "megatron", "sglang"),
        ("--train-backend fsdp --num-layers 4", "fsdp", "torch"),
        ("--rollout-engine torch --sglang-dtype float32 --device cuda", "fsdp", "torch"),
        ("--train-backend megatron --rollout-engine sglang", "megatron", "sglang"),
        # shared flags choose nothing
        ("--context-parallel-size 2 --seed 3 --bf16 --micro-batch-size 2", "fsdp", "torch"),
    ],
)
def test_choice(accepted, flags, backend, engine):
    settings = accepted(flags).settings
    assert (settings.training.train_backend, settings.rollout.rollout_engine) == (backend, engine)


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
    monkeypatch.setattr(parser, "num_cores", lambda: cores)
    validated = parser.judge(parser.read_command(command(flags)))
    assert validated.settings.cluster.world_size == ranks
    assert ("per node" in validated.choice) == ("--actor" not in flags)


@pytest.mark.parametrize(("flags", "bf16"), [("", True), ("--bf16", True), ("--fp32", False)])
def test_precision(accepted, flags, bf16):
    validated = accepted(flags)
    assert validated.settings.training.bf16 is bf16
    assert ("bf16 compute; fp32 master weights" in explain(validated)) == bf16


def test_one_precision(refusals):
    assert refusals("--bf16 --fp32") == ("--fp32: contradicts --bf16; keep one of the two",)


@pytest.mark.parametrize(("flags", "noted"), [("", True), ("--device cuda", False), ("--fp32", False)])
def test_emulated_bf16_is_noted(accepted, monkeypatch, flags, noted):
    monkeypatch.setattr(parser, "has_bf16", lambda: False)
    assert any("no bf16 arithmetic" in note for note in accepted(flags).notes) == noted


OPTIMIZER = "--weight-decay 0.1 --adam-beta2 0.98 --lr-decay-style constant"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--train-backend fsdp", "--weight-decay 0.01, --adam-beta2 0.999, --lr-decay-style linear: the defaults"),
        ("--train-backend fsdp --weight-decay 0.1 --adam-beta2 0.9", "--lr-decay-style linear: the defaults"),
        ("--num-layers 4 --device cuda --colocate", "the trainer stays on its GPUs while engines generate"),
    ],
)
def test_other_defaults_are_noted(accepted, flags, said):
    assert any(note.startswith(said) or said in note for note in accepted(flags).notes)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        f"--train-backend fsdp {OPTIMIZER}",
        "--train-backend megatron --device cuda",
        "--num-layers 4 --device cuda --colocate --no-offload-train",
        "--num-layers 4 --device cpu --colocate",
    ],
)
def test_and_only_where_they_matter(accepted, flags):
    notes = accepted(f"--fp32 {flags}").notes
    assert not any("the defaults" in note or "stays on its GPUs" in note for note in notes)


def test_features_of_the_cpu(tmp_path):
    for features, found in (("fma avx512_bf16", True), ("fp asimd bf16", True), ("fma avx512f", False)):
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: {features} sse\n")
        assert has_bf16(str(tmp_path / "cpuinfo")) is found
    assert not has_bf16(str(tmp_path / "nothing"))


def test_the_flag_itself_is_the_reason_if_it_is_given():
    assert choose_backend("fsdp", ["--num-layers"]).why == "--train-backend"
    assert choose_engine("torch", ["--sglang-dtype"], "cuda", True).value == "torch"
