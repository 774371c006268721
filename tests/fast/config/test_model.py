"""The configuration of a model is read from its folder or from the hub's cache."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from miles.config.model import ModelArguments, local_config
from tests.fast.config.conftest import QWEN3


@pytest.fixture
def downloaded(tmp_path, monkeypatch):
    """Puts a config into the hub's cache, as a download of ``org/model`` leaves it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def put(config: dict) -> Path:
        model = tmp_path / "models--org--model"
        for folder, text in (("snapshots/newest", json.dumps(config)), ("snapshots/before", "{}")):
            (model / folder).mkdir(parents=True)
            (model / folder / "config.json").write_text(text)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("newest")
        return model

    return put


def test_a_name_on_the_hub_has_the_config_of_its_last_download(downloaded):
    model = ModelArguments(hf_checkpoint="org/model")
    assert local_config(model, "hf_checkpoint") is None
    folder = downloaded(QWEN3)
    assert local_config(model, "hf_checkpoint") == QWEN3
    (folder / "refs" / "main").write_bytes(b"\xff")
    assert local_config(model, "hf_checkpoint") is None
