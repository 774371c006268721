"""Flags that launch scripts may have, row by row of their tables."""

import re

import pytest

from miles.base.flags import Errors
from miles.compat.border import read_command
from miles.compat.verdicts import FOREIGN_FLAGS
from miles.config.megatron.fields import MODEL_FLAGS, megatron_fields
from miles.config.megatron.rules import FIXED, FREE_FIELDS, SHAPE_FIELDS, check_overrides
from miles.config.megatron.rules import judge as judge_field
from miles.config.notes import HEADINGS, READ_AS
from miles.config.parser import judge
from miles.config.sglang.installed import server_flags
from miles.config.sglang.rules import RENAMED, TENSOR_PARALLEL
from scripts.pages.launch_scripts import launch_page


def test_every_noted_flag_says_why_it_cannot_change_the_run():
    """First what kind of setting it is, whose results are the same, and then why."""
    rows = re.findall(r"^\| `(--[\w-]+)` \| noted \| ([^:]*)(?:: )?(.*) \|$", launch_page(), flags=re.MULTILINE)
    assert len(rows) > 150
    assert not [flag for flag, kind, why in rows if kind not in HEADINGS.keys() - {READ_AS} or len(why.split()) < 4]
    rows = re.findall(r"^\| `(--[\w-]+)` \| noted or refused \| .*\bNoted (.*) \|$", launch_page(), flags=re.MULTILINE)
    assert len(rows) > 50 and all(when.startswith(("if ", "with ", "without ")) for _, when in rows)


WORDS = {"switch": [], "value": ["1"], "list": ["1", "2"], "optional": []}


def test_all_noted_flags_together_leave_every_setting_as_it_is(command):
    rows = [row for row in FOREIGN_FLAGS.values() if row.heading not in (None, READ_AS)]
    plain = ["--actor-num-gpus-per-node", "1", "--train-backend", "megatron", *command()]
    noted = [word for row in rows for word in (row.flag, *WORDS[row.kind])]
    result, expected = (judge(read_command([*plain, *words])) for words in (noted, []))
    assert result.settings == expected.settings
    assert {(note.written.split()[0], note.why) for note in result.accepted} >= {(row.flag, row.why) for row in rows}


def test_a_field_of_megatron_that_is_noted_is_not_passed_on():
    fields = [field for field in (*MODEL_FLAGS, *megatron_fields().values()) if field.name in FREE_FIELDS]
    assert {field.name for field in fields} == FREE_FIELDS.keys()
    for field in fields:
        verdict = judge_field(field, "another", {}, {})
        assert verdict.value is None and verdict.note is not None
        assert (verdict.note.heading, verdict.note.why) == FREE_FIELDS[field.name]


@pytest.mark.parametrize("name", sorted({*SHAPE_FIELDS, *FIXED}))
def test_a_field_that_the_model_or_the_backend_sets_may_be_repeated_and_not_changed(name):
    there = FIXED[name][0] if name in FIXED else 7

    def errors_of(value) -> list[str]:
        errors = Errors()
        check_overrides(((name, value),), {} if name in FIXED else {name: there}, {name: "--flag"}, errors)
        return errors.messages

    other = not there if isinstance(there, bool) else "another"
    assert errors_of(there) == []
    (message,) = errors_of(other)
    assert message.startswith("--flag") and "contradicts" in message


@pytest.mark.parametrize(("written", "read"), RENAMED.items())
def test_an_earlier_name_of_a_server_flag_is_read_as_todays(command, written, read):
    value = str(next(iter(server_flags()[read].choices), 4))
    words = [
        "--actor-num-gpus-per-node",
        "1",
        *command("--rollout-engine sglang --device cuda"),
        f"--sglang-{written[2:]}",
        value,
    ]
    validated = judge(read_command(words))
    assert validated.settings.server_flags.server == (read, value)
    assert any(f"--sglang-{written[2:]}" in note.written for note in validated.accepted)


@pytest.mark.parametrize("flag", TENSOR_PARALLEL)
def test_the_size_of_an_engine_is_that_of_its_gpus(command, flag):
    """Another size of a script is noted, and the engine's own counts."""
    words = [
        "--actor-num-gpus-per-node",
        "1",
        *command("--rollout-engine sglang --device cuda"),
        f"--sglang-{flag[2:]}",
        "8",
    ]
    validated = judge(read_command(words))
    assert validated.settings.server_flags.server == ()
    assert any(f"--sglang-{flag[2:]} 8" in note.written for note in validated.accepted)
