"""The page in a real Chromium: opens, updates, filters, colours, keys, dark mode, a narrow window, no network.

Chromium is the system's (``CHROMIUM`` names another). With ``REPORT_PICTURES=FOLDER`` the pictures of docs/report.md
are written there.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from run_folder import SETTINGS, healthy_row, sample, write_header, write_rows, write_run
from sweep_files import planned, write_run_of

from miles.commands.sweeps.results import Results, write_page
from miles.observe.page import write_report
from miles.observe.report.comparison import Comparison
from miles.observe.report.server import ReportServer
from miles.observe.run_files import FILE_NAME, RunFiles

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium, or name one in CHROMIUM"),
    pytest.mark.timeout(900),
]
DARK_PAGE, LIGHT_PAGE = "rgb(21, 23, 26)", "rgb(247, 247, 245)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Open pages that may not write to the console or ask anything but their own server."""
    said: list[str] = []
    contexts = []

    def open_page(url: str, width: int = 1280, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "request", lambda request: said.append(request.url) if not request.url.startswith((url, "data:")) else 0
        )
        page.goto(url)
        page.wait_for_selector("figure, .error")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not said, "the console is silent, and nothing is asked of another address"


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[ReportServer] = []

    def serve(folder: Path) -> str:
        servers.append(ReportServer(folder, 0))
        return servers[-1].url

    yield serve
    for server in servers:
        server.close()


def picture(page: Any, name: str, **options: Any) -> None:
    """Write a picture of the docs if asked to."""
    if folder := os.environ.get("REPORT_PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}.png", **options)


def write_varied_run(folder: Path, steps: int = 34) -> Path:
    """Write a run whose groups differ: group 0 has equal rewards, group 1 mixed ones and a truncated answer."""
    write_header(folder, total_steps=steps)
    write_rows(folder, ((step, healthy_row(step, steps)) for step in range(1, steps + 1)))
    for step in range(1, steps + 1):
        equal = [sample(0, 6 * step + i, reward=0.0, advantage=0.0) for i in range(3)]
        mixed = [
            sample(1, 6 * step + 3, reward=0.0, advantage=-1.4, status="truncated"),
            *(sample(1, 6 * step + i, reward=1.0, advantage=0.7) for i in (4, 5)),
        ]
        records = [replace(record, train_step=step, trajectories=6) for record in equal + mixed]
        RunFiles(folder).append_samples(step, records)
    return folder


def test_the_page_shows_every_section_of_a_run(tmp_path: Path, open_page: Any, serve: Any) -> None:
    page = open_page(serve(write_run(tmp_path / "run", steps=50)))
    assert page.locator("h1").inner_text() == "miles: run"
    assert page.locator(".light.ok").count() == 9 and page.locator(".verdict").count() == 0
    assert page.locator(".answer").first.inner_text().startswith("It learned: held-out reward rose from ")
    assert page.locator("#charts-main figure").evaluate_all("all => all.map(each => each.dataset.title)") == [
        "Held-out reward",
        "Reward",
    ]
    assert page.locator("#charts-main").evaluate("main => main.getBoundingClientRect().bottom") < 900
    page.locator("#time").scroll_into_view_if_needed()
    page.wait_for_selector("#time canvas")
    assert "forward_backward" in page.locator("#time .readout").inner_text()
    assert page.locator("#engine figure").count() == 5 and page.locator("#engine figure:visible").count() == 4
    page.locator("#engine .more").click()
    assert page.locator("#engine figure:visible").count() == 5
    assert "Zero throughout: Clip fraction" in page.locator("#stability .zeros").inner_text()
    for title in ("Throughput", "Engine utilization", "Memory of the trainer"):
        assert page.locator(f"#engine figure[data-title='{title}']").count() == 1
    assert page.locator("#samples .answer").count() == 2, "one group"
    assert page.locator(".changed td").all_inner_texts() == ["optimizer.lr", "1e-05", "1e-06"]


