"""Whole command lines: what would stop the run later is refused before torch or Ray start, with what to do about it."""

import json

import pytest

from miles.config.explain import explain
from tests.fast.config.conftest import QWEN3

DENSE = QWEN3 | {"rms_norm_eps": 1e-6}
EXPERTS = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [],
}
CONFIGS = {
    "dense": DENSE,
    "experts": EXPERTS,
    "bert": {"model_type": "bert", "vocab_size": 64},
    "clip": {"model_type": "clip", "vocab_size": 64},
    "qwen33": {"model_type": "qwen33", "vocab_size": 64},
    "own": {"model_type": "mimo", "auto_map": {"AutoModelForCausalLM": "m.M"}, "vocab_size": 64},
}
MEGATRON = "--train-backend megatron"
SGLANG = "--rollout-engine sglang --device cuda"


@pytest.fixture
def models(tmp_path, monkeypatch):
    """The folder where the command runs: a model with a config, and no weights, of each kind."""
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "saved_0.pt").touch()
    monkeypatch.chdir(tmp_path)


REFUSED = [
    ("dense", "--load-debug-rollout-data nowhere/{rollout_id}.pt", "no such file: nowhere/0.pt"),
    ("dense", f"{SGLANG} --sglang-config no.yaml", "--sglang-config no.yaml: no such file; check the path"),
    ("dense", f"{SGLANG} --sglang-chat-template no.jinja", "--sglang-chat-template no.jinja: no such file"),
    ("bert", "--train-backend fsdp", "a bert is an encoder, whose tokens see those after them; choose a causal"),
    ("clip", "--train-backend fsdp", "has no causal language model of the type clip; choose a causal"),
    ("qwen33", "--train-backend fsdp", "has no model_type qwen33; correct model_type in its config.json, install"),
    ("own", "--train-backend fsdp", "has no model_type mimo, and the code in its folder (auto_map) is not run"),
    ("bert", f"--train-backend megatron {SGLANG}", "mistral, nemotron; choose another model"),
    ("own", f"--train-backend megatron {SGLANG}", "mistral, nemotron; choose another model"),
    ("dense", "--custom-rm-path my_mod", "names no function of a module; write module:function or module.function"),
    ("dense", "--lora-rank 4 --target-modules q_proj foo", "a qwen3 has no linear layer named foo; give some of down"),
    ("dense", "--lora-rank 4 --exclude-modules c_attn", "a qwen3 has no linear layer named c_attn"),
    ("experts", "--lora-rank 4 --target-modules foo --train-backend megatron", "named foo; give some of k_proj, o_pr"),
    (
        "dense",
        f"{MEGATRON} --num-experts 8",
        "--num-experts 8: contradicts --hf-checkpoint, whose config.json describes a",
    ),
    (
        "dense",
        "--train-backend fsdp --num-experts 8",
        "whose config.json describes a model without --num-experts; drop",
    ),
    (
        "experts",
        f"{MEGATRON} --moe-router-score-function sigmoid",
        "sigmoid: contradicts --hf-checkpoint, whose config.json gives --moe-router-score-function softmax; drop it",
    ),
    ("dense", f"{MEGATRON} --norm-epsilon 1e-3", "whose config.json gives --norm-epsilon 1e-06; drop it"),
    ("experts", f"{MEGATRON} --moe-layer-freq ['a']", "--moe-layer-freq ['a']: must be a list of whole numbers; write"),
    ("experts", f"{MEGATRON} --moe-layer-freq [0]*-1", "--moe-layer-freq [0]*-1: must be a list of whole numbers"),
    (
        "dense",
        '--apply-chat-template --multimodal-keys {"image":"x"}',
        '--multimodal-keys {"image":"x"}: a qwen3 reads no images here; give a model of the type llava_onevision,',
    ),
    ("dense", '--multimodal-keys {"video":"x"}', '--multimodal-keys {"video":"x"}: video is not trained on'),
    ("dense", "--sglang-router-ip 10.0.0.1", "--sglang-router-ip: a run starts its own router, and engines that run"),
    ("dense", "--sglang-router-ip 10.0.0.1", "give --rollout-external and --rollout-external-engine-addrs HOST:PORT"),
    (
        "dense",
        "--prompt-data a A.jsonl b B.jsonl",
        "takes one source; for several give --prompt-mix a A.jsonl b B.jsonl",
    ),
    ("dense", "--prompt-data A.jsonl B.jsonl", "for several give --prompt-mix NAME A.jsonl NAME B.jsonl"),
    ("dense", "--lr 1 2 --seed 3 yes", "the words '2' after --lr, 'yes' after --seed belong to no flag; every"),
    ("dense", "data.size=8 +algorithm.x.y=1", "another trainer; write the command to a file, and miles translate FILE"),
    ("dense", f"{SGLANG} --strict-flags --colocate --rollout-num-gpus 4", "--rollout-num-gpus 4: has no effect (with"),
]


@pytest.mark.parametrize(("model", "flags", "expected"), REFUSED)
def test_what_would_stop_the_run_is_refused(refusals, models, model, flags, expected):
    without = "--hf-checkpoint" + (" --rm-type" if "--custom-rm-path" in flags else "")
    without += " --prompt-data --rm-type" if "--prompt-data" in flags else ""
    flags += " --rm-type length" if "--prompt-data" in flags else ""
    (message,) = refusals(f"--hf-checkpoint {model} {flags}", without=without)
    assert expected in message


@pytest.mark.parametrize(
    "flags",
    [
        "--load-debug-rollout-data saved_{iteration}.pt --num-rollout 1 --strict-flags",
        "--train-backend fsdp --lora-rank 4 --target-modules layers.0.self_attn.q_proj --exclude-modules lm_head",
        "--custom-generate-function-path my.generate.one",
        f"{SGLANG} --sglang-chat-template no.jinja --ray-address 10.0.0.1:6379",  # a file of the cluster's hosts
    ],
)
def test_what_starts_is_accepted(accepted, models, flags):
    without = "--hf-checkpoint" + (" --num-rollout --prompt-data --rm-type" if "--num-rollout" in flags else "")
    assert accepted(f"--hf-checkpoint dense {flags}", without=without)


def test_a_missing_file_of_a_later_iteration_is_noted(accepted, models):
    notes = accepted("--load-debug-rollout-data saved_{iteration}.pt", without="--prompt-data --rm-type").notes
    assert any("saved_1.pt is missing, so the run will stop there" in note for note in notes)


def test_two_broken_objects_and_all_wrong_words_are_reported_together(refusals):
    unknown, stray, *objects = refusals(
        "x --train-env-vars {a --apply-chat-template --apply-chat-template-kwargs {b --nosuch 1 --seed 1 2"
    )
    assert unknown.startswith("--nosuch: no such flag;")
    assert stray.startswith("the words 'x' after --rollout-max-response-len, '2' after --seed belong to no flag;")
    assert {message.split()[0] for message in objects} == {"--train-env-vars", "--apply-chat-template-kwargs"}


def test_only_readings_are_listed_as_read(accepted):
    parts = explain(accepted("--num-steps-per-rollout 1 --rollout-temperature 0 --colocate --rollout-num-gpus 4"))
    parts = {part.partition("\n")[0]: part for part in parts.split("\n\n")}
    assert "--global-batch-size is 32" in parts["Read as"] and "advantage" not in parts["Read as"]
    assert "--rollout-temperature 0 samples greedily" in parts["Notes"]
    accepted_part = next(part for title, part in parts.items() if title.startswith("Accepted"))
    assert "no effect" in accepted_part and "--rollout-num-gpus 4: with --colocate" in accepted_part
