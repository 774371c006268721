"""Measure the live report of a run of 10,000 steps and 1,000,000 samples.

    python benchmarks/report_at_scale.py [FOLDER] [--steps 10000] [--samples-per-step 100] [--browser]

Makes the run folder (about 600 MB, kept if FOLDER is given), then measures each answer of the server, and with
--browser the time until the page shows curves, verdicts and samples in Chromium.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

from miles.observe.report.server import ReportServer
from miles.observe.run_files import METRICS, SAMPLES, RunHeader, dump_line

METRIC_NAMES = 40


def make_run(folder: Path, steps: int, samples_per_step: int) -> None:
    """Write run.json, metrics.jsonl and samples.jsonl, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "run.json").exists():
        return
    noise = random.Random(0)
    usual = ("rollout/reward", "train/entropy_loss", "train/grad_norm", "rollout/response_length", "train/loss")
    names = [*usual, *(f"train/metric_{i}" for i in range(METRIC_NAMES - len(usual)))]
    with (folder / METRICS).open("w") as file:
        for step in range(1, steps + 1):
            row = {name: math.exp(-3 * step / steps) + 0.1 * noise.random() for name in names}
            seconds = {"time/generate": 3.0, "time/train": 6.0, "time/forward_backward": 5.0, "time/step": 9.5}
            file.write(dump_line({"step": step, **row, **seconds}))
    text = " ".join(f"word{noise.randrange(1000)}" for _ in range(25))
    with (folder / SAMPLES).open("w") as file:
        for step in range(1, steps + 1):
            rows = [
                {
                    "rollout_id": step,
                    "prompt": f"Question {step}/{i // 10}: {text}",
                    "response": f"Answer {step}/{i}: {text}",
                    "reward": float(i % 2),
                    "label": "42",
                    "status": "completed",
                    "group": step * samples_per_step + i // 10,
                    "trajectory": step * samples_per_step + i,
                    "train_step": step,
                    "advantage": 2.0 * (i % 2) - 1,
                    "denominator": 25.0,
                    "trajectories": samples_per_step,
                }
                for i in range(samples_per_step)
            ]
            file.writelines(map(dump_line, rows))
    RunHeader("miles", {}, "a synthetic run", "", steps).save(folder)


def timed(server: ReportServer, what: str, path: str, **query: object) -> None:
    """Ask the server and print the milliseconds and kilobytes of its answer."""
    began = time.perf_counter()
    with urllib.request.urlopen(f"{server.url}api/{path}?{urllib.parse.urlencode(query)}") as response:
        body = response.read()
    assert "error" not in json.loads(body), body[:200]
    print(f"{what:44} {1000 * (time.perf_counter() - began):8.0f} ms {len(body) / 1000:8.0f} kB")


def browser_seconds(url: str, executable: str) -> tuple[float, float]:
    """Return the seconds from opening the page to the first curve and to the first answer."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        began = time.perf_counter()
        page.goto(url)
        page.wait_for_selector("#curves canvas")
        curves = time.perf_counter() - began
        page.wait_for_selector("#samples .answer")
        samples = time.perf_counter() - began
        browser.close()
    return curves, samples


def main() -> None:
    """Make the run, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--samples-per-step", type=int, default=100)
    parser.add_argument("--browser", metavar="CHROMIUM", help="also open the page in this Chromium")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        make_run(folder, options.steps, options.samples_per_step)
        size = (folder / SAMPLES).stat().st_size / 1e6
        print(f"{options.steps} steps, {options.steps * options.samples_per_step} samples, {size:.0f} MB of samples")
        server = ReportServer(folder, 0)
        if options.browser:
            print(
                "page opened, server fresh: curves after {:.2f} s, answers after {:.2f} s".format(
                    *browser_seconds(server.url, options.browser)
                )
            )
            server.close()
            server = ReportServer(folder, 0)
        middle = options.steps // 2
        timed(server, "overview, the first time (reads metrics)", "overview")
        timed(server, "one curve of all steps", "metrics", names="rollout/reward")
        timed(server, "one curve of 1,000 steps", "metrics", names="rollout/reward", **{"from": 1, "to": 1000})
        timed(server, "seconds by phase", "phases")
        timed(server, "newest iteration", "samples")
        timed(server, f"iteration {middle}", "samples", step=middle)
        timed(server, "one sample with its ledger", "sample", step=middle, index=1)
        timed(server, "search, first page", "search", text=f"answer {middle}/")
        server.close()


if __name__ == "__main__":
    main()