PICTURES = Path(__file__).parents[4] / "docs" / "pictures"
BLOCK = 20  # pixels: fonts differ between machines, layouts do not
DIFFERENT = 8  # of 255: a block that differs by more has other content
# Of the blocks. Another font makes 0.016 of them differ, a page without its curves 0.047, without its lights 0.088.
MOST_DIFFERENT = 0.03


@pytest.mark.parametrize(("name", "width"), [("report", 1400), ("phone", 390)])
def test_the_first_screen_looks_like_the_picture_of_the_docs(
    tmp_path: Path, open_page: Any, name: str, width: int
) -> None:
    """``REPORT_PICTURES=docs/pictures`` makes the pictures again."""
    page = open_page(write_report(write_run(tmp_path / "run", steps=50), 4).as_uri(), width=width)
    page.locator("#charts-main canvas").nth(1).wait_for()
    picture(page, name)
    shots = [Image.open(file) for file in (PICTURES / f"{name}.png", io.BytesIO(page.screenshot()))]
    assert shots[0].size == shots[1].size == (width, 900)
    before, now = (np.asarray(shot.convert("L").reduce(BLOCK), dtype=int) for shot in shots)
    assert (abs(now - before) > DIFFERENT).mean() < MOST_DIFFERENT


def test_the_page_follows_a_run_that_continues(tmp_path: Path, open_page: Any, serve: Any) -> None:
    page = open_page(serve(write_run(tmp_path, steps=5)))
    page.get_by_text("live · step 5 of 5").wait_for()
    page.get_by_text("Step 5:").wait_for()
    write_rows(tmp_path, [(6, healthy_row(6, 6) | {"rollout/reward": 0.123, "train/something_new": 1.0})])
    RunFiles(tmp_path).append_samples(6, [sample(0, 0, response="the newest answer")])
    page.get_by_text("live · step 6 of 5").wait_for()
    page.get_by_text("the newest answer").wait_for()
    page.locator("figure", has_text="train/something_new").wait_for(state="attached")
    assert "0.123" in page.locator(".tile", has_text="reward").inner_text()


def test_the_page_waits_for_a_run_that_has_not_started(
    tmp_path: Path, open_page: Any, serve: Any, browser: Any
) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(serve(tmp_path))
    page.get_by_text("no run.json there").wait_for()
    write_header(tmp_path, total_steps=3)
    page.get_by_text("no step has finished yet").wait_for()
    write_rows(tmp_path, [(1, {"rollout/reward": 0.5})])
    page.get_by_text("live · step 1 of 3").wait_for()
    context.close()


def test_an_unhealthy_run_says_what_to_look_at(tmp_path: Path, open_page: Any, serve: Any) -> None:
    write_header(tmp_path, total_steps=40)
    bad = {"rollout/reward": 0.2, "rollout/truncated_fraction": 0.9}
    write_rows(tmp_path, ((step, healthy_row(step, 40) | bad) for step in range(1, 41)))
    page = open_page(serve(tmp_path))
    verdict = page.locator(".verdict.unhealthy", has_text="Truncated").inner_text()
    assert page.locator(".answer.bad").inner_text().startswith("It did not learn: reward has been 0.2 in every")
    assert "90.0% of the answers" in verdict and "--rollout-max-response-len" in verdict
    picture(page.locator("#health"), "health")


def test_groups_are_filtered_and_ordered(tmp_path: Path, open_page: Any, serve: Any) -> None:
    page = open_page(serve(write_varied_run(tmp_path)))
    groups = page.locator("#samples .group h3")
    page.wait_for_selector("#samples .group")
    assert groups.count() == 1 and "group 1 of 2" in page.locator("#samples").inner_text()
    page.keyboard.press("j")
    assert "group 2 of 2" in page.locator("#samples").inner_text()
    for choice, title in (("mixed", "group 1"), ("equal", "group 0"), ("truncated", "group 1")):
        page.get_by_label("groups shown").select_option(choice)
        assert groups.count() == 1 and groups.first.inner_text().startswith(title)
    page.get_by_label("groups shown").select_option("all")
    page.get_by_label("order of groups").select_option("highest")
    assert groups.first.inner_text().startswith("group 1")


