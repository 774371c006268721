"""The site: its hook finds what would be loaded from the network, and the examples of docs/ci.md are right."""

import importlib.util
import re
import shlex

import pytest
import yaml

from miles.commands import check_reward, smoke
from tests.fast.docs.tutorial_page import REPO

spec = importlib.util.spec_from_file_location("docs_hooks", REPO / "scripts" / "docs_hooks.py")
docs_hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(docs_hooks)


def test_what_a_page_loads_from_the_network_is_found():
    page = """<a href="https://a"></a><link rel="canonical" href="https://b"><link rel="next" href="../c/">
    <script src="../d.js"></script><img src="data:image/png;base64,"><script>fetch("e")</script>"""
    assert docs_hooks.loaded_from_network(page) == []
    page += (
        """<script src="https://f/g.js"></script><link href="//h/i.css" rel="stylesheet"><img src="http://j/k.png">"""
    )
    assert docs_hooks.loaded_from_network(page) == ["https://f/g.js", "//h/i.css", "http://j/k.png"]


def test_formulas_are_drawn_by_files_of_the_repository():
    docs = REPO / "docs"
    text = (REPO / "mkdocs.yml").read_text(encoding="utf-8")
    named = [
        name for line in re.findall(r"^extra_(?:css|javascript): \[(.*)\]$", text, re.M) for name in line.split(", ")
    ]
    assert len(named) == 3 and all((docs / name).is_file() for name in named)
    style = (docs / "vendor" / "katex" / "katex.min.css").read_text(encoding="utf-8")
    fonts = re.findall(r"url\((fonts/[^)]*\.woff2)\)", style)
    assert len(fonts) == 20 and all((docs / "vendor" / "katex" / font).is_file() for font in fonts)
    assert (docs / "vendor" / "katex" / "LICENSE").is_file()


def commands_of_ci_page():
    """Return the words of every miles command in the YAML examples, by the name of the example's heading."""
    page = (REPO / "docs" / "ci.md").read_text(encoding="utf-8")
    found = {}
    for heading, block in re.findall(r"^## ([^\n]*)\n+```yaml\n(.*?)^```", page, re.M | re.S):
        example = yaml.safe_load(block)
        if "jobs" in example:
            lines = [step["run"] for job in example["jobs"].values() for step in job["steps"] if "run" in step]
        else:
            lines = [hook["entry"] for repository in example["repos"] for hook in repository["hooks"]]
        found[heading] = [words for words in map(shlex.split, lines) if words[0] == "miles"]
    return found


def test_the_examples_for_ci_use_flags_that_exist(capsys):
    found = commands_of_ci_page()
    assert {name: [words[1] for words in commands] for name, commands in found.items()} == {
        "GitHub Actions": ["check-reward", "smoke"],
        "pre-commit": ["check-reward"],
    }
    for words in (words for commands in found.values() for words in commands):
        with pytest.raises(SystemExit, match="0"):
            {"check-reward": check_reward, "smoke": smoke}[words[1]].main(["--help"])
        known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        own = words[2 : words.index("--")] if "--" in words else words[2:]
        assert {word for word in own if word.startswith("--")} <= known, words


def test_the_example_for_actions_installs_the_pinned_torch():
    page = (REPO / "docs" / "ci.md").read_text(encoding="utf-8")
    (torch,) = re.findall(r"pip install (torch==\S+)", page)
    assert torch in (REPO / "constraints.txt").read_text().splitlines()
