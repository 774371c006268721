"""--buffer-filter-path: the user's function decides which finished groups an iteration takes."""

import asyncio
import sys

import pytest

from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.rollout.groups import GroupTools, generate_group
from miles.rollout.hooks import MOST_DROPPED
from miles.rollout.pipeline import build_collector
from miles.tasks.data.stream import PromptStream
from miles.types.sample import Prompt

BATCH = 2
FUNCTIONS = """
shown = []

def first(args, rollout_id, buffer, num_samples):
    picked = buffer[:num_samples]
    del buffer[:num_samples]
    return picked

def newest(args, rollout_id, buffer, num_samples):
    shown.append((args.rollout_batch_size, rollout_id, [samples[0].group_index for samples in buffer], num_samples))
    return buffer[-num_samples:]

def odd(args, rollout_id, buffer, num_samples):
    buffer[:] = [samples for samples in buffer if samples[0].group_index % 2]
    return buffer[:num_samples]

def at_most_one(args, rollout_id, buffer, num_samples):
    return buffer[-1:]

def nothing(args, rollout_id, buffer, num_samples):
    return []

def drop_all(args, rollout_id, buffer, num_samples):
    buffer.clear()
    return []

def too_many(args, rollout_id, buffer, num_samples):
    return list(buffer)

def strangers(args, rollout_id, buffer, num_samples):
    return [list(samples) for samples in buffer[:num_samples]]

def a_tuple(args, rollout_id, buffer, num_samples):
    return tuple(buffer[:num_samples])

def twice(args, rollout_id, buffer, num_samples):
    return [buffer[0], buffer[0]]

def adds(args, rollout_id, buffer, num_samples):
    buffer.append([])
    return buffer[:num_samples]
"""


async def zeros(samples):
    return [0.0] * len(samples)


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "pickers.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("pickers", None)


@pytest.fixture
def collect(functions, scripted_engine, tokenizer):
    """Collect iterations of groups that finish four at once, in order; returns their groups, metrics and state."""

    class Engine(scripted_engine):
        async def abort(self):
            """Every request has been answered at once."""

    def run(name, iterations=3, **flags):
        rollout = RolloutArguments(
            rollout_batch_size=BATCH,
            n_samples_per_prompt=1,
            rollout_max_response_len=8,
            buffer_filter_path=None if name is None else f"pickers:{name}",
            **(flags or {"partial_rollout": True, "over_sampling_batch_size": 4}),
        )

        async def scenario():
            stream = PromptStream([Prompt(str(i), (1 + i,), source=f"set:{i}") for i in range(50)], False, 1)
            tools = GroupTools(Engine(), tokenizer, generate_group, zeros)
            collector = build_collector(Settings(rollout=rollout), stream, tools, num_iterations=99)
            results = []
            for iteration in range(iterations):
                collector.weights_changed(iteration)
                results.append(await collector.collect(iteration))
            state = collector.state()
            await collector._cancel()
            return results, state

        results, state = asyncio.run(scenario())
        return [[group.group_index for group in scored.groups] for scored in results], results, state

    return run


def test_the_function_changes_which_groups_an_iteration_takes(collect):
    assert collect(None)[0] == collect("first")[0] == [[0, 1], [2, 3], [4, 5]]
    assert collect("newest")[0] != collect("first")[0]
    flag, iteration, buffer, wanted = sys.modules["pickers"].shown[0]
    assert (flag, iteration, wanted) == (BATCH, 0, BATCH) and buffer == sorted(buffer)


def test_groups_that_it_takes_out_are_dropped_and_counted(collect):
    taken, results, state = collect("odd")
    assert all(index % 2 for groups in taken for index in groups)
    names = "rollout/dropped/buffer_filter"
    assert sum(scored.metrics[names].value for scored in results if names in scored.metrics) >= BATCH
    flat = [index for groups in taken for index in groups]
    assert len(set(flat)) == len(flat) and not set(flat) & set(state["unfinished"])


def test_an_iteration_is_filled_by_several_calls(collect):
    taken, *_ = collect("at_most_one")
    assert all(len(groups) == BATCH and groups == sorted(groups) for groups in taken)


def test_it_also_picks_where_generation_never_pauses(collect):
    taken, results, _ = collect("newest", fully_async=True, async_steps=2)
    assert [len(groups) for groups in taken] == [BATCH] * 3
    assert taken != collect("first", fully_async=True, async_steps=2)[0]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing", "iteration 0 misses 2 groups, and 4 wait and are not picked, and no more may be"),
        ("drop_all", f"it has dropped {MOST_DROPPED}.* groups in a row and picked none"),
        ("too_many", "returned [34] groups; return at most num_samples, 2"),
        ("strangers", "return a list of entries of buffer, each once"),
        ("a_tuple", "return a list of entries of buffer, each once"),
        ("twice", "return a list of entries of buffer, each once"),
        ("adds", "put other groups into buffer"),
    ],
)
def test_a_wrong_answer_is_an_error(collect, name, sentence):
    with pytest.raises(ValueError, match=f"--buffer-filter-path pickers:{name}: .*{sentence}"):
        collect(name)