def test_any_iteration_and_any_text_is_found(tmp_path: Path, open_page: Any, serve: Any) -> None:
    write_varied_run(tmp_path)
    RunFiles(tmp_path).append_samples(35, [sample(0, 0, response="a needle in a haystack")])
    page = open_page(serve(tmp_path))
    page.get_by_text("Step 35:").wait_for()
    page.get_by_label("iteration, by its last step").fill("12")
    page.keyboard.press("Enter")
    page.get_by_text("Step 12:").wait_for()
    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("n")
    page.get_by_text("Step 13:").wait_for()
    page.keyboard.press("p")
    page.get_by_text("Step 12:").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("NEEDLE in")
    page.keyboard.press("Enter")
    page.locator(".hits .answer").wait_for()
    assert page.locator(".hits .answer").count() == 1
    assert "step 35" in page.locator(".hits .answer").inner_text()


def backgrounds(page: Any) -> list[str]:
    return page.locator("dialog .tokens span").evaluate_all(
        "spans => spans.map(s => getComputedStyle(s).backgroundColor)"
    )


def test_tokens_are_coloured_and_the_ledger_adds_up(tmp_path: Path, open_page: Any, serve: Any) -> None:
    page = open_page(serve(write_varied_run(tmp_path)))
    page.get_by_label("groups shown").select_option("mixed")
    assert "×2" in page.locator("#samples .answer").first.inner_text(), "two equal answers are one"
    page.locator("#samples .answer").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open] .ledger")
    by_credit = backgrounds(page)
    assert by_credit[0] == by_credit[1] == by_credit[3] != by_credit[2]  # the tool's token has no weight
    page.get_by_label("colour tokens by").select_option("rollout_log_probs")
    assert backgrounds(page) != by_credit
    page.locator("dialog .tokens span").nth(3).hover()
    assert "engine log-prob -3" in page.locator("dialog .status").inner_text()
    assert [role.inner_text() for role in page.locator("dialog .turn h4").all()] == [
        "user",
        "model",
        "tool or environment",
        "model",
    ]
    picture(page, "sample")
    page.locator("dialog .close").focus()
    for key, number in ((".", 0), (".", 1), (",", 0), (",", 0)):
        page.keyboard.press(key)
        assert page.locator("dialog .tokens .at").get_attribute("data-token") == str(number)
        assert page.locator("dialog .status").inner_text().startswith(f"token {number} ")
    ledger = page.locator(".ledger").inner_text()
    assert "mass of the step\t1\t" in ledger and "6 of 6 trajectories" in ledger
    assert "Answer 1 of 2" in page.locator("dialog h2").inner_text()
    page.locator("dialog .close").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_text("Answer 2 of 2").wait_for()
    assert backgrounds(page)  # the chosen colouring stays
    assert page.get_by_label("colour tokens by").input_value() == "rollout_log_probs"
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog:not([open])", state="attached")


