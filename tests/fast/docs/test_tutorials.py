"""The tutorials do what they say: their files, commands and outputs are taken from the pages and run in order.

``TUTORIALS=whole`` runs the commands as written, with the quickstart's model. By default
a random model with two layers takes the place of the quickstart's model, and runs have fewer iterations.
"""

import os
import shutil

import pytest

from tests.fast.docs.tutorial_page import REPO, missing_line, read_blocks, run_page

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


def run(name, folder):
    short = os.environ.get("TUTORIALS") != "whole" and name not in AS_WRITTEN
    run_page(PAGES / f"{name}.md", folder, SHORT if short else "")


def test_every_block_of_every_tutorial_is_run_compared_or_an_example():
    """Every page has something to run, and the docs' first page lists it."""
    listed = (PAGES.parent / "index.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert any(block.language == "bash" and block.title is None for block in read_blocks(PAGES / f"{name}.md")), (
            name
        )
        assert f"(tutorials/{name}.md)" in listed, name


def test_an_output_is_compared_line_by_line():
    output = "a 1\nb 2.5 s\n\nc\n"
    assert missing_line("a 1\nb … s\nc", output) is None
    assert missing_line("b … s\na 1", output) == "a 1"
    assert missing_line("b", output) == "b"


@pytest.mark.timeout(300)
def test_the_tutorial_of_rewards_does_what_it_says(folder):
    run(IN_EVERY_RUN, folder)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [name for name in NAMES if name != IN_EVERY_RUN])
def test_tutorial_does_what_it_says(name, folder):
    run(name, folder)
