"""report.html is one bounded file that loads nothing, and executes nothing that a model wrote."""

from __future__ import annotations

import json
import re
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folder import SETTINGS, healthy_row, sample, write_header, write_rows, write_run

from miles.commands import report
from miles.config.tracking import TrackingArguments
from miles.observe import page as static_report
from miles.observe.page import SCRIPTS, STYLES, asset, single_file, spread, write_report
from miles.observe.report.sink import ReportSink
from miles.observe.run_files import REPORT, RunFiles


class Page(HTMLParser):
    """Collect tags, attributes and the embedded data."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.data: dict = {}
        self._in_data = False
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._in_data = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data = json.loads(data)
            self._in_data = False


def test_the_page_has_curves_verdicts_and_samples(tmp_path: Path) -> None:
    write_run(tmp_path, steps=30, prompts=3, samples=2)
    data = Page(write_report(tmp_path, 4)).data
    assert data["metrics"]["steps"] == list(range(1, 31)) and data["metrics"]["exact"]
    assert len(data["overview"]["verdicts"]) == 9
    assert [int(step) for step in data["iterations"]] == list(range(1, 31))
    assert len(data["details"]) == 4 * 30
    assert data["details"]["30/0"]["columns"]["weight"] and data["details"]["30/0"]["ledger"]
    groups = data["iterations"]["30"]["groups"]
    assert [len(group["samples"]) for group in groups] == [2, 2], "four of six answers, a group's together"


def test_steps_are_those_that_are_done_and_sets_have_their_whole_names(tmp_path: Path) -> None:
    """Not the rows: the evaluation before the first step has one, and a long run is thinned."""
    write_header(tmp_path)
    overviews = []
    for step, row in ((0, {"eval/held/out/accuracy": 0.25}), (7, healthy_row(7, 10)), (900, {"train/pg_loss": 0.5})):
        write_rows(tmp_path, [(step, row)])
        overviews.append(Page(write_report(tmp_path, 4)).data["overview"])
    assert [each["steps"][1] for each in overviews] == [0, 7, 900]
    assert {tile["label"]: tile["value"] for tile in overviews[0]["tiles"]}["held-out held/out"] == "0.25"


def test_nothing_is_loaded_from_outside(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2)
    page = Page(write_report(tmp_path, 4))
    assert not {name for name, _ in page.attributes} & {"src", "srcset", "onload", "onerror"}
    assert [value for name, value in page.attributes if name == "href"] == ["data:,"]
    for code in map(asset, (*SCRIPTS, *STYLES)):
        own = re.sub(r"/\*! https://github.com/leeoniya/uPlot [^*]*\*/", "", code)
        assert not re.search(r"https?:|@import|url\(|XMLHttpRequest|innerHTML|insertAdjacentHTML|eval\(", own)


@settings(max_examples=20)
@given(
    st.text(min_size=1, max_size=40) | st.sampled_from(["</script><script>alert(1)</script>", "<!--<script>", "\ud800"])
)
def test_what_a_model_or_a_user_wrote_is_data(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("run")
    write_header(folder, {"loss": {"note": text}})
    RunFiles(folder).append_samples(1, [sample(0, 0, prompt=text, response=text, label=text, tokens=[text] * 4)])
    page = Page(write_report(folder, 4))
    assert page.tags.count("script") == 1 + len(SCRIPTS)
    stored = page.data["details"]["1/0"]["response"]
    assert stored == text or "\ud800" in text or not text.isprintable()


def test_only_small_thumbnails_are_shown(tmp_path: Path) -> None:
    write_header(tmp_path)
    good, start = "data:image/jpeg;base64,YQ==", "data:image/jpeg;base64,"
    bad = ["https://example.org/a.jpg", "data:text/html;base64,YQ==", 3, start + "A" * 20_000, start + '"onerror="x']
    records = [sample(0, 0, images=[*bad[:2], good]), sample(1, 1, images=bad[2:]), sample(2, 2, images=[good] * 9)]
    RunFiles(tmp_path).append_samples(1, [*records, sample(3, 3, images={"a": good})])
    groups = Page(write_report(tmp_path, 4)).data["iterations"]["1"]["groups"]
    assert [group.get("images") for group in groups] == [[good], None, [good] * 4, None]


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_report, "MOST_BYTES", 500_000)
    write_header(tmp_path)
    write_rows(tmp_path, ((step, healthy_row(step, 100)) for step in range(1, 31)))
    tokens = ["token<"] * 3000
    changes = {"tokens": tokens, "mask": [[1, 3000]], "rollout_log_probs": [-1.0] * 3000, "weight_versions": None}
    for step in range(1, 31):
        RunFiles(tmp_path).append_samples(step, [sample(i, i, **changes) for i in range(4)])
    path = write_report(tmp_path, 4)
    data = Page(path).data
    assert path.stat().st_size <= 500_000
    assert len(data["details"]) == 120  # without their tokens
    assert len(data["iterations"]) == 30


def test_the_answers_of_a_group_are_its_different_ones_counted(tmp_path: Path) -> None:
    """Eight answers of group 0: five times "a", twice "b", once "c"; the trainer's values belong to one "a"."""
    write_header(tmp_path)
    write_rows(tmp_path, [(1, {"rollout/reward": 0.5})])
    texts = {"a": (5, 0.0), "b": (2, 1.0), "c": (1, 0.5)}
    answers = [(text, reward) for text, (count, reward) in texts.items() for _ in range(count)]
    records = [
        sample(0, i, response=text, reward=reward, log_probs=[-1.0] * 4 if i == 3 else None)
        for i, (text, reward) in enumerate(answers)
    ]
    RunFiles(tmp_path).append_samples(1, [*records, sample(1, 9)])
    for most, expected in ((2, {"a": 5, "b": 2}), (3, {"a": 5, "b": 2, "c": 1})):
        data = Page(write_report(tmp_path, most)).data
        (group,) = data["iterations"]["1"]["groups"]
        assert {each["response"]: each["count"] for each in group["samples"]} == expected
        assert (group["size"], group["mean"]) == (8, 0.3125)
        assert any(each["recorded"] for each in group["samples"])


