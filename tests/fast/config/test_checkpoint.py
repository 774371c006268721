"""URLs of --save, --load and --save-hf: checked before anything starts, and shown without secrets."""

import json
from dataclasses import asdict

import pytest

from miles.base.secrets import HIDDEN, public, secrets_in
from miles.config.checkpoint import CheckpointArguments, explain_checkpoint
from miles.config.run_file import run_config
from tests.fast.support.rows import rows

URL = "memory://bucket/run"


@pytest.mark.parametrize("flags, message", rows(__file__, "test_what_cannot_work_is_refused_in_one_sentence"))
def test_what_cannot_work_is_refused_in_one_sentence(refused, flags, message):
    (error,) = refused(flags)
    assert message in error


def test_urls_have_a_local_copy_in_the_output_folder(validated):
    section = validated(f"--save {URL}/ --load {URL}/iter_0000004 --output-dir out").settings.checkpoint
    local = section.local(f"{URL}/")
    assert str(local).startswith("out/remote/bucket-run-")
    assert section.local(section.load) == local / "iter_0000004"
    assert section.local(f"{URL}/other") != local
    assert str(section.local("runs/a")) == "runs/a"
    assert any(str(local) in line for line in explain_checkpoint(section))
    assert CheckpointArguments().urls == {} and section.urls.keys() == {"save", "load"}


def test_explain_says_what_is_resumed(validated, tmp_path):
    def line(flags=""):
        (text,) = explain_checkpoint(validated(f"--load {tmp_path} {flags}").settings.checkpoint)
        return text.removeprefix(f"{tmp_path}: ")

    assert line() == "holds no checkpoint, so the run starts at iteration 0"
    for name in ("iter_0000002", "iter_0000004", "iter_0000006"):
        (tmp_path / name).mkdir()
    assert line().startswith("no checkpoint is complete by its manifest; ")
    for name in ("iter_0000002", "iter_0000004"):
        (tmp_path / name / "manifest.json").touch()
    assert line() == "the run starts at iteration 4, from iter_0000004"
    assert line(f"--load {tmp_path}/iter_0000008").endswith("the run checks its files, and stops if none can be loaded")
    assert line("--finetune") == "the run starts at iteration 0, with the weights of iter_0000004"


def test_a_model_may_be_pushed_to_a_repository(validated):
    assert validated("--save-hf hf://me/model").settings.checkpoint.urls == {"save_hf": "hf://me/model"}


def test_storage_options_are_secret(validated):
    options = {"key": "my-access-key", "client_kwargs": {"endpoint_url": "http://store:9000"}}
    settings = validated(f"--save {URL}").settings
    url = "sftp://me:hunter2@host/run"
    section = CheckpointArguments(save=url, storage_options=json.dumps(options), remote_cache="x")
    assert section.file_system_options == options
    value = public("storage_options", section.storage_options)
    assert json.loads(value) == {"key": HIDDEN, "client_kwargs": HIDDEN}
    assert secrets_in("settings", asdict(section)) == {"my-access-key", "hunter2"}
    assert CheckpointArguments(save=URL, storage_options=value).file_system_options == {}
    assert "hunter2" not in str(section.local(section.save))
    assert section.local(public("save", section.save)) == section.local(section.save), "as run.json has it"
    text = run_config(type(settings)(checkpoint=section))
    assert "my-access-key" not in text and "hunter2" not in text and "store:9000" not in text
