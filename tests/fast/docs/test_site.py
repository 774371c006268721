"""The site: its hook finds what would be loaded from the network, and the examples of docs/commands.md are right."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_formula_of_the_site_is_drawn(tmp_path):
    """In Chromium, from files alone: no formula has an error, and no page asks for a file that is not there."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium: apt-get install chromium, or name one in CHROMIUM")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", tmp_path / "site"]
    subprocess.run(command, cwd=REPO, check=True)
    pages = [path for path in (tmp_path / "site").rglob("index.html") if 'class="arithmatex"' in path.read_text()]
    written = sum(path.read_text().count('class="arithmatex"') for path in pages)
    drawn, wrong = 0, []
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "site")
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(120_000)
        # 304 is right too: the second page has the files of the first one in the browser's cache.
        page.on("response", lambda response: wrong.append(response.url) if response.status >= 400 else None)
        page.on("requestfailed", lambda request: wrong.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        for path in sorted(pages):
            page.goto(f"http://127.0.0.1:{server.server_port}/{path.relative_to(tmp_path / 'site')}")
            page.evaluate("MathJax.startup.promise")
            marked = page.locator(".arithmatex").count()
            assert page.locator(".arithmatex > mjx-container > svg").count() == marked, path
            wrong += page.locator("[data-mml-node='merror']").all_inner_texts()
            drawn += marked
        browser.close()
    server.shutdown()
    assert drawn == written > 0 and not wrong, (drawn, wrong)


def commands_of_ci_page():
    """Return the words of every miles command in the YAML examples, by the name of the example's heading."""
    page = (REPO / "docs" / "commands.md").read_text(encoding="utf-8")
    by_heading = {}
    for heading, block in re.findall(r"^### ([^\n]*)\n+```yaml\n(.*?)^```", page, re.M | re.S):
        example = yaml.safe_load(block)
        if "jobs" in example:
            lines = [step["run"] for job in example["jobs"].values() for step in job["steps"] if "run" in step]
        else:
            lines = [hook["entry"] for repository in example["repos"] for hook in repository["hooks"]]
        by_heading[heading] = [words for words in map(shlex.split, lines) if words[0] == "miles"]
    return by_heading


def test_the_examples_for_ci_use_flags_that_exist(capsys):
    by_heading = commands_of_ci_page()
    assert {name: [words[1] for words in commands] for name, commands in by_heading.items()} == {
        "GitHub Actions": ["check-reward", "smoke"],
        "pre-commit": ["check-reward"],
    }
    for words in (words for commands in by_heading.values() for words in commands):
        with pytest.raises(SystemExit, match="0"):
            {"check-reward": check_reward, "smoke": smoke}[words[1]].main(["--help"])
        known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        own = words[2 : words.index("--")] if "--" in words else words[2:]
        assert {word for word in own if word.startswith("--")} <= known, words


def test_the_example_for_actions_installs_the_pinned_torch():
    page = (REPO / "docs" / "commands.md").read_text(encoding="utf-8")
    (torch,) = re.findall(r"pip install (torch==\S+)", page)
    assert torch in (REPO / "constraints.txt").read_text().splitlines()
