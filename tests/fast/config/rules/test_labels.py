"""Rewards that compare with a reference answer, and the flag that states where rows have it."""

import pytest

from miles.base.flags import FlagError
from miles.config.parser import parse
from miles.config.validate import validate
from tests.fast.support.rows import rows

COMMAND = (
    "--hf-checkpoint some/model --prompt-data {rows} --num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 2 "
    "--global-batch-size 4 --rollout-max-response-len 8 --device cpu --actor-num-gpus-per-node 1 --train-backend fsdp "
    "--rollout-engine torch"
)


@pytest.mark.parametrize(
    ("flags", "needs"), rows(__file__, "test_a_reward_that_compares_needs_the_column_of_the_answers")
)
def test_a_reward_that_compares_needs_the_column_of_the_answers(tmp_path, flags, needs):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input": "2*3="}\n')
    messages: list[str] = []
    try:
        validate(parse([*COMMAND.format(rows=rows).split(), *flags.split()]))
    except FlagError as error:
        messages = error.messages
    errors = [message for message in messages if "--label-key" in message]
    if needs is None:
        assert errors == []
    else:
        [message] = errors
        assert f": {needs} compares answers with a reference answer, and no flag states" in message
