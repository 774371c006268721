"""Flags that related launchers have added lately are accepted if they ask for nothing else, and refused by name."""

import pytest

from miles.compat.verdicts import rows

NEWER_FLAGS = {row.flag: row for row in rows("newer")}
VALUES = {"switch": "", "value": "1", "list": "1 2", "optional": ""}


@pytest.mark.parametrize("flag", [flag for flag, row in NEWER_FLAGS.items() if row.heading is not None])
def test_noted(accepted, flag):
    found = accepted(f"{flag} {VALUES[NEWER_FLAGS[flag].kind]}")
    assert [note.why for note in found.accepted if note.written.split()[0] == flag] == [NEWER_FLAGS[flag].why]


@pytest.mark.parametrize("flag", [flag for flag, row in NEWER_FLAGS.items() if row.heading is None])
def test_refused(refusals, flag):
    row = NEWER_FLAGS[flag]
    idle = row.unless is not None
    words = "--rollout-engine sglang --pause-generation-mode in_place" if flag == "--namespaced-radix-cache" else ""
    words += " --opd-log-prob-top-k 4" if flag.startswith("--opd") and idle else ""
    words += " --async-steps 1" if flag == "--keep-old-actor" else ""
    messages = [message for message in refusals(f"{flag} {VALUES[row.kind]} {words}") if message.startswith(flag)]
    assert len(messages) == 1 and row.why in messages[0] and row.instead in messages[0]


@pytest.mark.parametrize("flags", [f"{flag} {row.neutral[0]}" for flag, row in NEWER_FLAGS.items() if row.neutral])
def test_the_value_that_asks_for_nothing(accepted, flags):
    assert any(note.written == flags for note in accepted(flags).accepted)


@pytest.mark.parametrize("flags", ["--namespaced-radix-cache", "--opd-topk-per-position", "--keep-old-actor"])
def test_accepted_where_it_changes_nothing(accepted, flags):
    assert any(note.written == flags for note in accepted(flags).accepted)


def test_a_value_may_be_left_out(accepted):
    for flags in ("--use-session-server", "--use-session-server v2"):
        assert any(note.written == flags for note in accepted(flags).accepted)


def test_servers_that_only_evaluate_are_noted(accepted):
    flags = ["--eval-sglang-mem-fraction-static 0.9", "--eval-sglang-disable-radix-cache"]
    assert {*flags} <= {note.written for note in accepted(" ".join(flags)).accepted}
