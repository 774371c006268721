"""Values of SGLang's flags are checked as its own parser would check them, without importing it."""

import json
import subprocess
import sys

import pytest

from miles.base.flags import Errors, FlagError
from miles.config.parser import parse
from miles.config.sglang.flags import ServerFlags
from miles.config.sglang.installed import Accepted, server_flags
from miles.config.sglang.server_values import check_server_values
from miles.config.validate import validate

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


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--sglang-mem-fraction-static abc", "--sglang-mem-fraction-static abc: SGLang reads a number; give one"),
        (
            "--sglang-mem-fraction-static abc --sglang-mem-fraction-static def",
            "--sglang-mem-fraction-static abc: SGLang reads a number",
        ),
        ("--sglang-mem-fraction-static 1.7", "--sglang-mem-fraction-static 1.7: must be in (0, 1]; give a share such"),
        ("--sglang-swa-full-tokens-ratio 0", "--sglang-swa-full-tokens-ratio 0: must be in (0, 1]"),
        ("--sglang-schedule-conservativeness -1", "--sglang-schedule-conservativeness -1: must be at least 0; give"),
        ("--sglang-page-size 0", "--sglang-page-size 0: must be above 0; give such a number"),
        ("--sglang-chunked-prefill-size 4k8", "--sglang-chunked-prefill-size 4k8: SGLang reads a whole number"),
        ("--sglang-context-length 1.5Ki", "or a number with k, M, G, T, Ki, Mi, Gi or Ti; give one, such as 16k"),
        ("--sglang-attention-backend trton", "no such choice; did you mean triton? SGLang has triton, torch_native"),
        ("--sglang-lora-backend fast", "--sglang-lora-backend fast: no such choice; give one of triton, "),
        ("--sglang-log-requests-level 9", "--sglang-log-requests-level 9: no such choice; give one of 0, 1, 2, 3"),
        ("--sglang-moe-a2a-backend=deep", "no such choice; give one of none, deepep"),
        ("--sglang-disable-radix-cache true", "--sglang-disable-radix-cache true: is a switch, which takes no value"),
        ("--sglang-no-enable-tf32-matmul 1", "is a switch, which takes no value"),
        ("--sglang-dtype", "--sglang-dtype: has no value; add one"),
        ("--sglang-dtype half float", "--sglang-dtype half float: takes one value; give one"),
        ("--sglang-cuda-graph-bs-decode 1 two", "--sglang-cuda-graph-bs-decode 1 two: SGLang reads a whole number"),
        ("--sglang-mm-process-config {image", "SGLang reads JSON; write it in single quotes"),
        ("--sglang-json-model-override-args {layers", "SGLang reads JSON; write it in single quotes"),
        ("--rollout-num-gpus 2 --router-cache-threshold high", "--router-cache-threshold high: SGLang reads a number"),
        (
            "--rollout-num-gpus 2 --sglang-router-policy best",
            "--router-policy best: no such choice; give one of",
        ),
    ],
)
def test_wrong_value_is_refused(refused, flags, expected):
    (message,) = refused(SGLANG + flags)
    assert expected in message


@pytest.mark.parametrize(
    "flags",
    [
        "--sglang-mem-fraction-static .8",
        "--sglang-context-length 16k --sglang-max-total-tokens 1.5M --sglang-max-prefill-tokens 2Ki",
        "--sglang-chunked-prefill-size -1",
        "--sglang-cuda-graph-bs-decode 1 2 4 --sglang-custom-weight-loader",
        "--sglang-disable-cuda-graph --sglang-enable-tf32-matmul --sglang-no-enable-fused-qk-norm-rope",
        '--sglang-mm-process-config={"image":{}} --sglang-model-checksum',
        "--sglang-max-lora-chunk-size 64 --sglang-quantization-param-path None",
        "--sglang-sampling-backend any --sglang-reasoning-parser any",  # SGLang computes these choices
    ],
)
def test_what_sglang_accepts_is_accepted(validated, flags):
    validated(SGLANG + flags)


def test_key_is_not_shown(refused):
    (message,) = refused(SGLANG + "--sglang-ssl-keyfile-password s3cret s4cret")
    assert "takes one value" in message and "cret" not in message


def test_choices_are_not_judged_beside_a_plugin(monkeypatch):
    monkeypatch.setattr("miles.config.sglang.server_values.has_plugins", lambda: True)
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
    shown = subprocess.run([sys.executable, "-c", SHOWN], capture_output=True, text=True, check=True).stdout
    parser = {
        name: Accepted(*COUNTS[nargs], READINGS.get(reader, "text"), () if name in COMPUTED else tuple(choices or ()))
        for name, (nargs, reader, choices) in json.loads(shown.splitlines()[-1]).items()
    }
    assert server_flags() == parser