def test_tokens_are_coloured_by_what_the_trainer_recorded(tmp_path: Path, open_page: Any, serve: Any) -> None:
    write_header(tmp_path, SETTINGS | {"loss": SETTINGS["loss"] | {"use_tis": True}})
    write_rows(tmp_path, [(1, {"rollout/reward": 0.5})])
    recorded = {
        "reward_parts": {"math": 1.0, "format": 0.5},
        "log_probs": [-0.1, -1.1, -2.0, -4.0],
        "ratios": [1.0, 1.4, 1.0, 0.6],
        "token_weights": [1.0, 0.5, 1.0, 2.0],
        "advantages": [0.5, -0.5, 0.0, 1.0],
    }
    RunFiles(tmp_path).append_samples(1, [sample(0, 1, **recorded), sample(0, 2), sample(1, 3), sample(1, 4)])
    for url in (serve(tmp_path), write_report(tmp_path, 1).as_uri()):
        page = open_page(url)
        page.get_by_label("groups shown").select_option("recorded")
        assert page.locator("#samples .group").count() == 1
        card = page.locator("#samples .answer").first
        assert "math 1 · format 0.5" in card.inner_text() and "ratio and gap" in card.inner_text()
        card.click()
        page.wait_for_selector("dialog[open] .ledger")
        assert "reward 1 (math 1 · format 0.5)" in page.locator("dialog .facts").inner_text()
        plain = "rgba(0, 0, 0, 0)"
        seen = {}
        for choice in ("credit", "ratio", "mask", "gap"):
            page.get_by_label("colour tokens by").select_option(choice)
            seen[choice] = backgrounds(page)
            assert page.locator("dialog .key-words").inner_text()
        assert len({tuple(colours) for colours in seen.values()}) == 4
        assert seen["ratio"][0] == seen["ratio"][2] == plain, "a ratio of 1 and a token outside the loss"
        assert len({seen["ratio"][i] for i in (0, 1, 3)}) == 3, "above, at and below 1"
        assert seen["gap"][0] == plain and seen["gap"][1] != seen["gap"][3]
        assert len(set(seen["credit"])) == 4
        page.locator("dialog .tokens span").nth(1).hover()
        figures = page.locator("dialog .status").inner_text()
        for figure in ("ratio 1.4", "trainer − engine log-prob 0.4", "mask 1", "advantage -0.5", "weight 0.04167"):
            assert figure in figures, figures
        assert "by --use-tis" in page.locator(".ledger").inner_text()
        page.get_by_label("colour tokens by").select_option("credit")
        if url.startswith("http"):
            picture(page, "tokens")


PROMPTS = {
    "ChatML": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n[INST] U<|im_end|>\n<|im_start|>assistant\n",
    "Llama 3": "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n[INST] U<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "Gemma": "<start_of_turn>system\nS<end_of_turn>\n<start_of_turn>user\n[INST] U<end_of_turn>\n"
    "<start_of_turn>model\n",
    "Kimi": "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>[INST] U<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>",
    "GLM": "<|system|>\nS<|user|>\n[INST] U<|assistant|>",
    "DeepSeek": "S<｜User｜>[INST] U<｜Assistant｜>",
    "Mistral": "S[INST] U[/INST]",
}


def test_prompts_are_cut_into_turns(tmp_path: Path, open_page: Any, serve: Any) -> None:
    page = open_page(serve(write_run(tmp_path, steps=2)))
    for family, prompt in PROMPTS.items():
        turns = [(turn["role"], turn["text"]) for turn in page.evaluate("prompt => turns(prompt)", prompt)]
        system = "prompt" if family in ("DeepSeek", "Mistral") else "system"
        assert turns == [(system, "S"), ("user", "U" if family == "Mistral" else "[INST] U")], family
    assert page.evaluate("turns('1 + 1 = ')") == [{"role": "prompt", "text": "1 + 1 = "}]


def test_calls_of_tools_and_parts_of_a_trajectory_are_named(tmp_path: Path, open_page: Any, serve: Any) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}</tool_call>'
    asks = sample(0, 1, tokens=["Let me add. ", call, "<tool_response>3</tool_response>", "<tool_call>oh</tool_call>"])
    write_header(tmp_path)
    write_rows(tmp_path, [(1, {"rollout/reward": 0.5})])
    RunFiles(tmp_path).append_samples(1, [asks, sample(0, 1), sample(0, 2)])
    page = open_page(serve(tmp_path))
    cards = page.locator("#samples .answer")
    page.wait_for_selector("#samples .answer")
    assert ["trajectory 1, part 1 of 2" in text for text in cards.all_inner_texts()] == [True, False, False]
    assert sorted("part" in text for text in cards.all_inner_texts()) == [False, True, True]
    cards.first.click()
    page.wait_for_selector("dialog[open] .call")
    assert page.locator("dialog .call").all_inner_texts() == [
        'calls add(a: 1, b: [2,"x"])',
        "calls a tool, but not as JSON",
    ]


