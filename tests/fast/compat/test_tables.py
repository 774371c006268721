"""Each flag of the tables is judged as its row states: refused with what to do, unless it asks for nothing."""

import json

import pytest

from miles.base.flags import FlagError
from miles.compat.border import read_command
from miles.compat.spellings import CKPT_STEP
from miles.compat.verdicts import CONDITIONS, FOREIGN_FLAGS, Foreign
from miles.config.notes import written
from miles.config.parser import judge
from tests.fast.config.conftest import QWEN3, minimal

REFUSED = [row for row in FOREIGN_FLAGS.values() if row.heading is None]
VALUES = {"switch": [], "value": ["7"], "list": ["7", "8"]}
# No condition that makes a refused flag idle holds in this run, apart from two that exclude each other.
NOTHING_HOLDS = (
    "--train-backend megatron --actor-num-gpus-per-node 2 --load empty --weight-decay 0.1 --async-steps 1 "
    "--rollout-engine sglang --pause-generation-mode in_place --opd-log-prob-top-k 4"
)


def words(rows: list[Foreign]) -> list[str]:
    return [word for row in rows for word in (row.flag, *VALUES[row.kind])]


def test_all_that_would_change_the_result_is_refused_at_once(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    command = minimal(f"{NOTHING_HOLDS} --hf-checkpoint {tmp_path}", without="--hf-checkpoint")
    messages = set[str]()
    for more in ([], ["--lora-rank", "4"]):
        with pytest.raises(FlagError) as caught:
            judge(read_command([*command, *more, *words(REFUSED)]))
        messages |= {*caught.value.messages}
    wanted = {
        f"{written(row.flag, VALUES[row.kind])}: {row.why}; {row.instead}" for row in REFUSED if row.flag != CKPT_STEP
    }
    assert wanted <= messages


@pytest.mark.parametrize("flags", [f"{row.flag} {value}" for row in REFUSED for value in row.neutral])
def test_the_value_that_asks_for_nothing_is_noted(accepted, flags):
    assert any(note.written == flags for note in accepted(flags).accepted)


# In the order of the conditions: a command where each makes its flag idle.
IDLE = {
    "has_tool_calls": "--generate-multi-samples --environment tool_calls:call=json.loads --apply-chat-template "
    "--rollout-max-context-len 99",
    "keeps_tokens": "--slime-router-middleware-paths a.RadixTreeMiddleware",
    "shares_gpus": "--offload --colocate",
    "evaluates_the_same_key": "--eval-reward-key acc --reward-key acc --custom-rm-path json:loads",
    "samples_teacher_tokens": "--opd-topk-per-position",
    "centers_no_scores": "--score-centering-top-k 64",
    "has_no_advantages": "--disable-compute-advantages-and-returns --loss-type sft_loss",
    "has_no_adapter": "--experts-shared-outer-loras",
    "flushes_cache": "--namespaced-radix-cache",
    "trains_what_generated": "--keep-old-actor",
    "has_llama3_rope": "--use-rope-scaling --train-backend megatron",
    "trains_any_layer": "--squared-relu --train-backend fsdp",
    "loads_nothing": "--use-checkpoint-opt_param-scheduler",
    "has_checkpoint": "--exit-on-missing-checkpoint",
    "divides_weights": "--use-torch-fsdp2 --train-backend fsdp",
    "starts_at_weight_decay": "--start-weight-decay 0.10 --weight-decay 0.1",
    "ends_at_weight_decay": "--end-weight-decay 0.1 --weight-decay 0.1",
}


def test_every_condition_is_tried():
    assert [*IDLE] == [*CONDITIONS] and {row.unless for row in REFUSED} - {None} == {*CONDITIONS}


@pytest.mark.parametrize(("condition", "flags"), IDLE.items())
def test_a_flag_is_noted_where_its_condition_holds(accepted, condition, flags):
    without = "--rm-type" if "--custom-rm-path" in flags else ""
    without += "--n-samples-per-prompt --rollout-max-response-len --rm-type" if "sft_loss" in flags else ""
    row = FOREIGN_FLAGS[flags.split()[0]]
    assert row.unless == condition
    notes = [note for note in accepted(flags, without).accepted if note.written.split()[0] == row.flag]
    assert [note.why for note in notes] == [row.unless_why]


def test_a_value_may_be_left_out(accepted):
    for flags in ("--use-session-server", "--use-session-server v2"):
        assert any(note.written == flags for note in accepted(flags).accepted)


def test_servers_that_only_evaluate_are_noted(accepted):
    flags = ["--eval-sglang-mem-fraction-static 0.9", "--eval-sglang-disable-radix-cache"]
    assert {*flags} <= {note.written for note in accepted(" ".join(flags)).accepted}
