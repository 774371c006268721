"""Weights of a checkpoint are exported in one process, and an engine evaluates sets and answers prompts with them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.base.secrets import HIDDEN
from miles.base.text import InputError
from miles.commands import eval as eval_command
from miles.commands import sample
from miles.commands.saved_runs.generation import answer, estimates, evaluate_sets, settings_for
from miles.commands.saved_runs.run import SavedRun
from miles.commands.saved_runs.weights import hugging_face_folder
from miles.config.megatron.settings import MegatronArguments
from miles.config.servers.passed_on import ServerFlags
from miles.observe.run_files import RunHeader
from miles.training.one_process import export_checkpoint, on_one_rank


def test_the_export_of_a_checkpoint_has_its_weights(run, tiny_model, tmp_path):
    (tmp_path / "out").mkdir()
    checkpoint = run.checkpoint(1)
    export_checkpoint(run.settings, checkpoint.folder, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    original = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name] + 1) for name in original)
    (checkpoint.folder / "random_state_rank0.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="is damaged: random_state_rank0.pt is empty"):
        export_checkpoint(run.settings, checkpoint.folder, tmp_path / "out")


def test_an_evaluation_repeats_and_says_how_sure_it_is(run, tiny_model, tmp_path):
    with hugging_face_folder(run, None, Path(tiny_model)) as model:
        here = settings_for(run.settings, model, tmp_path, None)
        first, again = (asyncio.run(evaluate_sets(here, (), 4))[0] for _ in range(2))
        (other,) = asyncio.run(evaluate_sets(here, ("other", str(tmp_path / "prompts.jsonl")), None))
    assert (first.name, first.prompts, first.samples_per_prompt, len(first.samples)) == ("own", 3, 4, 12)
    assert first.estimates == again.estimates, "the run's seeds"
    mean = sum(sample.reward for sample in first.samples) / 12
    assert first.estimates["reward"].value == pytest.approx(mean)
    assert first.estimates["reward"].low <= mean <= first.estimates["reward"].high
    assert {"pass@1", "pass@2", "pass@4"} <= first.estimates.keys() and first.means["response_length"] > 0
    assert (other.name, other.samples_per_prompt) == ("other", 1) and "pass@1" not in other.estimates


def test_answers_differ_by_their_seeds_and_repeat(run, tiny_model, tmp_path):
    here = settings_for(run.settings, Path(tiny_model), tmp_path, None)
    ask = [asyncio.run(answer(here, "2 + 2 = ", 3, seed, None, 4)) for seed in (0, 0, 1)]
    texts = [[sample.response_ids for sample in samples] for samples in ask]
    assert texts[0] == texts[1] != texts[2]
    assert all(len(ids) <= 4 for ids in texts[0]) and len(texts[0]) == 3
    with pytest.raises(InputError, match="the prompt is empty"):
        asyncio.run(answer(here, " ", 1, 0, None, None))


def test_a_row_of_the_data_is_answered_and_scored(run, tiny_model, capsys):
    words = [str(run.folder), "--weights", str(tiny_model), "--n", "2"]
    assert sample.main([*words, "--row", "2", "--json"]) == 0
    rows, (source, *_) = json.loads(capsys.readouterr().out), run.settings.data.mixed_sources.values()
    assert [[row["prompt"], row["label"], row["reward"]] for row in rows] == [
        ["1 + 1 = ", "2", -row["tokens"]] for row in rows
    ]
    assert sample.main([*words, "--seed", "1", "4 + 1 = "]) == 0, "PROMPT follows the flags"
    assert capsys.readouterr().out.startswith("--- answer 1 (")
    assert sample.main(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"--- {source}:1, label 1\n0 + 1 = \n--- answer 1 (") and ", reward " in out
    assert err == f"loading {tiny_model} …\n"
    with pytest.raises(SystemExit):
        sample.main([*words, "--row", "4"])
    out, err = capsys.readouterr()
    assert "--row 4: the run has 3 prompts; give one of 1 to 3" in err and "loads" not in err


def test_a_server_gets_new_keys_as_the_old_ones_were_not_stored(run, tiny_model, tmp_path):
    words = ("--api-key", "sesame", "--context-length", "64", "--admin-api-key=open")
    settings = dataclasses.replace(run.settings, server_flags=ServerFlags(server=words))
    RunHeader.from_sections("miles", settings, "", "", 2).save(run.folder)
    stored = SavedRun(run.folder).settings
    assert HIDDEN in stored.server_flags.server
    here = settings_for(stored, Path(tiny_model), tmp_path, None)
    assert here.server_flags.server == ("--context-length", "64")


def test_one_rank_has_no_pipeline(run):
    sizes = MegatronArguments(pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=3)
    megatron = on_one_rank(dataclasses.replace(run.settings, megatron=sizes)).megatron
    assert (megatron.pipeline_model_parallel_size, megatron.decoder_first_pipeline_num_layers) == (1, None)


def test_pass_at_k_counts_prompts(run):
    """Answers that were dropped are failures."""
    rewards = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], []]
    by_name = estimates(rewards, [[True, False], [True, True], [False, False], [False, False]])
    assert by_name["accuracy"].value == 0.5 and by_name["accuracy"].method == "bootstrap"
    assert by_name["pass@2"].value == 0.5 and by_name["pass@2"].method == "Wilson"


def test_damaged_checkpoints_are_not_replaced_by_the_export_in_silence(run, tiny_model):
    checkpoint = dataclasses.replace(run.settings.checkpoint, save_hf=str(tiny_model))
    settings = dataclasses.replace(run.settings, checkpoint=checkpoint)
    RunHeader.from_sections("miles", settings, "", "", 2).save(run.folder)
    (run.checkpoint(1).folder / "random_state_rank0.pt").unlink()
    refused = pytest.raises(InputError, match="no complete checkpoint in ")
    with refused, hugging_face_folder(SavedRun(run.folder), None, None):
        pass


def test_a_bad_file_for_answers_is_refused_before_the_evaluation(run, tmp_path, capsys):
    metrics = run.folder / "metrics.jsonl"
    for path, fault in (
        (tmp_path, "is a folder; give a file in it"),
        (tmp_path / "none" / "answers.jsonl", "must be a file in a folder that exists"),
        (metrics, "is a file of a run, which would be lost"),
    ):
        with pytest.raises(SystemExit) as end:
            eval_command.main([str(run.folder), "--out", str(path)])
        assert end.value.code == 2
        assert f"--out {path}: {fault}" in capsys.readouterr().err


def test_weights_that_are_not_there_are_refused(run, tmp_path):
    refused = pytest.raises(InputError, match="--weights .*: no config.json there")
    with refused, hugging_face_folder(run, None, tmp_path):
        pass
