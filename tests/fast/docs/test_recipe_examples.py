"""The recipes in examples/: found by listing, explained for a cluster, described with what was measured, and run."""

import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys

import pytest

from examples.vision import write as vision
from miles.commands import train
from tests.fast.docs.tutorial_page import REPO

EXAMPLES = REPO / "examples"
FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__")
RECIPES = [folder for folder in FOLDERS if (folder / "cluster.sh").exists()]
recipes = pytest.mark.parametrize("folder", RECIPES, ids=lambda folder: folder.name)

# Replaces the interpreter: prints the words of `python train.py …`, and the first line of judge.py.
WORDS = """#!/bin/sh
case "$1" in
    train.py) printf '%s\\n' "$@" ;;
    *judge.py) echo http://127.0.0.1:9/v1 ;;
esac
"""
# The same, and it states what else it would run; with FAILS it fails to fine-tune.
CALLS = """#!/bin/sh
case "$*" in
    *judge.py) echo http://127.0.0.1:9/v1 ;;
    *) echo "call: $*" ;;
esac
case "$*" in *sft_loss*) exit "${FAILS:-0}" ;; esac
"""
ROW = {"input": "a", "label": "a", "metadata": {"json_schema": {"type": "object"}}}
HEADINGS = ["Equation", "Flags", "Measured", "A healthy run", "What is not seen here"]

spec = importlib.util.spec_from_file_location("curves", EXAMPLES / "tasks" / "curves.py")
curves = importlib.util.module_from_spec(spec)
spec.loader.exec_module(curves)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Return a folder with the tasks' files, as far as --explain looks at them."""
    folder = tmp_path_factory.mktemp("outputs")
    write_config(folder / "tasks" / "model")
    for name in ("backward", "record"):
        (folder / "tasks" / name).mkdir()
        for split in ("train", "heldout"):
            (folder / "tasks" / name / f"{split}.jsonl").write_text(json.dumps(ROW) + "\n")
    (folder / "tasks" / "chats.jsonl").write_text('{"chat": []}\n')
    shutil.copytree(folder / "tasks", folder / "shop_task")
    (folder / "shop_task" / "backward").rename(folder / "shop_task" / "shop")
    with pytest.MonkeyPatch.context() as few:
        few.setattr(vision, "NUM_DEMONSTRATIONS", 24)
        few.setattr(vision, "NUM_TRAINED", 24)
        vision.write_tasks(folder / "count_task", seed=1)
    vision.write_random_model(folder / "count_task" / "model", seed=1)
    (folder / "words").write_text(WORDS)
    (folder / "words").chmod(0o755)
    return folder


