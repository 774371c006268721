"""Any iteration of samples.jsonl is found without reading the file, and search finds the same as a scan."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folder import read_samples

from miles.observe import run_files
from miles.observe import run_files as sample_file
from miles.observe.run_files import SAMPLES, RunFiles, SampleFile, SampleRecord, spread_order


def answer(text: str, prompt: str = "p") -> SampleRecord:
    return SampleRecord(prompt, text, 1.0, None, "completed")


def write(folder: Path, texts: dict[int, list[str]]) -> SampleFile:
    for step in sorted(texts):
        RunFiles(folder).append_samples(step, [answer(text) for text in texts[step]])
    return SampleFile(folder / SAMPLES)


def responses(iteration: sample_file.Iteration | None) -> list[str]:
    assert iteration is not None
    return [row["response"] for row in iteration.rows]


stored = st.dictionaries(st.integers(1, 60), st.lists(st.text(max_size=80), min_size=1, max_size=4), min_size=1)


@settings(max_examples=60, deadline=None)
@given(stored, st.integers(0, 70))
def test_an_iteration_is_found_anywhere(tmp_path_factory: pytest.TempPathFactory, texts, wanted: int) -> None:
    samples = write(tmp_path_factory.mktemp("run"), texts)
    steps = sorted(texts)
    expected = next((step for step in steps if step >= wanted), steps[-1])
    iteration = samples.iteration(wanted)
    assert iteration is not None and iteration.step == expected
    read = [
        run_files.parse_line(run_files.dump_line({"t": t}).encode("utf-8", "backslashreplace").decode(), Path("x"), 1)[
            "t"
        ]
        for t in texts[expected]
    ]
    assert responses(iteration) == read
    place = steps.index(expected)
    assert (iteration.first, iteration.last) == (steps[0], steps[-1])
    assert iteration.previous == (steps[place - 1] if place else None)
    assert iteration.next == (steps[place + 1] if place + 1 < len(steps) else None)


@settings(max_examples=40, deadline=None)
@given(stored, st.integers(0, 70))
def test_cutting_back_leaves_the_earlier_iterations(tmp_path_factory: pytest.TempPathFactory, texts, step: int) -> None:
    folder = tmp_path_factory.mktemp("run")
    samples = write(folder, texts)
    with samples.path.open("a") as file:
        file.write('{"rollout_id": 99, "unfin')
    samples.cut(step)
    assert list(read_samples(folder)) == [s for s in sorted(texts) if s < step]
    assert not samples.path.read_bytes().endswith(b"unfin")


def test_none_is_the_newest_and_an_unfinished_line_is_none(tmp_path: Path) -> None:
    samples = write(tmp_path, {1: ["a"], 2: ["b", "c"]})
    with samples.path.open("a") as file:
        file.write('{"rollout_id": 3, "resp')
    assert responses(samples.iteration(None)) == ["b", "c"]


def test_no_file_and_an_empty_file_hold_nothing(tmp_path: Path) -> None:
    samples = SampleFile(tmp_path / SAMPLES)
    assert samples.iteration(None) is None
    assert samples.search("x").hits == []
    samples.path.touch()
    assert samples.iteration(3) is None


@pytest.mark.parametrize("chunk", [1 << 23, 64, 7])
def test_search_finds_what_a_scan_finds_in_portions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(sample_file, "_SEARCH_CHUNK", chunk)
    texts = {
        step: [f"answer {step} {'NEEDLE' if step * 10 + i in (31, 72, 73) else 'hay'}" for i in range(5)]
        for step in range(1, 20)
    }
    samples = write(tmp_path, texts)
    hits, cursor, pages = [], 0, 0
    while cursor is not None:
        page = samples.search("needle", cursor, most=2, seconds=60)
        hits += [(hit.step, hit.index) for hit in page.hits]
        cursor, pages = page.cursor, pages + 1
    assert hits == [(3, 1), (7, 2), (7, 3)]
    assert pages >= 2


def test_search_reads_text_not_the_names_of_fields(tmp_path: Path) -> None:
    samples = write(tmp_path, {1: ["plain", 'with "quotes" and\nlines', "naïve ÄÖ"]})
    assert samples.search("response").hits == []
    assert [hit.index for hit in samples.search('"QUOTES" and\nlines').hits] == [1]
    for text in ("naïve ÄÖ", "NAÏVE äö", "äÖ"):
        assert [hit.index for hit in samples.search(text).hits] == [2]
    assert samples.search("ü").hits == []


def test_a_row_without_its_iteration_is_refused(tmp_path: Path) -> None:
    (tmp_path / SAMPLES).write_text('{"response": "x"}\n')
    with pytest.raises(ValueError, match="no rollout_id"):
        SampleFile(tmp_path / SAMPLES).iteration(1)


@given(st.integers(0, 200))
def test_every_position_is_in_the_spread_once(count: int) -> None:
    assert sorted(spread_order(count)) == list(range(count))
