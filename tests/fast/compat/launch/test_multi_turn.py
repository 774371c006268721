"""miles' multi-turn function and its flags are read as the environment tool_calls."""

import re

import pytest

from tests.fast.support.rows import rows

FUNCTION = "--custom-generate-function-path miles.rollout.generate_hub.multi_turn.generate"
TOOLS = "--generate-tool-specs-path mine.specs --generate-execute-tool-function-path mine.call"


@pytest.fixture
def read(accepted):
    return lambda flags: accepted(f"--rollout-max-context-len 4096 {flags}")


def test_the_function_and_its_flags_become_the_environment(read):
    validated = read(f"{FUNCTION} {TOOLS} --generate-tool-call-parser qwen25 --generate-max-turns 5 --log-multi-turn")
    rollout = validated.settings.rollout
    assert rollout.environment == "tool_calls:call=mine.call,specs=mine.specs" and rollout.max_turns == 5
    assert rollout.custom_generate_function_path is None and validated.settings.data.apply_chat_template
    [note] = [note for note in validated.accepted if "multi_turn.generate" in note.written]
    assert note.why == f"--environment {rollout.environment} --max-turns 5 --apply-chat-template"


def test_the_number_of_turns_is_theirs_by_default_and_tools_may_be_those_of_the_rows(read):
    rollout = read(f"{FUNCTION} --generate-execute-tool-function-path mine.call --tool-key functions").settings.rollout
    assert (rollout.environment, rollout.max_turns) == ("tool_calls:call=mine.call", 16)


def test_one_turn_is_what_a_run_does_anyway(read):
    flags = "--custom-generate-function-path miles.rollout.generate_hub.single_turn.generate"
    assert read(flags).settings.rollout.custom_generate_function_path is None


@pytest.mark.parametrize(("flags", "expected"), rows(__file__, "test_what_cannot_be_obeyed_is_refused"))
def test_what_cannot_be_obeyed_is_refused(refusals, flags, expected):
    messages = refusals(f"--rollout-max-context-len 4096 {flags}")
    assert any(re.search(expected, message) for message in messages)


def test_its_flags_beside_the_environment_have_no_effect(read):
    flags = "--environment tool_calls:call=mine.call --apply-chat-template --generate-max-turns 4"
    assert any(note.written == "--generate-max-turns 4" for note in read(flags).accepted)


def test_a_function_of_that_name_in_the_users_folder_is_called(read, tmp_path, monkeypatch):
    folder = tmp_path / "examples" / "rollout" / "generate_hub"
    folder.mkdir(parents=True)
    (folder / "multi_turn.py").write_text("async def generate(trajectory):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    path = "examples.rollout.generate_hub.multi_turn.generate"
    assert read(f"--custom-generate-function-path {path}").settings.rollout.custom_generate_function_path == path
