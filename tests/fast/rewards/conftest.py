"""Make samples from a response and a label."""

import pytest

from miles.sample import Prompt, Sample


@pytest.fixture(scope="session")
def make_sample():
    def make(response, label=None, *, metadata=None, trajectory_id=0):
        prompt = Prompt("question", (1, 2), label, metadata or {}, "prompts.jsonl:17")
        return Sample(prompt, 5, trajectory_id, response_ids=list(range(len(response))), response=response)

    return make
