"""Installed packages and the model's config decide whether ``--megatron-to-hf-mode bridge`` is taken."""

import json
from importlib.metadata import PackageNotFoundError, version

import pytest

from miles.base.flags import Errors
from miles.config.megatron.rules import check_overrides
from miles.config.parser import parse
from miles.config.validate import validate
from miles.models.registry import vocabulary_shape
from tests.fast.config.conftest import QWEN3

MISTRAL = QWEN3 | dict(model_type="mistral", sliding_window=None, architectures=["MistralForCausalLM"])
COMPLETE = {"megatron-bridge": "0.6.2", "megatron-core": "0.19.2", "transformer-engine-torch": "2.20.2"}


@pytest.fixture
def bridge(tmp_path, command):
    def run(config: dict, flags: str = ""):
        (tmp_path / "config.json").write_text(json.dumps(config))
        all_flags = f"--actor-num-gpus-per-node 4 --train-backend megatron --megatron-to-hf-mode bridge {flags}"
        words = command(all_flags, without="--hf-checkpoint")
        return validate(parse([*words, "--hf-checkpoint", str(tmp_path)])).settings.megatron

    return run


@pytest.fixture
def installed(tmp_path_factory, monkeypatch):
    """As installed packages look to a validator: their releases' metadata."""

    def install(releases: dict[str, str]) -> None:
        folder = tmp_path_factory.mktemp("packages")
        for package, release in releases.items():
            information = folder / f"{package.replace('-', '_')}-{release}.dist-info"
            information.mkdir()
            (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {release}\n")
        monkeypatch.syspath_prepend(str(folder))

    return install


def _is_here(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def test_models_that_were_compared_with_transformers(bridge, installed):
    installed(COMPLETE)
    nemotron = MISTRAL | {"model_type": "nemotron", "hidden_act": "relu2"}
    for config, engine in ((MISTRAL, "torch"), (nemotron, "sglang"), (MISTRAL | {"model_type": "llama"}, "torch")):
        flags = f"--tensor-model-parallel-size 2 --rollout-engine {engine}"
        assert bridge(config, flags).megatron_to_hf_mode == "bridge"


@pytest.mark.parametrize(
    ("config", "flags", "expected"),
    [
        (MISTRAL | {"model_type": "gemma"}, "", ["model_type gemma", "mistral, nemotron", "--train-backend fsdp"]),
        (MISTRAL | {"hidden_act": "gelu"}, "", ["hidden_act gelu", "only silu"]),
        (MISTRAL | {"model_type": "nemotron", "hidden_act": "silu"}, "", ["hidden_act silu", "only relu2"]),
        (MISTRAL | {"sliding_window": 16}, "", ["sliding_window 16", "full attention", "to null"]),
        ({k: v for k, v in MISTRAL.items() if k != "sliding_window"}, "", ["sliding_window 4096", "to null"]),
        (MISTRAL | {"architectures": None}, "", ["architectures None", "ForCausalLM"]),
        (MISTRAL | {"attention_bias": True}, "", ["attention_bias"]),
        (MISTRAL | {"model_type": "llama"}, "--tensor-model-parallel-size 4", ["--tensor-model-parallel-size 4"]),
        (MISTRAL, "--mtp-num-layers 1 --enable-mtp-training", ["--mtp-num-layers 1", "bridge", "drop it"]),
    ],
)
def test_refused(bridge, installed, config, flags, expected):
    installed(COMPLETE)
    with pytest.raises(ValueError) as error:
        bridge(config, flags)
    assert all(word in str(error.value) for word in expected), error.value


@pytest.mark.skipif(_is_here("megatron-bridge"), reason="Megatron-Bridge is installed here")
@pytest.mark.parametrize(
    ("releases", "expected"),
    [
        ({}, "needs megatron-bridge, which is not installed"),
        ({}, "use raw with a deepseek_v3, kimi_k2, glm4_moe, glm4_moe_lite, llama, qwen2, qwen3, qwen3_moe, or give"),
        (COMPLETE | {"megatron-bridge": "0.3.1"}, "megatron-bridge 0.3.1 is installed, and only 0.6.* was tested"),
        (COMPLETE | {"megatron-core": "0.17.1"}, "megatron-core 0.17.1 is installed, and only 0.19.* was tested"),
        ({p: r for p, r in COMPLETE.items() if p[0] == "m"}, "transformer-engine-torch, which is not installed"),
    ],
)
def test_packages(bridge, installed, releases, expected):
    installed(releases)
    with pytest.raises(ValueError, match="--megatron-to-hf-mode bridge: .*; install .*, use raw") as error:
        bridge(MISTRAL)
    assert expected in str(error.value)


def test_a_script_may_say_how_much_of_a_head_is_rotated():
    """Known when Megatron-Bridge has given the shape, so the backend checks it; the true value and no other."""
    nemotron = MISTRAL | {"model_type": "nemotron", "rope_parameters": {"partial_rotary_factor": 0.25}}
    flags = {"rotary_percent": "--rotary-percent"}
    for config, share in ((nemotron, 0.25), (MISTRAL, 1.0)):
        errors = Errors()
        check_overrides((("rotary_percent", share),), vocabulary_shape(config), flags, errors)
        assert errors.messages == []
        check_overrides((("rotary_percent", 0.5),), vocabulary_shape(config), flags, errors)
        (message,) = errors.messages
        assert message.startswith("--rotary-percent 0.5: contradicts --hf-checkpoint")
