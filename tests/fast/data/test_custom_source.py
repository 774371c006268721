"""The user's own source of prompts."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from miles.arguments.data import DataArguments
from miles.data.custom_source import CustomStream
from miles.data.prompts import RowReader
from miles.input_error import InputError
from miles.sample import Prompt


class Drawn:
    """Keeps what it has drawn in its state, and the state in its own hands."""

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


@pytest.fixture
def stream(monkeypatch):
    module = ModuleType("own_sources")
    module.Drawn, module.Odd = Drawn, Odd
    monkeypatch.setitem(sys.modules, "own_sources", module)
    return lambda name: CustomStream(f"own_sources:{name}", SimpleNamespace(), lambda row, i: Prompt(row["x"], (1,)))


def test_a_position_stays_while_the_source_continues(stream):
    source = stream("Drawn")
    source.draw(2)
    position = source.state()
    source.draw(3)
    assert position["source"] == {"rows": [0, 1]}


def test_a_state_that_json_cannot_hold_is_refused(stream):
    with pytest.raises(InputError, match=r"--data-source-path own_sources:Odd: state\(\) cannot be written as JSON"):
        stream("Odd").state()


def test_what_may_surprise_is_reported_once(base_tokenizer, caplog):
    read = RowReader(DataArguments(input_key="x", label_key="y"), base_tokenizer)
    for number in range(3):
        read({"x": "2+2=", "y": True}, number)
    [record] = caplog.records
    assert record.getMessage().startswith("row 0 of --data-source-path: ")
