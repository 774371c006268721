"""When ``--megatron-to-hf-mode bridge`` is taken: by what is installed, and by the model's config."""

import json
from importlib.metadata import PackageNotFoundError, version

import pytest

from miles.arguments.parser import parse
from miles.arguments.validate import validate

MISTRAL = dict(
    model_type="mistral",
    num_hidden_layers=4,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    max_position_embeddings=128,
    sliding_window=None,
)


@pytest.fixture
def bridge(tmp_path, command):
    def run(config: dict, flags: str = ""):
        (tmp_path / "config.json").write_text(json.dumps(config))
        given = f"--actor-num-gpus-per-node 4 --train-backend megatron --megatron-to-hf-mode bridge {flags}"
        words = command(given, without="--hf-checkpoint")
        return validate(parse([*words, "--hf-checkpoint", str(tmp_path)])).settings.megatron

    return run


@pytest.fixture
def installed(tmp_path_factory, monkeypatch):
    """As installed packages look to a validator: a release's metadata, and a module that is there to be imported."""

    def install(release: str | None, engine: bool = True) -> None:
        folder = tmp_path_factory.mktemp("packages")
        if release is not None:
            information = folder / f"megatron_bridge-{release}.dist-info"
            information.mkdir()
            (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megatron-bridge\nVersion: {release}\n")
        if engine:
            (folder / "transformer_engine.py").write_text("raise AssertionError('imported')")
        monkeypatch.syspath_prepend(str(folder))

    return install


def _is_here(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def test_models_that_were_compared_with_transformers(bridge, installed):
    installed("0.6.2")
    for config in (
        MISTRAL,
        MISTRAL | {"model_type": "nemotron", "hidden_act": "relu2"},
        MISTRAL | {"model_type": "llama"},
    ):
        assert bridge(config, "--tensor-model-parallel-size 2").megatron_to_hf_mode == "bridge"


@pytest.mark.parametrize(
    ("config", "flags", "told"),
    [
        (MISTRAL | {"model_type": "gemma"}, "", ["model_type gemma", "mistral, nemotron", "--train-backend fsdp"]),
        (MISTRAL | {"hidden_act": "gelu"}, "", ["hidden_act gelu", "only silu"]),
        (MISTRAL | {"model_type": "nemotron", "hidden_act": "silu"}, "", ["hidden_act silu", "only relu2"]),
        (MISTRAL | {"sliding_window": 16}, "", ["sliding_window 16", "full attention"]),
        (MISTRAL | {"attention_bias": True}, "", ["attention_bias"]),
        (MISTRAL | {"model_type": "llama"}, "--tensor-model-parallel-size 4", ["--tensor-model-parallel-size 4"]),
        (MISTRAL, "--mtp-num-layers 1 --enable-mtp-training", ["--mtp-num-layers 1", "bridge", "use raw"]),
    ],
)
def test_refused(bridge, installed, config, flags, told):
    installed("0.6.2")
    with pytest.raises(ValueError) as error:
        bridge(config, flags)
    assert all(word in str(error.value) for word in told), error.value


@pytest.mark.skipif(_is_here("megatron-bridge"), reason="Megatron-Bridge is installed here")
@pytest.mark.parametrize(
    ("release", "engine", "told"),
    [
        (None, True, "needs the package megatron-bridge, which is not installed"),
        ("0.3.1", True, "megatron-bridge 0.3.1 is installed, and only 0.6.* was tried"),
        ("0.6.2", False, "Transformer Engine, which is not installed"),
    ],
)
def test_packages(bridge, installed, release, engine, told):
    installed(release, engine)
    with pytest.raises(ValueError, match="--megatron-to-hf-mode bridge: .*; install .*, or use raw") as error:
        bridge(MISTRAL)
    assert told in str(error.value)