def write_config(folder):
    """Write the file of a model that --explain reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))


def training_commands(script, outputs, *arguments):
    """Return the flags of each ``python train.py`` that a script starts."""
    environment = os.environ | {"PYTHON": str(outputs / "words"), "OUTPUTS": str(outputs)}
    ended = subprocess.run(["bash", script, *arguments], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return [part.splitlines() for part in ended.stdout.split("train.py\n")[1:]]


def explanation(words, capsys):
    """Return what ``--explain`` among the flags prints."""
    with pytest.raises(SystemExit) as ended:
        train.main(words)
    output = capsys.readouterr()
    assert ended.value.code == 0, output.err
    return output.out


def test_every_folder_has_a_page_and_something_to_run():
    for folder in FOLDERS:
        assert list(folder.glob("**/README.md")) and list(folder.glob("**/*.sh")) or folder.name == "tasks", folder
    using = {path.parent for path in EXAMPLES.glob("*/run.sh") if "recipe.sh" in path.read_text(encoding="utf-8")}
    own = {EXAMPLES / name for name in curves.OWN_TASKS}
    assert using | own == set(RECIPES), "a recipe has run.sh and cluster.sh, and both read recipe.sh"


@recipes
def test_cluster_is_explained_without_a_gpu(folder, outputs, capsys, monkeypatch):
    monkeypatch.chdir(REPO)
    commands = training_commands(folder / "cluster.sh", outputs, "--explain")
    assert commands
    for words in commands:
        output = " ".join(explanation(words, capsys).split())
        assert "device: cuda" in output or "--debug-train-only" in words
        assert "8 ranks" in output or "6 ranks" in output


def test_cluster_finds_the_environment_without_PYTHON(outputs, tmp_path):
    """A fresh shell has no ``python``, or one without the packages."""
    (tmp_path / "bin").mkdir()
    shutil.copy(outputs / "words", tmp_path / "bin" / "python")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"} | {"VENV": str(tmp_path)}
    for name in ("grpo", "agent_client"):
        command = ["bash", EXAMPLES / name / "cluster.sh", "--explain"]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.startswith("train.py\n")
    assert f"\n{tmp_path}/bin/python examples/agent_client/agent.py\n" in ended.stdout


@pytest.mark.parametrize("name", ["agent_client", "sft_then_rl", "vision"])
def test_seeds_refuses_what_is_more_than_one_run_of_training_before_it_runs_anything(outputs, name):
    command = ["bash", EXAMPLES / "tasks" / "seeds.sh", "grpo", name]
    environment = os.environ | {"PYTHON": str(outputs / "words")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stdout == ""
    assert f"OUTPUTS=outputs/sN SEED=N bash examples/{name}/run.sh" in ended.stderr


@recipes
def test_run_is_explained(folder, outputs, capsys, monkeypatch):
    monkeypatch.chdir(REPO)
    write_config(outputs / "dapo" / "hf")  # opd's teacher; the run of dapo removes it
    commands = training_commands(folder / "run.sh", outputs)
    assert commands
    if folder.name == "agent_client":  # its run removes earlier data, and only pretends to write others
        write_config(outputs / "agent_client" / "data" / "model")
        rows = outputs / "tasks" / "backward" / "train.jsonl"
        shutil.copy(rows, outputs / "agent_client" / "data" / "prompts.jsonl")
    if folder.name == "sft_then_rl":  # the fine-tuning would have written it
        write_config(outputs / "sft_then_rl_sft" / "hf")
    if folder.name == "vision":
        shutil.copytree(outputs / "count_task" / "model", outputs / "vision_sft" / "hf")
    for words in commands:
        assert "\n  no effect" not in explanation([*words, "--explain"], capsys)


def calls(folder, outputs, *arguments, **environment):
    """Return how run.sh ended, and its calls of the interpreter; the data of the tasks are there."""
    for tasks in ("tasks", "shop_task", "count_task"):
        (outputs / tasks / "model").mkdir(parents=True, exist_ok=True)
    (outputs / "calls").write_text(CALLS)
    (outputs / "calls").chmod(0o755)
    environment = os.environ | {"PYTHON": str(outputs / "calls"), "OUTPUTS": str(outputs)} | environment
    command = ["bash", EXAMPLES / folder / "run.sh", *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    return ended, [line.removeprefix("call: ") for line in ended.stdout.splitlines() if line.startswith("call: ")]


@pytest.mark.parametrize("flag", ["--explain", "--rehearse"])
@pytest.mark.parametrize("name", [folder.name for folder in RECIPES])
def test_without_training_earlier_results_stay_and_nothing_is_fine_tuned(tmp_path, name, flag):
    paths = [tmp_path / place / name / "metrics.jsonl" for place in (".", "smoke")]
    for path in paths:
        (path.parent / "data").mkdir(parents=True)
        path.touch()
    for smoke in ([], ["--smoke"]):
        ended, started = calls(name, tmp_path, *smoke, flag)
        assert ended.returncode == 0, ended.stderr
        assert [call.split()[0] for call in started] == ["train.py"] and flag in started[0].split()
        assert "sft_loss" not in started[0]
    assert all(path.exists() for path in paths)


def test_a_smoke_run_is_no_result_of_the_recipe(tmp_path):
    """Opd takes the model that dapo has trained; a smoke run leaves one that has hardly been trained."""
    (tmp_path / "dapo" / "hf").mkdir(parents=True)
    smoke = calls("dapo", tmp_path, "--smoke")[1][0]
    assert f"--save-hf {tmp_path}/smoke/dapo/hf" in smoke and (tmp_path / "dapo" / "hf").exists()
    (tmp_path / "dapo" / "hf").rmdir()
    trained = [call for call in calls("opd", tmp_path)[1] if call.startswith("train.py")]
    assert f"--save-hf {tmp_path}/dapo/hf" in trained[0]
    assert f"--opd-teacher-load {tmp_path}/dapo/hf" in trained[1]


def test_a_failed_fine_tuning_ends_the_recipe(tmp_path):
    ended, started = calls("sft_then_rl", tmp_path, FAILS="3")
    assert ended.returncode == 3 and len(started) == 1


@recipes
def test_page_has_its_parts_and_the_figures_of_its_metrics(folder):
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert re.match(r"# [^\n:]+: ", page)
    assert [heading for heading in HEADINGS if f"\n## {heading}\n" not in page] == []
    assert f"bash examples/{folder.name}/run.sh" in page and f"bash examples/{folder.name}/cluster.sh" in page
    if folder not in curves.measured_examples():
        assert curves.BLOCK.search(page)[0] == curves.NOT_MEASURED
        return
    assert (folder / "curve.png").is_file()
    assert curves.BLOCK.search(page)[0] == curves.readme_block(folder), "run examples/tasks/curves.py draw"


@recipes
def test_the_figure_of_the_page_is_within_its_interval(folder):
    """And the run of seeds.sh with the seed of the page is the run of the page."""
    by_seed = curves.accuracies_by_seed(folder)
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert (curves.NOT_REPEATED in page) == (not by_seed)
    if by_seed:
        figure = curves.values(curves.read(folder), curves.ACCURACY)[-1]
        low, high = curves.interval(list(by_seed.values()))
        assert len(by_seed) >= 3 and low <= figure <= high
        runs_in_turns = "PLACE=()" not in (folder / "run.sh").read_text(encoding="utf-8")
        assert not runs_in_turns or by_seed[1] == pytest.approx(figure, abs=5e-4), "another time decides otherwise"


def test_one_more_normal_run_is_within_the_interval_in_95_percent():
    draw = random.Random(1)
    inside = 0
    for _ in range(4000):
        *values, more = (draw.gauss(0.5, 0.02) for _ in range(6))
        low, high = curves.interval(values)
        inside += low <= more <= high
    assert inside / 4000 == pytest.approx(0.95, abs=0.012)  # 3.5 standard errors


def test_nothing_held_out_is_trained_on_or_demonstrated(tmp_path):
    spec = importlib.util.spec_from_file_location("write", EXAMPLES / "tasks" / "write.py")
    write = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write)
    write.NUM_DEMONSTRATIONS, write.NUM_TRAINED = 600, 200
    write.write_tasks(tmp_path, seed=1)

    def subjects(path, column):
        rows = map(json.loads, path.read_text().splitlines())
        texts = [row[column] if column == "input" else row[column][0]["content"] for row in rows]
        return {re.search(rf"(?:{re.escape(write.SPELL)}|{write.RECORD})(\w+)", text)[0] for text in texts}

    demonstrated = subjects(tmp_path / "chats.jsonl", "chat")
    for task in ("backward", "record"):
        held_out, trained = (subjects(tmp_path / task / f"{split}.jsonl", "input") for split in ("heldout", "train"))
        assert len(held_out) == write.NUM_HELD_OUT and len(trained) == write.NUM_TRAINED
        assert not held_out & (trained | demonstrated) and not trained & demonstrated


@pytest.mark.slow
@recipes
def test_two_iterations_run(folder, tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "OUTPUTS": str(tmp_path)}
    command = ["bash", folder / "run.sh", "--smoke"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert re.search(rf"^{folder.name}: held-out (accuracy|reward) \S+ -> \S+ in \d+ s$", ended.stdout, re.MULTILINE)
    rows = [json.loads(line) for line in (tmp_path / "smoke" / folder.name / "metrics.jsonl").read_text().splitlines()]
    assert sum("rollout/reward" in row for row in rows) == 2
