"""``miles quickstart``: which run it starts, and which folders it leaves alone."""

import json

import pytest

from miles.base.locks import locked_folders
from miles.commands import quickstart, train
from miles.commands.quickstart_parts.data import split_pairs
from miles.commands.quickstart_parts.summary import summarize
from miles.compat.border import read_command
from miles.config import parser
from miles.config.inputs import Inputs
from miles.config.parser import judge


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(parser, "check_inputs", lambda settings, starts: Inputs())  # the model has no tokenizer
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The settings of the runs that the command starts; each writes two evaluations."""
    all_settings = []

    def run(words, is_alone):
        settings = judge(read_command(words)).settings
        rows = [{"step": step, "time/step": 2.5, "eval/heldout/accuracy": step / 2} for step in range(2)]
        (tmp_path / "out" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        all_settings.append(settings)
        return 0

    monkeypatch.setattr(train, "main", run)
    monkeypatch.chdir(tmp_path)
    return all_settings


def test_the_run_has_the_settings_of_the_file_and_flags_win(model, started, tmp_path, capsys):
    words = [str(model), "--output-dir", "out", "--seed", "3"]
    assert quickstart.main(words) == 0
    assert capsys.readouterr().out == "quickstart: held-out accuracy 0.000 -> 0.500 in 5 s\n"
    (settings,) = started
    assert (settings.rollout.num_rollout, settings.optimizer.lr, settings.optimizer.adam_beta2) == (40, 1e-5, 0.95)
    assert (settings.training.seed, settings.data.rollout_seed, settings.rollout.rollout_engine) == (3, 3, "torch")
    assert settings.model.hf_checkpoint == str(model) and settings.checkpoint.save == "out/checkpoints"
    assert settings.evaluation.eval_prompt_data == ("heldout", "out/data/heldout.jsonl")
    assert len((tmp_path / "out/data/train.jsonl").read_text().splitlines()) == 63
    (tmp_path / "out" / "old").touch()
    flags = ["--lr", "1", "--rollout-engine", "sglang", "--fp32", "--num-rollout", "2"]
    assert quickstart.main([*words, *flags]) == 0
    settings = started[-1]
    assert (settings.optimizer.lr, settings.rollout.rollout_engine, settings.rollout.num_rollout) == (1, "sglang", 2)
    assert settings.training.fp32 and not (tmp_path / "out" / "old").exists(), "an earlier quickstart is replaced"
    saved = tmp_path / "out" / "checkpoints" / "iter_0000002" / "weights"
    saved.parent.mkdir(parents=True)
    saved.touch()
    assert quickstart.main([*words, "--load", "out/checkpoints"]) == 0
    assert saved.exists(), "a run that continues keeps what it continues"


def test_other_folders_and_models_are_refused(model, started, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    assert quickstart.main([str(model), "--output-dir", "mine"]) == 2
    assert "--output-dir mine: holds files that are not of an earlier quickstart" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.txt").exists()
    assert quickstart.main([str(tmp_path / "mine"), "--output-dir", "out"]) == 2
    assert "mine: no Hugging Face model with safetensors weights; check the path" in capsys.readouterr().err
    assert not started and not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [["--lr", "x"], ["--eps-clip", "0"]])
def test_wrong_flags_are_refused_before_the_model_is_fetched(wrong, started, monkeypatch, capsys):
    monkeypatch.setattr(quickstart.model, "prepare", lambda *_: pytest.fail("it was fetched"))
    with pytest.raises(SystemExit) as end:
        quickstart.main(["--output-dir", "out", *wrong, "--explain"])
    assert end.value.code == 2 and wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "status"), [(["--explain"], 0), (["--version"], 0), (["--rehearse"], 0), (["--lrr", "1"], 2)]
)
def test_what_does_not_train_keeps_an_earlier_quickstart(more, status, model, started, tmp_path, monkeypatch):
    hidden = []
    monkeypatch.setattr(quickstart, "hide_on_command_line", hidden.append)
    words = [str(model), "--output-dir", "out"]
    quickstart.main(words)
    (tmp_path / "out" / "result").touch()
    try:
        ended = quickstart.main([*words, *more])
    except SystemExit as end:
        ended = end.code
    assert ended == status and (tmp_path / "out" / "result").exists()
    assert hidden == [words, [*words, *more]]


def test_an_earlier_quickstart_stays_if_it_runs_or_there_is_no_model(model, started, tmp_path, capsys):
    words = ["--output-dir", "out"]
    quickstart.main([str(model), *words])
    (tmp_path / "out" / "result").touch()
    assert quickstart.main([str(tmp_path / "nowhere"), *words]) == 2
    with locked_folders([("--output-dir", tmp_path / "out")]):
        assert quickstart.main([str(model), *words]) == 2
    assert "--output-dir out: another run is writing to this folder" in capsys.readouterr().err
    assert (tmp_path / "out" / "result").exists() and len(started) == 1


def test_without_metrics_there_is_no_summary(model, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "main", lambda words, is_alone: 0)
    assert quickstart.main([str(model), "--output-dir", "out"]) == 0
    assert "quickstart: no summary: " in capsys.readouterr().err


def test_both_orders_of_a_held_out_pair_are_held_out():
    train_pairs, held_out = split_pairs(0)
    assert (len(train_pairs), len(held_out)) == (63, 18)
    assert {(b, a) for a, b in held_out} == set(held_out) and not set(train_pairs) & set(held_out)
    assert split_pairs(1) != split_pairs(0)


def test_a_summary_needs_two_evaluations(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/heldout/accuracy": 0.5}\n')
    with pytest.raises(ValueError, match="1 evaluation of heldout; a summary needs two"):
        summarize(tmp_path / "metrics.jsonl", "heldout")


def test_a_summary_compares_rewards_where_an_evaluation_has_no_accuracy(tmp_path):
    rows = [{"eval/heldout/reward": 0.1}, {"eval/heldout/reward": 0.5, "eval/heldout/accuracy": 0.5, "time/step": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert summarize(tmp_path / "metrics.jsonl", "heldout") == "held-out reward 0.100 -> 0.500 in 2 s"