def test_curves_are_zoomed_smoothed_hovered_and_filtered(tmp_path: Path, open_page: Any, serve: Any) -> None:
    page = open_page(serve(write_run(tmp_path, steps=60)))
    reward = page.locator("figure[data-title=Reward]")
    reward.locator("canvas").wait_for()
    reward.locator(".u-over").hover(position={"x": 100, "y": 50})
    assert reward.locator(".readout").inner_text().startswith("step ")
    assert page.locator("#curves .readout", has_text="step ").count() > 1  # the charts share their cursor
    reward.locator(".plot").focus()
    page.mouse.move(5, 5)
    page.keyboard.press("ArrowRight")
    assert "step 1" in reward.locator(".readout").inner_text()
    with page.expect_response(lambda response: "from=10" in response.url and "to=20" in response.url):
        page.get_by_label("first step shown").fill("10")
        page.get_by_label("last step shown").fill("20")
        page.keyboard.press("Enter")
    page.wait_for_selector("figure[data-title=Reward][data-points='11']")
    box = reward.locator(".u-over").bounding_box()
    with page.expect_response(lambda response: "api/metrics" in response.url and "from=1" in response.url):
        page.mouse.move(box["x"] + 200, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + 400, box["y"] + 40)
        page.mouse.up()
    assert page.get_by_label("first step shown").input_value() not in ("", "10")
    page.locator("#zoom-all").click()
    assert page.get_by_label("first step shown").input_value() == ""
    page.locator("#smoothing").fill("0.9")
    page.locator("#chart-filter").fill("entropy")
    assert page.locator("#curves figure:visible").count() == 1


def test_bars_of_several_iterations_are_found_by_any_of_their_steps(tmp_path: Path, open_page: Any) -> None:
    page = open_page(write_report(write_run(tmp_path, steps=450), 1).as_uri())
    bars = page.locator("#time figure")
    bars.scroll_into_view_if_needed()
    page.wait_for_selector("#time figure[data-points='150']")
    for first, last, points, words in (
        (200, 200, 1, "mean of 3 iterations up to step 201"),
        (199, 202, 2, "mean of 3 iterations up to step 204"),
        (900, 901, 0, "\u00a0"),
    ):
        page.evaluate("([first, last]) => zoom(first, last)", [first, last])
        page.wait_for_selector(f"#time figure[data-points='{points}']")
        assert bars.locator(".readout").inner_text().startswith(words)


def test_a_long_curve_shows_its_last_value(tmp_path: Path, open_page: Any, serve: Any) -> None:
    write_header(tmp_path, total_steps=2100)
    write_rows(tmp_path, ((step, {"rollout/reward": step % 2 * 0.5}) for step in range(1, 2100)))
    write_rows(tmp_path, [(2100, {"rollout/reward": 0.25})])
    for url in (serve(tmp_path), write_report(tmp_path, 0).as_uri()):
        page = open_page(url)
        reward = page.locator("figure[data-title=Reward]")
        reward.locator("canvas").wait_for()
        assert reward.locator("figcaption b").inner_text() == "0.25"
        reward.locator(".u-over").hover(position={"x": 100, "y": 50})
        assert reward.locator(".readout").inner_text().startswith("near step ")
        page.evaluate("zoom(1, 100)")
        page.wait_for_selector("figure[data-title=Reward]:not([data-points='1500']):not([data-points='2000'])")
        assert reward.locator("figcaption b").inner_text() == "0"


def test_ticks_that_are_close_together_have_different_labels(tmp_path: Path, open_page: Any, serve: Any) -> None:
    page = open_page(serve(write_run(tmp_path, steps=2)))
    for ticks, step, labels in (
        ([0.99998, 1, 1.00002], 0.00002, ["0.99998", "1", "1.00002"]),
        ([-10000.25, -10000], 0.25, ["-10,000.25", "-10,000"]),
        ([0, 5e-7], 5e-7, ["0", "5e-7"]),
        ([0, 100000], 1e5, ["0", "100,000"]),
    ):
        assert page.evaluate("([ticks, step]) => ticks.map(tick => tickLabel(tick, step))", [ticks, step]) == labels


def test_charts_that_are_replaced_are_freed(tmp_path: Path, open_page: Any, serve: Any) -> None:
    page = open_page(serve(write_run(tmp_path, steps=5)))
    page.locator("figure[data-title=Reward] canvas").wait_for()
    write_rows(tmp_path, [(6, healthy_row(6, 6) | {"train/something_new": 1.0})])
    page.locator("figure", has_text="train/something_new").wait_for(state="attached")
    page.locator("figure[data-title=Reward] canvas").wait_for()
    assert page.evaluate("uPlot.sync('run').plots.every(plot => document.body.contains(plot.root))")


