import dataclasses
from pathlib import Path

import pytest

from miles.tasks.rewards import built_in
from miles.tasks.rewards.built_in import REWARDS
from miles.tasks.rewards.registry import get_reward_function
from miles.tasks.rewards.settings import RewardArguments

MODULE = "custom_rewards_for_test"
CODE = """
import functools
def plain(samples):
    return [1.0 for _ in samples]
async def awaited(samples):
    return [2.0 for _ in samples]
@functools.wraps(plain)
def wrapper_of_async(samples):
    return awaited(samples)
class Judge:
    async def __call__(self, samples):
        return [3.0 for _ in samples]
judge = Judge()
def objects(samples):
    return [{"correct": 0.5, "format": 1.0} for _ in samples]
"""


@pytest.fixture
def custom(tmp_path, monkeypatch):
    (tmp_path / f"{MODULE}.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, MODULE, raising=False)
    return lambda name, **more: get_reward_function(RewardArguments(custom_rm_path=f"{MODULE}:{name}", **more))


@pytest.mark.parametrize(
    ("name", "reward"), [("plain", 1.0), ("awaited", 2.0), ("wrapper_of_async", 2.0), ("judge", 3.0)]
)
async def test_custom_functions_of_every_kind(custom, make_sample, name, reward):
    assert await custom(name)([make_sample("a"), make_sample("b")]) == [reward, reward]


async def test_reward_key_picks_from_objects(custom, make_sample):
    assert await custom("objects", reward_key="correct")([make_sample("a")]) == [0.5]
    [missing] = await custom("objects", reward_key="correctness")([make_sample("a")])
    assert missing == (
        "returned an object without the key correctness of --reward-key; it has list ['correct', 'format']"
    )
    [number] = await custom("plain", reward_key="x")([make_sample("a")])
    assert number == "returned float 1.0, not an object with the key x of --reward-key"


def test_a_reward_is_one_file():
    """Whoever adds the file edits no list, and no test either."""
    folder = Path(built_in.__file__).parent
    assert set(REWARDS) == {file.stem for file in folder.rglob("*.py")} - {"__init__"}
    assert {"deepscaler", "math", "reasoning_gym"} < set(REWARDS)


@pytest.mark.parametrize("name", REWARDS)
def test_every_built_in_loads(name, section_of):
    if name == "python_code":
        pytest.skip("needs a kernel that permits namespaces: test_python_code.py")
    assert callable(get_reward_function(section_of(name)))


def test_what_a_reward_reads_are_flags_of_its_own():
    fields = {field.name for field in dataclasses.fields(RewardArguments)}
    for name, reward in REWARDS.items():
        own = set() if reward.own_flags is None else {field.name for field in dataclasses.fields(reward.own_flags)}
        assert set(reward.reads) == own <= fields, name
        assert reward.name == name and reward.summary
    declared = [field.name for flags in REWARDS.own_flags for field in dataclasses.fields(flags)]
    assert len(declared) == len(set(declared))


@pytest.mark.parametrize(
    ("reward", "fault"),
    [
        (RewardArguments(), "--rm-type or --custom-rm-path is required"),
        (RewardArguments(rm_type="exactmatch"), "no such reward as 'exactmatch'; did you mean exact_match"),
        (RewardArguments(custom_rm_path="no_such_module:f"), "--custom-rm-path no_such_module:f: cannot import"),
    ],
)
def test_wrong_flags(reward, fault):
    with pytest.raises(ValueError, match=fault):
        get_reward_function(reward)
