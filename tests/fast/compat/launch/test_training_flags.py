"""Arguments of Megatron's own training program are noted, or refused with what to do."""

import pytest

from miles.base.flags import FlagError
from miles.compat.border import read_command
from miles.compat.verdicts import rows
from miles.config.parser import judge
from tests.fast.config.conftest import minimal

VALUES = {"switch": [], "value": ["7"], "list": ["7", "8"]}
TRAINING_FLAGS = {row.flag: row for row in rows("training")}
MEGATRON = "--train-backend megatron --actor-num-gpus-per-node 2"


def words(is_noted: bool) -> list[str]:
    rows = [row for row in TRAINING_FLAGS.values() if (row.heading is not None) == is_noted]
    return [word for row in rows for word in (row.flag, *VALUES[row.kind])]


def test_all_that_change_nothing_are_noted():
    found = judge(read_command([*minimal(MEGATRON), *words(is_noted=True)])).accepted
    reasons = {note.written.split()[0]: note.why for note in found}
    assert reasons == {flag: row.why for flag, row in TRAINING_FLAGS.items() if row.heading is not None}


def test_all_others_are_refused_at_once():
    with pytest.raises(FlagError) as caught:
        judge(read_command([*minimal(f"{MEGATRON} --load empty --weight-decay 0.1"), *words(is_noted=False)]))
    refused = {message.split()[0].rstrip(":") for message in caught.value.messages}
    assert refused == {flag for flag, row in TRAINING_FLAGS.items() if row.heading is None}


@pytest.mark.parametrize(
    "flags",
    [
        "--use-checkpoint-opt_param-scheduler --exit-on-missing-checkpoint --lr-warmup-samples 0 --weight-decay 0.1 "
        "--start-weight-decay 0.1 --end-weight-decay 0.10 --weight-decay-incr-style constant",
        "--train-backend fsdp --use-torch-fsdp2",
    ],
)
def test_what_asks_for_nothing_is_noted(flags):
    validated = judge(read_command(minimal(f"--actor-num-gpus-per-node 2 {flags}")))
    noted = {note.written.split()[0] for note in validated.accepted}
    assert noted == {word for word in flags.split() if word in TRAINING_FLAGS}
