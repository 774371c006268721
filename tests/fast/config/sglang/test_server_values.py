"""Values of SGLang's flags are checked as its own parser would check them, without importing it."""

import json
import subprocess
import sys

import pytest

from miles.base.flags import Errors, FlagError
from miles.config.parser import parse
from miles.config.servers.passed_on import ServerFlags
from miles.config.sglang.installed import Accepted, router_flags, server_flags
from miles.config.sglang.rules import check_server_values
from miles.config.validate import validate
from tests.fast.support.rows import rows

SGLANG = "--rollout-engine sglang --actor-num-gpus-per-node 1 "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--sglang-api-key", "hunter22\x01secret"],
            "--sglang-api-key (hidden): has a control character; correct the v",
        ),
        (["--sglang-api-key=hunter22\x01secret"], "--sglang-api-key (hidden): has a control character; correct the v"),
        (["--sglang-admin-api-key", "x", "hunter22\x01"], "--sglang-admin-api-key (hidden): has a control character;"),
        (
            ["--router-api-key", "hunter22\x01secret"],
            "--router-api-key (hidden): has a control character; correct the v",
        ),
        (["--sglang-api-kex", "hunter22\x01secret"], "--sglang-api-kex: has a control character; correct the value"),
        (
            ["--sglang-api-key", "hunter22\udcff"],
            "--sglang-api-key (hidden): has bytes that are not UTF-8; correct the v",
        ),
        (["--sglang-api-key", ""], "--sglang-api-key: the value is empty; give one, or drop --sglang-api-key"),
        (["--router-policy", " "], "--router-policy: the value is empty; give one, or drop --router-policy"),
        (["--sglang-dtype", "half\x1b[2J"], "--sglang-dtype half [2J: has a control character; correct the value"),
        (["--sglang-config", "a\nb"], "--sglang-config a b: has a line break or another control character; correct"),
    ],
)
def test_a_text_that_no_message_can_hold_is_refused_by_its_flag(command, words, message):
    with pytest.raises(FlagError) as caught:
        validate(parse([*command(SGLANG), *words]))
    assert len(caught.value.messages) == 1 and caught.value.messages[0].startswith(message)


def test_json_for_a_server_may_have_lines(command):
    words = ["--sglang-json-model-override-args", '{\n\t"num_hidden_layers": 2\n}']
    assert validate(parse([*command(SGLANG), *words])).settings.server_flags.server == tuple(
        ["--" + words[0][9:], words[1]]
    )


@pytest.mark.parametrize(("flags", "expected"), rows(__file__, "test_wrong_value_is_refused"))
def test_wrong_value_is_refused(refused, flags, expected):
    (message,) = refused(SGLANG + flags)
    assert expected in message


@pytest.mark.parametrize("flags", rows(__file__, "test_what_sglang_accepts_is_accepted"))
def test_what_sglang_accepts_is_accepted(validated, flags):
    validated(SGLANG + flags)


def test_key_is_not_shown(refused):
    (message,) = refused(SGLANG + "--sglang-ssl-keyfile-password s3cret s4cret")
    assert "takes one value" in message and "cret" not in message


def test_installed_sglang_is_read_without_importing_it():
    assert {"--tp-size", "--model", "--mem-fraction-static", "--disable-cuda-graph"} <= server_flags().keys()
    assert {"--policy", "--health-check-interval-secs"} <= router_flags().keys()


def test_choices_are_not_judged_beside_a_plugin(monkeypatch):
    monkeypatch.setattr("miles.config.sglang.rules.has_plugins", lambda: True)
    errors = Errors()
    check_server_values(ServerFlags(("--attention-backend", "of-the-plugin", "--tp-size", "x")), errors)
    assert [message.split(":")[0] for message in errors.messages] == ["--sglang-tp-size x"]


SHOWN = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(add_help=False)
ServerArgs.add_cli_args(parser)
print(json.dumps({
    name: [action.nargs, getattr(action.type, "__name__", None), None if action.choices is None else [*action.choices]]
    for action in parser._actions for name in action.option_strings
}, default=str))
"""
COUNTS = {None: (1, 1), "?": (0, 1), "*": (0, None), "+": (1, None), 0: (0, 0)}
READINGS = {
    "int": "int",
    "float": "float",
    "human_readable_int": "size",
    "loads": "json",
    "json_list_type": "json",
    "parse_cuda_graph_config_arg": "json",
}
COMPUTED = {
    "--sampling-backend",
    "--reasoning-parser",
    "--tool-call-parser",
    "--kv-canary-real-data",
    "--lora-target-modules",
}


@pytest.mark.slow
def test_source_says_what_the_parser_of_sglang_says():
    pytest.importorskip("sglang")
    output = subprocess.run([sys.executable, "-c", SHOWN], capture_output=True, text=True, check=True).stdout
    parser = {
        name: Accepted(*COUNTS[nargs], READINGS.get(reader, "text"), () if name in COMPUTED else tuple(choices or ()))
        for name, (nargs, reader, choices) in json.loads(output.splitlines()[-1]).items()
    }
    assert server_flags() == parser
