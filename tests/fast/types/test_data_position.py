"""A saved position in the prompts is checked before a run continues from it, whatever state.json holds."""

import copy
import json
from types import SimpleNamespace

import pytest

from miles.tasks.data.custom_source import CustomStream
from miles.tasks.data.stream import Mixture, NamedSet, PromptStream
from miles.types.data_position import check_position
from miles.types.sample import Prompt

PROMPTS = [Prompt(str(number), (number,)) for number in range(5)]


class Source:
    """Rows without end."""

    def __init__(self, args):
        pass

    def draw(self, n):
        return [{"text": "?"}] * n

    def state(self):
        return {"at": [1, 2]}

    def restore(self, state):
        pass


def one_set():
    stream = PromptStream(PROMPTS, shuffle=True, seed=1)
    stream.draw(7)
    stream.leave_out_prompt(2)
    return stream, stream.state([3, 6])


def several_sets():
    mixture = Mixture([NamedSet("a", PROMPTS), NamedSet("b", PROMPTS[:2])], [0.7, 0.3], shuffle=False, seed=0)
    mixture.draw(4)
    mixture.draw_next([("b", 1)])
    return mixture, mixture.state([2]) | {"known": [["a", 3, 1, 0.5, 12.0, 4]]}


def own_source():
    stream = CustomStream(f"{__name__}:Source", SimpleNamespace(), lambda row, index: PROMPTS[0])
    stream.draw(3)
    return stream, stream.state([1])


KINDS = [one_set, several_sets, own_source]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_saves_is_a_position(kind):
    stream, state = kind()
    check_position(json.loads(json.dumps(state)))
    check_position({})
    stream.restore(state)


def paths_in(value, path=()):
    """Yield the path of every part."""
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from paths_in(value[key], (*path, key))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [None, "x", -1, 10**9, [], {}, [[]], 0.5, float("nan"), "gone"])
def test_a_part_that_is_wrong_is_named_or_restored(kind, wrong):
    """No part leads to another error than ``ValueError``, here or when the stream restores it and draws."""
    _, state = kind()
    refused = 0
    for path in paths_in(state):
        damaged = copy.deepcopy(state)
        inner = damaged
        for key in path[:-1]:
            inner = inner[key]
        if wrong == "gone":
            del inner[path[-1]]
        else:
            inner[path[-1]] = wrong
        try:
            check_position(damaged)
        except ValueError as fault:
            assert str(fault).endswith("is malformed")
            refused += 1
            continue
        stream, _ = kind()
        try:
            stream.restore(damaged)
        except ValueError:  # of other sets, another seed, …, in its own sentence
            continue
        stream.draw(4)
    assert refused > 3


@pytest.mark.parametrize("state", [None, 3, [], "x", {"position": 3}, {"sets": {}}, {"sets": {"a": 3}}, {"source": 1}])
def test_anything_else_is_no_position(state):
    with pytest.raises(ValueError):
        check_position(state)
