"""The first examples of docs/commands.md and docs/report.md: saved as their pages say, their commands are accepted."""

import json
import re

import pytest

from miles.commands import quickstart, sweep, train
from miles.compat.border import read_command
from miles.config.inputs import Inputs
from miles.config.parser import judge
from miles.config.run_file import run_config
from tests.fast.docs.tutorial_page import REPO


@pytest.fixture
def quickstart_folder(tmp_path, monkeypatch):
    """Be in a folder with what ``miles quickstart`` leaves: a model, prompts and run.yaml."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "outputs/models/SmolLM2-135M-Instruct"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (model / "tokenizer_config.json").touch()
    (model / "model.safetensors").touch()

    def ended(words, is_alone):
        (tmp_path / "outputs/quickstart/run.yaml").write_text(run_config(judge(read_command(words)).settings))
        return 0

    monkeypatch.setattr(train, "main", ended)
    monkeypatch.setattr("miles.config.parser.check_inputs", lambda settings, starts: Inputs())  # without a tokenizer
    assert quickstart.main([]) == 0
    monkeypatch.undo()
    (model / "tokenizer_config.json").unlink()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_first_example(page, folder):
    """Write the first YAML block of a page to the file that its first line names; return the page."""
    text = (REPO / "docs" / page).read_text(encoding="utf-8")
    block = re.search(r"^```yaml\n(# (\S+)\n.*?)^```$", text, re.M | re.S)
    (folder / block[2]).write_text(block[1])
    return text


def commands(text, start):
    """Return the words of the commands of a page that begin with ``start``, without ``miles`` and its subcommand."""
    lines = re.findall(rf"^{re.escape(start)}.*", text, re.M)
    assert lines, start
    return [line.partition("#")[0].split()[2:] for line in lines]


def test_the_configuration_file_is_accepted(quickstart_folder, capsys):
    text = save_first_example("commands.md", quickstart_folder)
    for words in commands(text, "miles explain --config products.yaml") + commands(text, "miles train --config produc"):
        with pytest.raises(SystemExit) as end:
            train.main([*words, "--explain"])
        assert end.value.code == 0, capsys.readouterr().err
    assert judge(read_command(words)).settings.optimizer.lr == 2e-5


def test_the_error_of_a_misspelled_setting_has_its_line(quickstart_folder, capsys):
    text = save_first_example("commands.md", quickstart_folder)
    file = quickstart_folder / "products.yaml"
    file.write_text(file.read_text().replace("rollout_batch_size", "rolout_batch_size"))
    with pytest.raises(SystemExit):
        train.main(["--config", "products.yaml"])
    message = re.search(r"^miles train: error: (--config products.yaml:\d+: rolout.*)$", text, re.M)[1]
    assert message in capsys.readouterr().err


def test_the_sweep_lists_its_runs(quickstart_folder, capsys):
    text = save_first_example("report.md", quickstart_folder)
    file = quickstart_folder / "clip.yaml"
    file.write_text(file.read_text().replace("seeds: 8", "seeds: 1"))
    (words,) = commands(text, "miles sweep clip.yaml --explain")
    assert sweep.main(words) == 0
    assert "3 runs" in capsys.readouterr().out
