"""Which engine generates, on which devices, and which flags it accepts."""

import json

import pytest

from tests.fast.support.rows import rows

SGLANG = "--rollout-engine sglang --actor-num-gpus-per-node 2 "


@pytest.mark.parametrize(("flags", "expected"), rows(__file__, "test_refused_with_one_error"))
def test_refused_with_one_error(refused, flags, expected):
    (message,) = refused(SGLANG + flags)
    assert expected in message


@pytest.mark.parametrize(("flags", "engines"), rows(__file__, "test_number_of_engines"))
def test_number_of_engines(validated, flags, engines):
    assert validated(SGLANG + flags).settings.num_engines == engines


@pytest.mark.parametrize(
    ("kind", "patch", "flags", "expected"),
    [
        (
            "qwen2_5_vl",
            8,
            "",
            "SGLang reads patches of 14 pixels only, and the model's have 8; use --rollout-engine torch",
        ),
        ("llava_onevision", 14, "", "SGLang has no model of the type llava_onevision; use --rollout-engine torch"),
        (
            "qwen3_vl",
            16,
            "--rollout-external --rollout-external-engine-addrs 127.0.0.1:9",
            "--rollout-external: the vision tower is trained, and running engines may reuse",
        ),
    ],
)
def test_images_that_sglang_would_read_wrongly_are_refused(refused, tmp_path, kind, patch, flags, expected):
    """Without --multimodal-keys too: messages, tools and environments have images."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vision_config": {"patch_size": patch}}))
    assert any(expected in message for message in refused(f"{SGLANG} --hf-checkpoint {tmp_path} {flags}"))


def test_running_engines_serve_a_model_whose_vision_tower_stays_unchanged(validated, tmp_path):
    config = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = "--rollout-external --rollout-external-engine-addrs 127.0.0.1:9 --freeze-vision-tower"
    assert validated(f"{SGLANG} --hf-checkpoint {tmp_path} {flags}").settings.sglang.rollout_external


def test_abort_is_retract_where_nothing_is_in_flight(validated):
    read = validated(SGLANG + "--async-steps 1 --pause-generation-mode abort")
    assert read.settings.sglang.pause_generation_mode == "retract" and not read.settings.sglang.keeps_cache
    assert any("abort is read as retract: without --fully-async" in note for note in read.notes)


def test_own_flags_that_start_like_sglangs_stay_ours(validated):
    sglang = validated(SGLANG + "--sglang-server-concurrency 7").settings.sglang
    assert sglang.sglang_server_concurrency == 7


@pytest.mark.parametrize("engine", ["--rollout-engine torch ", SGLANG])
def test_both_engines_are_sent_deltas_if_something_is_generated(validated, engine):
    flags = engine + "--update-weight-transfer-mode disk-delta --update-weight-disk-dir d --update-weight-copy-dir c"
    settings = validated(flags).settings
    assert settings.sends_deltas and str(settings.weights_folder) == "d"
    assert not validated(engine).settings.sends_deltas
