"""Notifications to a real server on the loopback address; an address that fails stops nothing and is never shown."""

import json
import math
import threading
from contextlib import closing, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from run_folder import write_header

from miles.config.parser import parse
from miles.config.tracking import TrackingArguments
from miles.config.validate import Validated
from miles.observe.report.sink import HealthWatch, ReportSink
from miles.observe.run_files import RunFiles
from miles.observe.sinks import Notifier
from miles.run.failures import notifying
from miles.run.launcher import launch
from miles.run.stop_requests import StopRequests


@pytest.fixture(autouse=True)
def without_proxies(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(self.server.status)
            self.end_headers()

        def log_message(self, *words):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.bodies, server.status = [], 204
    server.url = f"http://127.0.0.1:{server.server_port}/hooks/t0ken-in-the-path"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_end_and_a_failure_are_sent_without_secrets(server):
    notifier = Notifier(server.url, "outputs/a", ["sesame"])
    assert "t0ken" not in repr(notifier) and "sesame" not in repr(notifier)
    with notifying(notifier, StopRequests(60.0)):
        pass
    with pytest.raises(KeyError), notifying(notifier, StopRequests(60.0)):
        raise KeyError("the key sesame")
    with pytest.raises(KeyboardInterrupt), notifying(notifier, StopRequests(60.0)):
        raise KeyboardInterrupt
    assert server.bodies == [
        {"event": "end", "run": "outputs/a", "text": "outputs/a: finished"},
        {"event": "failure", "run": "outputs/a", "text": "outputs/a: KeyError: 'the key (hidden)'"},
        {"event": "end", "run": "outputs/a", "text": "outputs/a: stopped by SIGINT"},
    ]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/t0ken", "http://[::1", "wrong status"])
def test_an_address_that_fails_is_a_note_that_does_not_show_it(server, capsys, url):
    server.status = 403
    Notifier(server.url if url == "wrong status" else url, "a").send("end", "finished")
    message = capsys.readouterr().err
    assert message.startswith("note: --notify-url: the event 'end' could not be sent (") and "t0ken" not in message


def test_text_that_no_encoding_holds_is_sent_with_escapes(server):
    Notifier(server.url, "out/\udcff").send("failure", "KeyError: '\ud800'")
    assert server.bodies == [{"event": "failure", "run": r"out/\udcff", "text": r"out/\udcff: KeyError: '\ud800'"}]


def test_no_failure_of_a_notification_replaces_that_of_the_run(monkeypatch, capsys):
    def post(*words, **options):
        raise RuntimeError("a fault of the library")

    monkeypatch.setattr("httpx.post", post)
    Notifier("http://127.0.0.1:9/t0ken", "a").send("failure", "why")
    assert capsys.readouterr().err.endswith("could not be sent (RuntimeError)\n")


def watch_a_run_that_turns_bad(server, folder):
    """Return the watch of a run of 60 steps."""
    tracking = TrackingArguments(output_dir=str(folder), notify_url=server.url)
    write_header(folder)
    files, watch = RunFiles(folder), HealthWatch(tracking, Notifier(server.url, "a"))
    for step in range(1, 61):
        row = {"train/train_rollout_logprob_abs_diff": 0.01 if step <= 30 else 0.5, "rollout/reward": step / 60}
        files.append_metrics(step, row)
        watch.log(step, row)
    return watch


def test_a_verdict_is_sent_when_it_becomes_unhealthy_and_once(server, tmp_path, monkeypatch):
    monkeypatch.setattr("miles.observe.report.sink.COSTS", 0)
    watch_a_run_that_turns_bad(server, tmp_path)
    (body,) = server.bodies
    assert body["event"] == "unhealthy" and "Engine-trainer gap: " in body["text"] and "(--use-tis)" in body["text"]


def test_what_turns_bad_in_the_last_steps_is_sent_at_the_end(server, tmp_path, monkeypatch):
    monkeypatch.setattr("miles.observe.report.sink.COSTS", math.inf)  # the rules are read once, in the first step
    watch = watch_a_run_that_turns_bad(server, tmp_path)
    assert server.bodies == []
    watch.close()
    (body,) = server.bodies
    assert "step 60: Engine-trainer gap: " in body["text"]


def test_a_run_prints_what_is_unhealthy_at_its_end(tmp_path, capsys):
    write_header(tmp_path)
    files, gap = RunFiles(tmp_path), "train/train_rollout_logprob_abs_diff"
    for step in range(1, 61):
        files.append_metrics(step, {gap: 0.01 if step <= 30 else 0.5, "rollout/reward": step / 60})
    with closing(ReportSink(TrackingArguments(output_dir=str(tmp_path), no_report=True))) as sink:
        sink.log(60, {gap: 0.5})
    learned, *alarms = capsys.readouterr().out.splitlines()
    assert learned.startswith("It learned: ") and len(alarms) == 1
    assert alarms[0].startswith("unhealthy  Engine-trainer gap: ") and alarms[0].endswith("(--use-tis)")


def test_nothing_is_sent_without_the_flag(server):
    Notifier(None, "a").send("end", "finished")
    assert server.bodies == []


@pytest.mark.parametrize(("error", "event"), [(None, "end"), (OSError("a fault"), "failure")])
def test_a_launcher_sends_how_its_run_ended(server, tmp_path, monkeypatch, capsys, error, event):
    def run(settings, context):
        if error is not None:
            raise error

    monkeypatch.setattr("miles.run.launcher.run", run)
    shape = ["--rollout-batch-size", "1", "--global-batch-size", "1"]
    settings = parse(["--notify-url", server.url, "--output-dir", str(tmp_path), *shape])
    with nullcontext() if error is None else pytest.raises(SystemExit):
        launch(Validated(settings))
    (body,) = server.bodies
    assert body["event"] == event and body["run"] == str(tmp_path)
    assert "t0ken" not in "".join(capsys.readouterr())