def test_the_page_itself_is_small() -> None:
    assert len(single_file("", {})) < 400_000


def test_at_most_2000_samples_of_iterations_spread_over_the_run(tmp_path: Path) -> None:
    write_header(tmp_path)
    for step in range(1, 1001):
        RunFiles(tmp_path).append_samples(step, [sample(i, i) for i in range(4)])
    data = Page(write_report(tmp_path, 4)).data
    steps = [int(step) for step in data["iterations"]]
    assert len(data["details"]) == 2000
    assert (steps[0], steps[-1], len(steps)) == (1, 1000, 500)


@pytest.mark.parametrize("per_iteration", [0, 1, 2000])
def test_any_number_of_samples_per_iteration_can_be_asked_for(tmp_path: Path, per_iteration: int) -> None:
    write_run(tmp_path, steps=3, prompts=2, samples=2)
    assert len(Page(write_report(tmp_path, per_iteration)).data["details"]) == min(per_iteration, 4) * (
        1 if per_iteration > 1000 else 3
    )


@given(st.integers(0, 50), st.integers(0, 50))
def test_spread_has_first_and_last(count: int, among: int) -> None:
    positions = spread(count, among)
    assert len(set(positions)) == len(positions) == min(count, among)
    if min(count, among) > 1:
        assert (positions[0], positions[-1]) == (0, among - 1)


def test_a_folder_of_an_earlier_version_has_a_report(tmp_path: Path) -> None:
    """Such rows have neither groups nor tokens."""
    write_header(tmp_path, SETTINGS)
    row = '{"rollout_id": 1, "prompt": "p", "response": "r", "reward": 1.0, "label": null, "status": "completed"}\n'
    (tmp_path / "samples.jsonl").write_text(row * 2)
    data = Page(write_report(tmp_path, 4)).data
    assert len(data["iterations"]["1"]["groups"]) == 1
    assert data["details"]["1/0"]["ledger"] == [] and data["details"]["1/0"]["tokens"] == []


def test_the_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, steps=2)
    page = tmp_path / "new" / "x.html"
    assert report.main([str(tmp_path), "--static", str(page)]) == 0
    assert page.stat().st_size > 50_000
    assert "x.html" in capsys.readouterr().out


def test_the_command_does_not_replace_a_file_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, steps=2)
    for name, fault in (("run.json", "is a file of a run, which would be lost"), ("", "is a folder")):
        with pytest.raises(SystemExit, match="2"):
            report.main([str(tmp_path), "--static", str(tmp_path / name)])
        assert f"--static {tmp_path / name}: {fault}" in capsys.readouterr().err
    assert (tmp_path / "run.json").read_text().startswith("{")


def test_a_negative_number_of_samples_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        report.main([str(tmp_path), "--samples", "-1"])
    assert "--samples -1: must be at least 0; give 0 for none" in capsys.readouterr().err


def test_the_sink_writes_the_report_once_the_run_has_rows(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2)
    for no_report, rows in ((True, 1), (False, 0), (False, 1)):
        with closing(ReportSink(TrackingArguments(output_dir=str(tmp_path), no_report=no_report))) as sink:
            for step in range(rows):
                sink.log(step, {"a": 1.0})
        assert (tmp_path / REPORT).exists() == (not no_report and rows > 0)


def test_the_sink_serves_the_page_until_it_is_closed(tmp_path: Path) -> None:
    import urllib.error
    import urllib.request

    with closing(ReportSink(TrackingArguments(output_dir=str(tmp_path), report_port=0))) as sink:
        assert sink._server is not None
        assert b"<main>" in urllib.request.urlopen(sink._server.url).read()
        port = int(sink._server.url.rstrip("/").rpartition(":")[2])
        with pytest.raises(ValueError, match=f"--report-port {port}"):
            ReportSink(TrackingArguments(output_dir=str(tmp_path), report_port=port))
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(sink._server.url)
