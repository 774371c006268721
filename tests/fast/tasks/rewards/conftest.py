"""Make samples from a response and a label."""

import pytest

from miles.tasks.rewards.settings import RewardArguments
from miles.types.sample import Prompt, Sample

NEEDED_FLAGS = {
    "judge": {"judge_url": "http://127.0.0.1:1/v1", "judge_model": "m"},
    "overlong": {"overlong_max_len": 4096},
    "remote_rm": {"rm_url": "http://127.0.0.1:1/"},
}


@pytest.fixture(scope="session")
def section_of():
    """Return the section of a built-in reward, with the flags that it cannot do without."""
    return lambda name: RewardArguments(rm_type=name, **NEEDED_FLAGS.get(name, {}))


@pytest.fixture(scope="session")
def make_sample():
    def make(response, label=None, *, metadata=None, trajectory_id=0):
        prompt = Prompt("question", (1, 2), label, metadata or {}, "prompts.jsonl:17")
        return Sample(prompt, 5, trajectory_id, response_ids=list(range(len(response))), response=response)

    return make
