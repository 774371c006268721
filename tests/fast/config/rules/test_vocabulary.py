"""Token ids that end a response are ids of the model."""

import json

import pytest

from miles.config import model as model_section


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


@pytest.fixture
def folder(tmp_path):
    def write(name, vocabulary, size=64, added=()):
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": size}))
        tokens = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": n, "content": t} for t, n in added]}
        (path / "tokenizer.json").write_text(json.dumps(tokens))
        return path

    return write


SCORERS = {
    "--ref-load": "--use-kl-loss --kl-loss-coef 0.1 --ref-load",
    "--opd-teacher-load": "--use-opd --opd-type trainer --opd-teacher-load",
}


@pytest.mark.parametrize("flag", SCORERS)
def test_a_scorer_with_another_tokenizer_is_refused(folder, refused, flag):
    own, other = folder("own", {"a": 0, "b": 1, "c": 2}), folder("other", {"a": 0, "b": 2, "c": 1})
    (message,) = refused(f"--hf-checkpoint {own} {SCORERS[flag]} {other}", without="--hf-checkpoint")
    assert message == (
        f"{flag} {other}: its tokenizer.json has other ids for 2 of 3 tokens ('b' is 2, and 1 in {own}); it scores the "
        "ids that the policy chose, so give a model with the same tokenizer"
    )


@pytest.mark.parametrize("flag", SCORERS)
def test_a_scorer_with_too_few_tokens_is_refused(folder, refused, flag):
    own, other = folder("own", {"a": 0, "b": 63}), folder("other", {"a": 0}, size=63)
    (message,) = refused(f"--hf-checkpoint {own} {SCORERS[flag]} {other}", without="--hf-checkpoint")
    assert message.startswith(
        f"{flag} {other}: has the token ids 0 to 62, and the tokenizer of --hf-checkpoint has ids"
    )


def test_scorers_may_have_more_tokens_and_other_special_ones(folder, validated):
    own = folder("own", {"a": 0, "b": 1}, added=[("<a>", 2)])
    for other in (
        folder("larger", {"a": 0, "b": 1, "c": 2}, size=128, added=[("<b>", 2)]),
        folder("pairs", [["a", -1.0], ["b", -2.0]]),
        folder("broken", None),
    ):
        assert validated(f"--hf-checkpoint {own} {SCORERS['--ref-load']} {other}", without="--hf-checkpoint")


def test_a_tokenizer_with_more_tokens_than_its_model_may_have_a_scorer_of_the_models_size(folder, validated):
    tokens = {"a": 0, "b": 99}
    own, other = folder("own", tokens, size=64), folder("other", tokens, size=64)
    for scorer in (own, other):
        assert validated(f"--hf-checkpoint {own} {SCORERS['--ref-load']} {scorer}", without="--hf-checkpoint")


def test_equal_files_of_tokens_are_not_parsed(folder, validated, monkeypatch):
    """Validation spends more time on parsing the files of large vocabularies than on all the rest."""
    own, other = folder("own", {"a": 0, "b": 1}), folder("other", {"a": 0, "b": 1})
    monkeypatch.setattr(model_section.json, "loads", refusing_tokens)
    flags = f"--hf-checkpoint {own} {SCORERS['--ref-load']} {own} {SCORERS['--opd-teacher-load']} {other}"
    assert validated(flags, without="--hf-checkpoint")


def refusing_tokens(text, **options):
    assert "added_tokens" not in text
    return json.JSONDecoder(**options).decode(text)


def test_a_vocabulary_of_pairs_that_are_no_tokens_is_not_compared(folder, validated):
    own, other = folder("own", {"a": 0}), folder("other", [[["a"], -1.0]])
    assert validated(f"--hf-checkpoint {own} {SCORERS['--ref-load']} {other}", without="--hf-checkpoint")
