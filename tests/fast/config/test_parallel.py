"""Sizes that divide the ranks, and one way of cutting sequences."""

import json
import re

import pytest

from miles.base.flags import FlagError
from miles.compat.border import read_command
from miles.config.explain import explain
from miles.config.parser import judge
from miles.config.validate import validate
from tests.fast.support.rows import rows

DYNAMIC = "--dynamic-context-parallel --max-seqlen-per-dp-cp-rank 64"
ROOMY = "--dynamic-context-parallel --max-seqlen-per-dp-cp-rank 99"  # for any response on one rank


@pytest.mark.parametrize(("flags", "sentence"), rows(__file__, "test_refused_with_one_error"))
def test_refused_with_one_error(refused, flags, sentence):
    (message,) = refused(flags)
    assert re.search(sentence, message)


def test_a_flag_of_another_backend_hides_no_error(refused):
    texts = refused("--train-backend fsdp --context-parallel-size 3 --moe-aux-loss-coeff 0.1")
    assert [message.partition(":")[0] for message in texts] == ["--context-parallel-size 3", "--moe-aux-loss-coeff 0.1"]


@pytest.mark.parametrize("flags", ["--max-tokens-per-gpu 99", "--max-tokens-per-gpu 99 --micro-batch-size 2", ""])
def test_dynamic_batches_are_accepted_with_dynamic_context_parallel_if_the_budgets_agree(command, flags):
    result = judge(read_command(command(f"{ROOMY} --use-dynamic-batch-size {flags}")))
    assert result.settings == judge(read_command(command(ROOMY))).settings
    assert len(result.accepted) == 1 + flags.count("--")
    with pytest.raises(FlagError, match="has no effect"):
        judge(read_command(command(f"{ROOMY} --use-dynamic-batch-size {flags} --strict-flags")))


def test_another_budget_than_that_of_dynamic_context_parallel_is_refused(refused, validated):
    words = f"{DYNAMIC} --use-dynamic-batch-size --max-tokens-per-gpu"
    assert validated(f"{words} 64")
    [message] = refused(f"{words} 128")
    assert message.startswith(
        "--max-tokens-per-gpu 128: is not the budget of --max-seqlen-per-dp-cp-rank 64; give both"
    )


def model_folder(path, **config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_untested_models_with_recurrent_state_are_padded_with_a_note(validated, tmp_path):
    plain = model_folder(tmp_path / "plain", model_type="qwen3")
    folder = model_folder(tmp_path / "new", model_type="lfm2", layer_types=["full_attention", "linear_attention"])
    for flag in ("--hf-checkpoint", "--ref-load"):
        rest = "" if flag == "--hf-checkpoint" else f"--hf-checkpoint {plain} --use-kl-loss --kl-loss-coef 0.1"
        result = validated(f"{flag} {folder} {rest} --rollout-engine sglang", without="--hf-checkpoint")
        assert result.settings.parallel.qkv_format == "bshd"
        note = f"--qkv-format is bshd: packing the samples of {flag} {folder}, a lfm2 with recurrent state, has"
        assert any(said.startswith(note) for said in result.notes)
        assert note.split(":")[0] in explain(result)
        assert not any("qkv-format" in said for said in validate(result.settings).notes)


def test_a_reference_may_need_rows_where_the_policy_does_not(validated, tmp_path):
    policy = model_folder(tmp_path / "policy", model_type="qwen3_next")
    reference = model_folder(tmp_path / "reference", model_type="lfm2", layer_types=["conv"])
    flags = f"--hf-checkpoint {policy} --ref-load {reference} --use-kl-loss --kl-loss-coef 0.1"
    assert validated(flags, without="--hf-checkpoint").settings.parallel.qkv_format == "bshd"


@pytest.mark.parametrize(
    "config",
    [
        dict(model_type="qwen3_next"),
        dict(model_type="nemotron_h", layers_block_type=["mamba", "attention"]),
        dict(model_type="qwen3_5", text_config=dict(model_type="qwen3_5_text", layer_types=["linear_attention"])),
    ],
)
def test_tested_models_with_recurrent_state_are_packed(validated, tmp_path, config):
    folder = model_folder(tmp_path / "model", **config)
    result = validated(f"--hf-checkpoint {folder}", without="--hf-checkpoint")
    assert result.settings.parallel.qkv_format == "thd"
    assert not any("qkv-format" in note for note in result.notes)


def test_other_models_are_packed(validated, tmp_path):
    plain = model_folder(tmp_path / "plain", model_type="qwen3", layer_types=["full_attention", "sliding_attention"])
    for flags, without in ((f"--hf-checkpoint {plain}", "--hf-checkpoint"), ("", "")):
        result = validated(flags, without)
        assert result.settings.parallel.qkv_format == "thd"
        assert not any("qkv-format" in note for note in result.notes)


WINDOW = "a {} with a sliding window (of {} tokens) has not been compared with transformers; set sliding_window to null"


@pytest.mark.parametrize(
    ("config", "words"), rows(__file__, "test_what_fsdp_does_not_compute_is_refused_before_anything_is_generated")
)
def test_what_fsdp_does_not_compute_is_refused_before_anything_is_generated(
    validated, refused, tmp_path, config, words
):
    folder = model_folder(tmp_path / "model", **config)
    if words is None:
        assert validated(f"--hf-checkpoint {folder}", without="--hf-checkpoint")
        return
    messages = refused(f"--hf-checkpoint {folder}", without="--hf-checkpoint")
    assert any(message.startswith(f"--hf-checkpoint {folder}: {words}") for message in messages), messages


def test_what_the_torch_engine_does_not_run_is_refused_before_it_starts(validated, refused, tmp_path):
    folder = model_folder(tmp_path / "model", model_type="lfm2", layer_types=["conv", "full_attention"])
    (message,) = refused(f"--hf-checkpoint {folder}", without="--hf-checkpoint")
    assert message.startswith(f"--hf-checkpoint {folder}: a lfm2 with layers of conv has not been compared")
    assert validated(f"--hf-checkpoint {folder} --rollout-engine sglang", without="--hf-checkpoint")


@pytest.mark.parametrize(
    ("kind", "words"), [("nemotron_h", "with recurrent state"), ("glm_moe_dsa", "with sparse attention")]
)
def test_ranks_do_not_share_sequences_that_layers_need_whole(refused, tmp_path, kind, words):
    folder = model_folder(tmp_path / "model", model_type=kind)
    (message,) = refused(f"--hf-checkpoint {folder} {DYNAMIC}", without="--hf-checkpoint")
    assert message.startswith("--dynamic-context-parallel: cuts sequences")
    assert f"a {kind} {words}" in message


@pytest.mark.parametrize("text", ["{", "[]"])
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_broken_configuration_is_refused_once(refused, tmp_path, backend, text):
    folder = model_folder(tmp_path / "model")
    (folder / "config.json").write_text(text)
    (message,) = refused(f"--hf-checkpoint {folder} --train-backend {backend}", without="--hf-checkpoint")
    assert message.startswith(f"--hf-checkpoint {folder}: its config.json is broken: ")
