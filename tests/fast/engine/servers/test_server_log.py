"""The log of a server: bounded, without secrets, and read to its end whatever happens to the file."""

import io

from hypothesis import given
from hypothesis import strategies as st

from miles.engine.servers.processes import TAIL_LINES, LogFile, ServerLog


def copied(file, lines, secrets=frozenset()):
    log = ServerLog(file, set(secrets))
    log.copy(io.BytesIO(b"".join(lines)))
    return log


@given(lengths=st.lists(st.integers(0, 400), max_size=60))
def test_both_files_stay_below_the_limit_and_end_with_the_last_lines(tmp_path_factory, lengths):
    folder, limit = tmp_path_factory.mktemp("log"), 1000
    lines = [b"%d " % number + b"x" * length + b"\n" for number, length in enumerate(lengths)]
    file = LogFile(folder / "engine_0.log", limit / 1e6)
    copied(file, lines)
    older, newer = folder / "engine_0.log.1", file.path.read_bytes()
    content = (older.read_bytes() if older.exists() else b"") + newer
    assert b"".join(lines).endswith(content)
    assert content == b"".join(lines) if sum(map(len, lines)) < limit else len(content) >= limit / 2
    assert len(newer) <= limit and (not older.exists() or older.stat().st_size <= limit)


def test_a_later_start_appends_and_shows_its_own_end_only(tmp_path):
    file = LogFile(tmp_path / "logs" / "engine_0.log")
    copied(file, [b"first\n"])
    log = copied(file, [b"%d\n" % number for number in range(TAIL_LINES + 5)])
    assert file.path.read_text().startswith("first\n0\n1\n")
    assert log.end().splitlines() == [f"{file.path} ends:", *map(str, range(5, TAIL_LINES + 5))]


def test_secrets_and_bytes_that_are_no_text(tmp_path):
    log = copied(LogFile(tmp_path / "log"), [b"key open-sesame \xff\n"], {"open-sesame"})
    assert (tmp_path / "log").read_bytes() == b"key (hidden) \xff\n"
    assert "open-sesame" not in log.end()


def test_a_full_disk_does_not_stop_the_server(tmp_path, caplog):
    """/dev/full refuses every write. The output is still read to its end, and one warning reports the failure."""
    full = tmp_path / "log"
    full.symlink_to("/dev/full")
    log = copied(LogFile(full), [b"%d\n" % number for number in range(1000)])
    assert log.tail[-1] == "999"
    assert [record.message for record in caplog.records] == [f"lines are missing from {full}"]
