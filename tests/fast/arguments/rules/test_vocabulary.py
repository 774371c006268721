"""Token ids that end a response are ids of the model."""

import json

import pytest


@pytest.fixture
def model(tmp_path):
    def write(config):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | config))
        return f"--hf-checkpoint {tmp_path} --rollout-stop-token-ids 3"

    return write


@pytest.mark.parametrize("config", [{"vocab_size": 64}, {"vocab_size": 900, "text_config": {"vocab_size": 64}}])
def test_ids_beyond_the_vocabulary_are_refused(model, validated, refused, config):
    flags = model(config)
    assert validated(f"{flags} 63", without="--hf-checkpoint").settings.rollout.stop_token_ids == (3, 63)
    (message,) = refused(f"{flags} 64 700", without="--hf-checkpoint")
    assert message == (
        "--rollout-stop-token-ids 64 700: the model has the token ids 0 to 63, by the vocab_size of its config.json; "
        "give ids of its tokenizer's vocabulary"
    )


def test_without_a_known_size_any_id_is_accepted(model, validated):
    assert validated(f"{model({})} 64", without="--hf-checkpoint")
    assert validated("--rollout-stop-token-ids 64")


def test_a_negative_id_is_reported_alone(model, refused):
    (message,) = refused(f"{model({'vocab_size': 64})} -1 64", without="--hf-checkpoint")
    assert "token ids are not negative" in message
