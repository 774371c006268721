"""``--log-format json``: every line is one JSON object, whoever prints it."""

import io
import json
import math
import sys
import threading

from miles.base.secrets import hidden_in_output
from miles.observe.console import JsonSink, as_json_lines
from miles.observe.run_files import RunHeader


def rows(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def captured(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    return out, err


def test_steps_notes_and_errors_are_objects(monkeypatch):
    out, err = captured(monkeypatch)
    with as_json_lines(True), hidden_in_output(["sesame"]):
        print("note: two\nlines\n")
        sink = JsonSink(RunHeader("a run", {}, "words", "1/N", total_steps=4), "out")
        for step in (1, 2):
            sink.log(step, {"train/loss": math.nan, "rollout/reward": 0.5, "time/step": 3.0})
        sink.close()
        print("Traceback …\nValueError: sesame", file=sys.stderr)
        print("without an end", end="")
    print("plain again")
    *lines, last = out.getvalue().splitlines()
    assert last == "plain again"
    events = [json.loads(line) for line in lines]
    assert [row["event"] for row in events] == ["text", "text", "start", "step", "step", "text"]
    assert all(row.keys() >= {"time", "level", "event"} and row["level"] == "info" for row in events)
    assert events[4] | {"time": ""} == {
        "time": "",
        "level": "info",
        "event": "step",
        "step": 2,
        "total_steps": 4,
        "seconds_left": 6.0,
        "train/loss": None,
        "rollout/reward": 0.5,
        "time/step": 3.0,
    }
    assert events[-1]["text"] == "without an end"
    assert [(row["event"], row["text"]) for row in rows(err)] == [
        ("error", "Traceback …"),
        ("error", "ValueError: (hidden)"),
    ]


def test_events_are_ascii_without_secrets_and_keep_their_own_names(monkeypatch):
    out, _ = captured(monkeypatch)
    with as_json_lines(True), hidden_in_output(["sésame"]):
        sink = JsonSink(RunHeader("a run", {}, "words of sésame", "1/N", total_steps=4), "out/\ud800")
        sink.log(1, {"level": 0.5, "event": 0.5, "step": 7.0, "train/loss": 0.25})
        sink.close()
    start, step = rows(out)
    assert out.getvalue().isascii()
    assert start["objective"] == "words of (hidden)" and start["output_dir"] == "out/\ud800"
    assert (step["level"], step["event"], step["step"], step["train/loss"]) == ("info", "step", 1, 0.25)


def test_lines_of_many_threads_are_not_mixed(monkeypatch):
    out, _ = captured(monkeypatch)
    with as_json_lines(True):
        threads = [threading.Thread(target=lambda n=n: [print(n, n, n) for _ in range(200)]) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    texts = [row["text"] for row in rows(out)]
    assert len(texts) == 1600 and all(len(set(text.split())) == 1 for text in texts)
