"""The server answers small pieces of a run, to this machine only, and explains its refusals."""

from __future__ import annotations

import json
import math
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_folder import healthy_row, sample, write_header, write_rows, write_run
from tolerance import digits

from miles.commands import report
from miles.observe.page import SCRIPTS, STYLES
from miles.observe.report.server import ReportServer
from miles.observe.run_files import SAMPLES, RunFiles


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    server = ReportServer(tmp_path / "run", 0)
    yield server
    server.close()


def get(server: ReportServer, path: str, **query: Any) -> Any:
    """Return the answer, also of an error."""
    try:
        with urllib.request.urlopen(f"{server.url}api/{path}?{urllib.parse.urlencode(query)}") as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return json.load(error)


def test_curves_samples_and_phases_are_served_piece_by_piece(server: ReportServer, tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=30)
    overview = get(server, "overview")
    assert overview["steps"] == [1, 30] and overview["folder"] == "run"
    assert {chart["question"] for chart in overview["charts"]} == {"main", "learning", "stability", "engine"}
    curve = get(server, "metrics", names="rollout/reward\ntrain/loss", **{"from": 3, "to": 5})
    assert curve["steps"] == [3, 4, 5] and set(curve["values"]) == {"rollout/reward", "train/loss"}
    assert sum(values[0] for values in get(server, "phases")["phases"].values()) == pytest.approx(
        healthy_row(1, 30)["time/step"], rel=digits(4)
    )
    iteration = get(server, "samples", step=7)
    assert (iteration["step"], iteration["previous"], iteration["next"], iteration["last"]) == (7, 6, 8, 30)
    assert [len(group["samples"]) for group in iteration["groups"]] == [2, 2]
    sample = get(server, "sample", step=7, index=3)
    assert sample["tokens"] == ["It", " is", "\n42\n", " 2."]
    weight = 1 / 12  # N = 4 trajectories of 3 loss tokens
    assert sample["columns"]["weight"] == pytest.approx([weight, weight, 0.0, weight], rel=digits(5))
    assert sample["share"] == pytest.approx(0.25)
    ledger = {line["name"]: line["value"] for line in sample["ledger"]}
    assert (ledger["loss tokens"], ledger["mode"], ledger["mass of the step"]) == ("3", "sample_mean", "1")
    assert get(server, "samples")["step"] == 30
    hits = get(server, "search", text="it is 2.")["hits"]
    assert [(hit["step"], hit["index"]) for hit in hits][:3] == [(1, 2), (1, 3), (2, 2)]


def test_the_overview_is_short_until_the_files_grow(server: ReportServer, tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=3)
    revision = get(server, "overview")["revision"]
    assert get(server, "overview", since=revision) == {"revision": revision}
    write_rows(tmp_path / "run", [(4, healthy_row(4, 4))])
    assert get(server, "overview", since=revision)["steps"] == [1, 4]


def test_a_run_that_has_not_started_is_waited_for(server: ReportServer, tmp_path: Path) -> None:
    assert "run.json" in get(server, "overview")["error"]
    write_header(tmp_path / "run")
    assert get(server, "overview")["steps"] is None
    assert get(server, "samples") == {}


def test_the_parts_of_the_page_are_served_and_nothing_else(server: ReportServer, tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=1)
    for path in ("", *(f"static/{name}" for name in STYLES + SCRIPTS)):
        with urllib.request.urlopen(server.url + path) as response:
            assert response.read() and "default-src 'none'" in response.headers["Content-Security-Policy"]
    for path in ("run.json", "static/../server.py", "static/..%2fserver.py", "api/shell", "static/"):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(server.url + path)
        assert error.value.code == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example"])
def test_a_name_of_another_machine_is_refused(server: ReportServer, host: str) -> None:
    request = urllib.request.Request(server.url, headers={"Host": host})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
    assert error.value.code == 403


@pytest.mark.parametrize("written", ["null", "NaN"])  # earlier versions wrote NaN
def test_a_reference_answer_may_be_anything_that_json_has(server: ReportServer, tmp_path: Path, written: str) -> None:
    write_header(tmp_path / "run")
    label = {"answer": 42, "tolerance": math.nan}
    RunFiles(tmp_path / "run").append_samples(1, [sample(0, 0, label=label)])
    samples = tmp_path / "run" / SAMPLES
    samples.write_text(samples.read_text().replace('"tolerance": null', f'"tolerance": {written}'))
    text = f'{{"answer": 42, "tolerance": {written}}}'
    assert get(server, "sample", step=1, index=0)["label"] == text
    assert get(server, "samples")["groups"][0]["label"] == text
    assert get(server, "search", text="tolerance")["hits"]


def test_it_listens_on_the_loopback_address_only(server: ReportServer) -> None:
    assert server._server.server_address[0] == "127.0.0.1"


def test_no_such_sample(server: ReportServer, tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=2)
    assert "no such sample" in get(server, "sample", step=1, index=99)["error"]


WHOLE = ("", "x", "-1", "1.5", "1e3", "0x1", "9" * 5000, "١", "1\n", "None")
NUMBERS = ("", "x", "nan", "inf", "-inf", "1e999")


@pytest.mark.parametrize(
    ("path", "name", "values"),
    [
        ("metrics", "points", (*WHOLE, "1", "20001")),
        ("phases", "bars", (*WHOLE, "0", "2001")),
        ("samples", "step", WHOLE),
        ("sample", "step", WHOLE),
        ("sample", "index", WHOLE),
        ("search", "cursor", WHOLE),
        *((path, name, NUMBERS) for path in ("metrics", "phases") for name in ("from", "to")),
    ],
)
def test_a_wrong_parameter_is_named_with_value_and_rule(
    server: ReportServer, tmp_path: Path, path: str, name: str, values: tuple[str, ...]
) -> None:
    write_run(tmp_path / "run", steps=2)
    query = {"sample": {"step": "1", "index": "0"}, "search": {"text": "a"}}.get(path, {})
    assert "error" not in get(server, path, **query)
    for value in values:
        error = get(server, path, **{**query, name: value})["error"]
        text = value if len(value) < 80 else "99"
        assert error.startswith(f"/api/{path}: {name}={text.replace(chr(10), ' ')}") and ": must be a " in error, error


def test_all_faults_of_a_question_are_named_at_once(server: ReportServer, tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=2)
    for query, faults in {
        "sample?step=x&step=1&rank=2": ["index is missing", "step=1: must be given once", "rank=2: no such parameter"],
        "search?cursor=-1": ["the parameter text is missing", "cursor=-1: must be a whole number from 0 to "],
    }.items():
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{server.url}api/{query}")
        answer = json.load(error.value)["error"]
        assert error.value.code == 400 and all(fault in answer for fault in faults), answer


def test_a_search_may_begin_anywhere(server: ReportServer, tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=2)
    end = (tmp_path / "run" / SAMPLES).stat().st_size
    counts = [len(get(server, "search", text="it", cursor=cursor)["hits"]) for cursor in range(0, end + 200, 7)]
    assert counts[0] > counts[-1] == 0 and sorted(counts, reverse=True) == counts


def test_a_damaged_file_is_named(server: ReportServer, tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=2)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write("not json\n")
    for _ in range(2):  # the page asks again and again
        assert "metrics.jsonl:3" in get(server, "overview")["error"]


def test_the_command_refuses_a_folder_without_a_run_and_a_taken_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        report.main([str(tmp_path)])
    assert "no run.json" in capsys.readouterr().err
    write_header(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit, match="2"):
            report.main([str(tmp_path), "--port", port])
    assert f"--port {port}" in capsys.readouterr().err