def test_a_step_asked_for_before_there_are_answers_is_followed_by_the_newest(
    tmp_path: Path, open_page: Any, serve: Any
) -> None:
    write_header(tmp_path)
    write_rows(tmp_path, [(1, {"rollout/reward": 0.5})])
    page = open_page(serve(tmp_path))
    page.get_by_text("No answers are stored yet.").wait_for()
    page.get_by_label("iteration, by its last step").fill("1")
    page.keyboard.press("Enter")
    write_rows(tmp_path, [(2, {"rollout/reward": 0.5})])
    RunFiles(tmp_path).append_samples(2, [sample(0, 0, reward=None), sample(0, 1, reward=None), sample(1, 2)])
    page.get_by_text("Step 2:").wait_for()
    assert "mean reward –" in page.locator("#samples .group h3").first.inner_text()
    page.get_by_label("order of groups").select_option("lowest")
    assert "group 1" in page.locator("#samples .group h3").first.inner_text()


def test_a_late_answer_does_not_replace_the_sample_that_was_asked_for_last(
    tmp_path: Path, open_page: Any, serve: Any
) -> None:
    page = open_page(serve(write_varied_run(tmp_path, 2)))
    page.locator("#samples .answer").first.wait_for()
    text = page.evaluate("""async () => {
      const given = {}, dialog = page.samples.dialog, ask = page.source.sample.bind(page.source);
      page.source.sample = (step, index) => new Promise(answer => {
        given[index] = async () => answer(await ask(step, index));
      });
      const both = [dialog.open(2, 2, [2, 3]), dialog.open(2, 3, [2, 3])];
      await given[3]();
      await given[2]();
      await Promise.all(both);
      return dialog.dialog.textContent;
    }""")
    assert "Answer 2 of 2" in text and "group 1" in text


def test_calls_that_are_never_closed_take_no_time(tmp_path: Path, open_page: Any, serve: Any) -> None:
    page = open_page(serve(write_run(tmp_path, steps=2)))
    seconds = page.evaluate("""() => {
      const began = performance.now();
      toolCalls('<tool_call>'.repeat(30000));
      return (performance.now() - began) / 1000;
    }""")
    assert seconds < 1
    assert page.evaluate("toolCalls('</tool_call><tool_call><tool_call>x</tool_call>y</tool_call>').length") == 1


FORMULAS = [
    "loss = pg_loss + 0.01 KL_k3 - 1e-05 entropy",
    "pg_loss = 1/(L P) Σ_g Σ_(r in g) x_r Σ_(i in r, t) m_it w_it l_it",
    "l_it = max(-ρ A, -clip(ρ, 0.8, 1.2) A), ρ = exp(log p - log p_old)",
    "w = clip(r, 0.5, 2), r = p_old / p_engine of the token",
    "-A log p, and 0.05 (Σ over the sequence of log p - log p_old)² for each sequence",
    "A_t = G_t - B_t, G_t = Σ_(k>=t) r_k, r_k = [k is last] reward",
    "kl_coef <- kl_coef (1 + e N / 10000) after each step",
    "-sg(φ) A log p, φ = W^c1 exp(c2 (1 - W)), sg() has no gradient",
    "A = my_module.advantages:f(...) instead of --advantage-estimator grpo",
    "unclosed ((x / y and ) closed )) 1/ ^ ² Σ_( <script>",
]


