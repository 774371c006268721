"""The report is one page, loads nothing from outside, and executes nothing that a model wrote."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.tracking.report import MAX_ROLLOUTS_SHOWN, main, render, write_report
from miles.tracking.report_style import SCRIPT, STYLE
from miles.tracking.run_files import REPORT, RunFiles, SampleRecord
from miles.tracking.run_header import RunHeader

VOID = {"meta", "line", "circle", "polyline", "polygon"}
HEADER = RunHeader("a run", {"loss": {"lr": 1e-5}}, "words", "1/N Σ", 9, {"loss": {"lr": 1e-6}})


class Page(HTMLParser):
    """Collect elements, attributes and text; assert that elements are nested correctly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        where = self.open[-1] if self.open else ""
        self.text[where] = self.text.get(where, "") + data


def rows(count: int) -> list[dict[str, float]]:
    keys = ("rollout/reward", "eval/unseen/accuracy", "train/kl_loss", "time/generate", "time/step")
    return [{"step": step, **{key: step / count for key in keys}, "train/grad_norm": math.nan} for step in range(count)]


def answer(text: str) -> SampleRecord:
    return SampleRecord(text, text, 1.0, text, "completed")


def test_nothing_is_loaded_from_outside() -> None:
    page = Page(render(HEADER, rows(50), {0: [answer("x")]}))
    assert not {name for name, _ in page.attributes} & {"src", "href", "srcset", "xlink:href", "onload", "onerror"}
    assert not set(page.tags) & {"link", "img", "iframe", "object", "embed", "base"}
    for code in (STYLE, SCRIPT):
        assert not any(loader in code for loader in ("http:", "https:", "url(", "@import", "fetch(", "XMLHttpRequest"))


@settings(max_examples=40)
@given(
    st.text(min_size=1, max_size=40)
    | st.sampled_from(["<script>alert(1)</script>", '"><img src=x onerror=y>', "</pre></main>"])
)
def test_what_a_model_or_a_user_wrote_is_text(text: str) -> None:
    header = RunHeader(text, {text: {text: text}}, text, text, 1)
    page = Page(render(header, [{"step": 0, "rollout/reward": 1.0, f"eval/{text}/accuracy": 1.0}], {0: [answer(text)]}))
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert text.replace("\r", "") in page.text["pre"].replace("\r", "")


@pytest.mark.parametrize("count", [0, 1, 2, 200])
def test_a_report_is_written_for_any_number_of_steps(count: int) -> None:
    page = Page(render(HEADER, rows(count), {step: [answer(str(step))] for step in range(count)}))
    assert ("figure" in page.tags) == (count > 0)
    assert page.text.get("summary", "").count("rollout ") == min(count, MAX_ROLLOUTS_SHOWN)


def test_first_and_last_rollout_are_shown() -> None:
    page = Page(render(HEADER, rows(100), {step: [answer("x")] for step in range(100)}))
    assert "rollout 0" in page.text["summary"] and "rollout 99" in page.text["summary"]


def test_a_setting_that_differs_from_its_default_is_marked() -> None:
    assert '<tr class="set"><td>lr</td><td>1e-05</td></tr>' in render(HEADER, [], {})


def test_the_page_can_be_made_again_from_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = RunFiles(tmp_path)
    HEADER.save(tmp_path)
    for row in rows(5):
        files.append_metrics(int(row["step"]), {name: value for name, value in row.items() if name != "step"})
    files.append_samples(0, [answer("x")])
    first = write_report(tmp_path, HEADER, rows(5), {0: [answer("x")]}).read_text()
    (tmp_path / REPORT).unlink()
    main([str(tmp_path)])
    assert (tmp_path / REPORT).read_text() == first
    assert REPORT in capsys.readouterr().out


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "run.json" in capsys.readouterr().err
