"""The user's own source of prompts."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from miles.base.text import InputError
from miles.base.user_code import UserCodeError
from miles.tasks.data.custom_source import CustomStream
from miles.tasks.data.prompts import RowReader
from miles.tasks.data.settings import DataArguments
from miles.types.sample import Prompt


class Drawn:
    """Keeps its drawn rows in its state, and returns that state without a copy."""

    def __init__(self, args):
        self.rows = []

    def draw(self, n):
        self.rows += [len(self.rows) + i for i in range(n)]
        return [{"x": str(row)} for row in self.rows[-n:]]

    def state(self):
        return {"rows": self.rows}


class Odd(Drawn):
    """Has a state that JSON cannot hold."""

    def state(self):
        return {"rows": {1, 2}}


class Ends(Drawn):
    """Has no rows."""

    def draw(self, n):
        return [next(iter(())) for _ in range(n)]


def read(row, number):
    return Prompt(row["x"], (1,))


@pytest.fixture
def stream(monkeypatch):
    module = ModuleType("own_sources")
    module.Drawn, module.Odd, module.Ends = Drawn, Odd, Ends
    monkeypatch.setitem(sys.modules, "own_sources", module)
    return lambda name, read=read: CustomStream(f"own_sources:{name}", SimpleNamespace(), read)


def test_a_position_stays_while_the_source_continues(stream):
    source = stream("Drawn")
    source.draw(2)
    position = source.state()
    source.draw(3)
    assert position["source"] == {"rows": [0, 1]}


def test_rows_are_not_lost_with_one_that_cannot_be_read(stream):
    def read_all_but_3(row, number):
        if number == 3:
            raise InputError("too long")
        return read(row, number)

    source = stream("Drawn", read_all_but_3)
    done = source.draw(2)
    for n in (2, 3):
        with pytest.raises(InputError, match="too long"):
            source.draw(n)
    assert source.state(unfinished=[done[1].group_index])["unfinished"] == [[i, {"x": str(i)}] for i in range(1, 5)]
    assert [group.group_index for group in source.draw(1)] == [2]


def test_a_source_that_runs_out_is_named(stream):
    with pytest.raises(UserCodeError, match=r"--data-source-path own_sources:Ends: draw\(2\) raised StopIteration"):
        stream("Ends").draw(2)


@pytest.mark.parametrize("at", ["__init__", "state", "restore"])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration()], ids=repr)
def test_a_source_cannot_end_the_process(stream, monkeypatch, at, error):
    def ends(*args):
        raise error

    monkeypatch.setattr(Drawn, at, ends, raising=False)
    with pytest.raises(UserCodeError, match=f"--data-source-path own_sources:Drawn: .*raised {type(error).__name__}"):
        made = stream("Drawn")
        made.state()
        made.restore({"source": {}, "next_group_index": 0, "unfinished": []})


def test_a_state_that_json_cannot_hold_is_refused(stream):
    with pytest.raises(InputError, match=r"--data-source-path own_sources:Odd: state\(\) cannot be written as JSON"):
        stream("Odd").state()


def test_what_may_surprise_is_reported_once(base_tokenizer, caplog):
    read = RowReader(DataArguments(input_key="x", label_key="y"), base_tokenizer)
    for number in range(3):
        read({"x": "2+2=", "y": True}, number)
    [record] = caplog.records
    assert record.getMessage().startswith("row 0 of --data-source-path: ")