def test_the_objective_is_typeset_without_loss(tmp_path: Path, open_page: Any) -> None:
    write_run(tmp_path, steps=3)
    header = json.loads((tmp_path / FILE_NAME).read_text())
    (tmp_path / FILE_NAME).write_text(json.dumps(header | {"objective_formula": "\n".join(FORMULAS)}))
    page = open_page(write_report(tmp_path, 1).as_uri())
    assert not page.locator(".formula").is_visible()
    page.locator(".objective summary").click()
    lines = page.locator(".formula math")
    assert lines.evaluate_all("all => all.map(line => line.getAttribute('aria-label'))") == FORMULAS
    signs = str.maketrans({"−": "-", "←": "<-", "≥": ">=", "∑": "Σ", "·": "*"})
    for formula, text in zip(FORMULAS[:-1], lines.all_text_contents(), strict=False):
        letters, read = (re.sub(r"[\s()/_²^]", "", each.translate(signs)) for each in (formula, text))
        assert read.replace("2", "") == letters.replace("2", ""), "a square is a 2 on high"
    assert lines.nth(1).locator("munder").count() == 3 and lines.nth(1).locator("mfrac").count() == 1
    assert lines.nth(0).bounding_box()["height"] > 10 and page.locator("main script").count() == 0


def test_dark_mode_follows_the_system_and_the_key(tmp_path: Path, open_page: Any, serve: Any) -> None:
    url = serve(write_run(tmp_path, steps=30))
    page = open_page(url, color_scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(colour) == DARK_PAGE
    page.keyboard.press("t")
    assert page.evaluate(colour) == LIGHT_PAGE
    page.locator("#theme").click()
    assert page.evaluate(colour) == DARK_PAGE


def test_a_window_of_400_pixels_needs_no_sideways_scrolling(tmp_path: Path, open_page: Any, serve: Any) -> None:
    folder = write_run(tmp_path, steps=30)
    long = {"response": "x" * 500, "tokens": ["x" * 300] * 4, "label": "y" * 200}
    RunFiles(folder).append_samples(31, [sample(0, 0, **long)])
    page = open_page(serve(folder), width=400)
    page.wait_for_selector("#samples .answer")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.evaluate("document.getElementById('samples').getBoundingClientRect().top + scrollY") < 3000
    assert page.locator("#curves figure").first.bounding_box()["width"] <= 400
    page.locator("#samples .answer").first.click()
    page.wait_for_selector("dialog[open]")
    assert page.evaluate("document.querySelector('dialog').scrollWidth") <= 400


def test_the_static_file_works_without_a_server(tmp_path: Path, open_page: Any) -> None:
    path = write_report(write_varied_run(tmp_path), 6)
    page = open_page(path.as_uri())
    page.wait_for_selector("#samples .answer")
    assert page.locator(".light").count() == 9
    page.get_by_role("button", name="previous").first.press("Enter")  # the charts, still being drawn, move it
    page.get_by_text("Step 33:").wait_for()
    page.locator("#samples .answer").first.click()
    page.wait_for_selector("dialog[open] .ledger")
    page.keyboard.press("Escape")
    page.locator("#search").fill("It is 2.")
    page.keyboard.press("Enter")
    page.locator(".hits .answer").first.wait_for()
    page.get_by_label("first step shown").fill("10")
    page.keyboard.press("Tab")
    page.locator("#time").scroll_into_view_if_needed()
    page.wait_for_selector("#time canvas")


# What ends a script, begins one that hides the end of the next, or ends a title.
ATTACK = (
    "<!--<script><img src=x onerror=\"document.title='owned'\"></SCRIPT ></script>"
    "<script>document.title='owned'</script></title></textarea><b>&lt;"
)


def test_what_a_model_wrote_runs_nothing(tmp_path: Path, open_page: Any, serve: Any) -> None:
    write_header(tmp_path, SETTINGS | {"loss": {"note": ATTACK}})
    header = json.loads((tmp_path / FILE_NAME).read_text())
    (tmp_path / FILE_NAME).write_text(json.dumps(header | {"title": ATTACK}))
    write_rows(tmp_path, [(1, {"rollout/reward": 1.0, f"eval/{ATTACK}/accuracy": 1.0})])
    RunFiles(tmp_path).append_samples(
        1, [sample(0, 0, prompt=ATTACK, response=ATTACK, label=ATTACK, tokens=[ATTACK] * 4)]
    )
    for url in (serve(tmp_path), write_report(tmp_path, 4).as_uri()):
        page = open_page(url)
        page.locator("#samples .answer").first.click()
        page.wait_for_selector("dialog[open] .tokens")
        assert page.title() == ATTACK and page.locator("h1").text_content() == f"{ATTACK}: {tmp_path.name}"
        assert page.locator("dialog .tokens span").first.text_content() == ATTACK
        assert page.locator("main img, dialog img, main b b, body > b").count() == 0


def test_names_of_runs_and_sweeps_are_text_only(tmp_path: Path, open_page: Any) -> None:
    name = ATTACK.replace("/", "")
    folders = [write_run(tmp_path / name, steps=3), write_run(tmp_path / f"{name} 2", steps=3)]
    (tmp_path / "compare.html").write_bytes(Comparison(folders).page())
    definition, runs = planned(tmp_path / "sweep", variants={"a": {}, "b": {}}, seeds=["1"])
    definition = replace(definition, path=definition.path.with_stem(name))
    rows = [write_run_of(run) for run in runs]
    pages = {tmp_path / "compare.html": f"{name} / {name} 2"}
    pages[write_page(Results(definition, rows), tmp_path)] = f"sweep: {name}"
    for path, title in pages.items():
        page = open_page(path.as_uri())
        assert page.title() == page.locator("h1").text_content() == title
        assert page.locator("main img").count() == 0


def test_compared_runs_are_drawn_over_each_other(tmp_path: Path, open_page: Any) -> None:
    folders = [write_run(tmp_path / "first", steps=30), tmp_path / "second"]
    write_header(folders[1], SETTINGS | {"optimizer": {"lr": 3e-6}}, total_steps=30)
    write_rows(folders[1], ((step, healthy_row(step, 30) | healthy_row(step // 2, 30)) for step in range(1, 31)))
    (tmp_path / "compare.html").write_bytes(Comparison(folders).page())
    page = open_page((tmp_path / "compare.html").as_uri())
    reward = page.locator("figure[data-title=Reward]")
    assert [entry.strip().split()[0] for entry in reward.locator(".readout span").all_inner_texts()] == [
        "first",
        "second",
    ]
    assert "First step at which metrics differ" in page.locator("#tables").inner_text()
    picture(page, "compare")


FAINT = """canvas => {
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let i = 3; i < data.length; i += 4) count += data[i] > 40 && data[i] < 52;  // of 255: an opacity of 0.18
  return count;
}"""


def test_the_curves_of_a_sweep_have_bands(tmp_path: Path, open_page: Any) -> None:
    """Four seeds of two variants; the metric that one seed alone has is a line without a band."""

    def metrics(variant: str, seed: int, step: int) -> dict[str, float]:
        row = healthy_row(step + (6 if variant == "clip-higher" else 0), 30)
        row = {name: value * (1 + 0.3 * (seed - 2.5) / 2.5) for name, value in row.items()}
        return row | ({"train/own": float(step)} if seed == 1 else {})

    variants = {"symmetric": {}, "clip-higher": {"eps_clip_high": "0.28"}}
    definition, runs = planned(tmp_path, variants=variants, seeds=["1", "2", "3", "4"])
    results = Results(definition, [write_run_of(run, metrics, 30) for run in runs])
    page = open_page(write_page(results, tmp_path).as_uri())
    assert page.locator("h1").inner_text() == "sweep: sweep"
    reward, own = (page.locator(f"figure[data-title='{title}']") for title in ("Reward", "train/own"))
    assert [text.split()[0] for text in reward.locator(".readout span").all_inner_texts()] == [*variants]
    assert reward.locator("canvas").evaluate(FAINT) > 2000
    page.evaluate("scrollTo(0, 0)")
    picture(page, "sweep")
    page.locator("#chart-filter").fill("train/own")
    own.scroll_into_view_if_needed()
    assert own.locator("canvas").evaluate(FAINT) < 500
    page.locator("#chart-filter").fill("")
    tables = page.locator("#tables").inner_text()
    assert "Difference from symmetric, at the same seed" in tables and "loss.eps_clip_high" in tables
    page.evaluate("scrollTo(0, 0)")
    picture(page, "sweep")
