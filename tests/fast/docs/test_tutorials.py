"""The tutorials do what they say: their files, commands and outputs are taken from the pages and run in order.

``TUTORIALS=whole`` runs the commands as written, with the quickstart's model. By default
a random model with two layers takes the place of the quickstart's model, and runs have fewer iterations.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from scripts.notebooks import notebook
from tests.fast.docs.tutorial_page import REPO, read_blocks, reader_environment, run_page

PAGES = REPO / "docs" / "tutorials"
IN_EVERY_RUN = "your-reward"  # needs no Ray
AS_WRITTEN = ("bad-run",)  # brings its own tiny model, and its verdicts need all iterations
SHORT = "--num-rollout 2 --rollout-batch-size 2 --n-samples-per-prompt 2 --fp32"
NAMES = sorted(page.stem for page in PAGES.glob("*.md"))


@pytest.fixture
def folder(tmp_path, tiny_model):
    if os.environ.get("TUTORIALS") != "whole":
        shutil.copytree(tiny_model, tmp_path / "outputs" / "models" / "SmolLM2-135M-Instruct")
    return tmp_path


def flags_of(name):
    """Return the flags that shorten the runs of a lesson."""
    return SHORT if os.environ.get("TUTORIALS") != "whole" and name not in AS_WRITTEN else ""


def run(name, folder):
    run_page(PAGES / f"{name}.md", folder, flags_of(name))


def test_every_block_of_every_tutorial_is_run_compared_or_an_example():
    """Every page has something to run, and the docs' first page lists it."""
    listed = (PAGES.parent / "index.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert any(block.language == "bash" and block.title is None for block in read_blocks(PAGES / f"{name}.md")), (
            name
        )
        assert f"(tutorials/{name}.md)" in listed, name


@pytest.mark.timeout(300)
def test_the_tutorial_of_rewards_does_what_it_says(folder):
    run(IN_EVERY_RUN, folder)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [name for name in NAMES if name != IN_EVERY_RUN])
def test_tutorial_does_what_it_says(name, folder):
    run(name, folder)


# What a kernel does with the cells of a notebook.
KERNEL = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        shell.run_cell("".join(cell["source"])).raise_error()
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_the_text_the_files_and_the_commands_of_its_lesson(name):
    page = PAGES / f"{name}.md"
    cells = json.loads(notebook(page.read_text()))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    code = [text for cell, text in zip(cells, texts, strict=True) if cell["cell_type"] == "code"]
    blocks = [block for block in read_blocks(page) if block.title is not None or block.language in ("bash", "python")]
    of_kind = {"bash": "%%script bash -euo pipefail\n", "python": ""}
    starts = [f"%%writefile {block.title}\n" if block.title else of_kind[block.language] for block in blocks]
    assert code == [start + block.text.rstrip("\n") for start, block in zip(starts, blocks, strict=True)]
    assert texts[0].startswith("# ") and len({cell["id"] for cell in cells}) == len(cells)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_of_a_notebook_runs(name, folder):
    path = folder / "lesson.ipynb"
    path.write_text(notebook((PAGES / f"{name}.md").read_text()))
    environ = reader_environment(folder, flags_of(name)) | {"IPYTHONDIR": str(folder / ".ipython")}
    subprocess.run([sys.executable, "-c", KERNEL, path], cwd=folder, env=environ, check=True)
