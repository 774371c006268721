"""Whatever the command line is: it is accepted, or one sentence per fault is printed and the exit code is 2."""

import contextlib
import dataclasses
import io
import json
import re
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles.base.flags import LONGEST_MESSAGE, flag_name
from miles.cli import main
from miles.compat.border import parse_or_exit
from miles.compat.verdicts import FOREIGN_FLAGS
from miles.config.megatron.fields import MODEL_FLAGS, megatron_fields
from miles.config.settings import SECTIONS
from miles.config.sglang.installed import router_flags, server_flags
from tests.fast.config.conftest import MINIMAL

ROOT = Path(__file__).parents[3]
DIGITS = "9" * 6000
DEEP = "[" * 50_000
CONFIG = {"model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}


def errors_of(words, starts=True):
    """Return the lines of the error report, or none if the command is accepted: to start now, or as a plan."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            parse_or_exit(words, starts)
        except SystemExit as ended:
            if ended.code == 0:
                return []
            assert ended.code == 2
            lines = err.getvalue().splitlines()
            assert lines and out.getvalue() == ""
            for line in lines:
                assert line.isprintable() and len(line) <= LONGEST_MESSAGE + 100
            return lines
    return []


def command(**replaced):
    given_values = MINIMAL | {flag_name(name): value for name, value in replaced.items()}
    return [word for pair in given_values.items() if pair[1] is not None for word in pair]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (command(seed=DIGITS), r"--seed 9+…: must be a whole number"),
        (command(seed=str(2**63)), r"--seed 9223372036854775808: a number beyond 9223372036854775807"),
        (
            [*command(), "--rollout-stop-token-ids", "1", "1" + "0" * 400],
            r"--rollout-stop-token-ids 1 10+…: a number beyo",
        ),
        (command(lr="1" + "0" * 4000), "--lr inf: must be a finite number|--lr inf"),
        (command(hf_checkpoint=""), "--hf-checkpoint: the value is empty; give one, or drop --hf-checkpoint"),
        ([*command(), "--rollout-stop", "x", ""], "--rollout-stop: the value is empty"),
        (command(prompt_data=""), "--prompt-data: the value is empty"),
        (command(output_dir=" "), "--output-dir: the value is empty"),
        (
            command(hf_checkpoint="/" + "a" * 100_000),
            "--hf-checkpoint /a+…: has 100001 bytes, and a path has at most 4095; give a shorter one",
        ),
        (
            command(save_hf="out/" + "é" * 121),
            "--save-hf out/é+…: has a name of 242 bytes, and a name in a path that a run writes has at most 240; ",
        ),
        (command(hf_checkpoint="/models/missing"), "--hf-checkpoint /models/missing: no such folder"),
        (
            command(load="a" * 300),
            "--load a{59}…: has a name of 300 bytes, and a name in a path has at most 255; give a shorter one",
        ),
        ([*command(ref_load="a" * 300), "--use-kl-loss"], "--ref-load a+…: has a name of 300 bytes"),
        (
            command(hf_checkpoint="a" * 97),
            "--hf-checkpoint a+: no such folder, and no model of the Hugging Face hub has such a name; check the path",
        ),
        (command(hf_checkpoint="some--model"), "--hf-checkpoint some--model: no such folder, and no model of the Hugg"),
        (
            command(save="x/" * 3000, output_dir="x/" * 3000),
            "(?s)--save [x/]+…: has 6000 bytes, and a path that a run writes has at most 3500.*--output-dir [x/]+…: ",
        ),
        (
            command(save="/etc/passwd/a/b"),
            "--save /etc/passwd/a/b: is below /etc/passwd, which is a file; give a folder",
        ),
        (command(output_dir="a\nb"), "--output-dir a b: has a line break or another control character; correct the v"),
        (command(prompt_data="a\rb.jsonl"), "--prompt-data a b.jsonl: has a line break or another control character"),
        (command(output_dir="a\x9bb"), "--output-dir a b: has a line break or another control character"),
        (command(custom_rm_path="a\u2028b:c"), "--custom-rm-path a b:c: has a line break or another control character"),
        (
            [*command(), "--eval-interval", "1", "--eval-prompt-data", "a\nb", "c.jsonl"],
            "--eval-prompt-data a b: has a line break",
        ),
        (
            command(rollout_batch_size=str(2**63 - 1)),
            "--rollout-batch-size 9223372036854775807: must be at most 2147483",
        ),
        (
            command(rollout_batch_size="1000000", n_samples_per_prompt="1000"),
            "--rollout-batch-size 1000000: makes 1000000000 trajectories per iteration with --n-samples-per",
        ),
        (
            command(n_samples_per_prompt="9999999999999"),
            "--n-samples-per-prompt 9999999999999: must be at most 2147483647",
        ),
        (
            command(distributed_timeout_minutes=str(9 * 10**18)),
            "--distributed-timeout-minutes 9.*: must be at most 16666",
        ),
        (command(wait_timeout="1e18"), r"--wait-timeout 1e\+18: must be at most 1000000; give a number nearer to 0"),
        (command(samples_max_mb="1e300"), r"--samples-max-mb 1e\+300: must be at most 1000000000"),
        (command(lr="1e300"), r"--lr 1e\+300: must be at most 3.4e\+38"),
        (command(actor_num_gpus_per_node=str(2**63 - 1)), "--actor-num-gpus-per-node 9.*: must be at most 2147483647"),
        (
            command(actor_num_gpus_per_node="2147483647"),
            r"--actor-num-gpus-per-node 2147483647: must be in \[1, 100000\]",
        ),
        (
            command(actor_num_nodes="100000", actor_num_gpus_per_node="100000"),
            "--actor-num-gpus-per-node 100000: makes 10000000000 trainer ranks with --actor-num-nodes 100000;",
        ),
        (
            [*command(rollout_engine="sglang"), "--num-rollout-workers", "1000000"],
            r"--num-rollout-workers 1000000: must be in \[1, 1000\]",
        ),
        (
            [*command(rollout_engine="sglang"), "--sglang-api-key", "hunter22\x01secret"],
            r"--sglang-api-key \(hidden\): has a control character; correct the value",
        ),
        (command(prompt_data="a" * 100_000 + ".jsonl"), "--prompt-data a+…: no such file"),
        (
            command(prompt_data="reasoning_gym:gcd:size=-1"),
            "--prompt-data reasoning_gym:gcd:size=-1: size must be a whole",
        ),
        (
            command(prompt_data="reasoning_gym:gcd:seed=abc"),
            "--prompt-data .*: seed must be a whole number of at most 64",
        ),
        (command(prompt_data="reasoning_gym:gcd:size=3,size=4"), "--prompt-data .*: 'size' is given twice; keep one"),
        (command(prompt_data="reasoning_gym:gcd:size"), "--prompt-data .*: 'size' is not key=value; write size="),
        (command(save="a\x1b[2J"), r"--save a \[2J: has a line break or another control character"),
        (command(output_dir="a\udcff"), "--output-dir a : has bytes that are not UTF-8"),
        (["--" + "x" * 100_000, *command()], "--x+…: no such flag"),
        (["stray" * 10_000], "the word '(stray)+s?t?r?a?…' belongs to no flag"),
        (command(loss_aggregation="m" * 10_000), "--loss-aggregation m+…: no such choice"),
        (
            [*command(), "--apply-chat-template", "--apply-chat-template-kwargs", DEEP],
            r"--apply-chat-template-kwargs \[+…: it is nested more than",
        ),
        (
            [*command(), "--apply-chat-template", "--apply-chat-template-kwargs", '{"a": 1, "a": 2}'],
            "the key 'a' is in one object twice",
        ),
        (
            [*command(), "--apply-chat-template", "--apply-chat-template-kwargs", '{"a": ' + DIGITS + "}"],
            "more than 4300 digits",
        ),
        (["@/dev/zero"], "@/dev/zero: the file of flags has more than"),
        (["@."], r"@\.: the file of flags cannot be read \(Is a directory\)"),
        (["@" + "a" * 10_000], r"@a+…: the file of flags cannot be read \(File name too long\)"),
        (["@a\0b"], "@a b: the file of flags has a zero byte in its name"),
    ],
)
def test_hostile_values_are_one_short_sentence(words, sentence):
    started = time.process_time()
    report = "\n".join(errors_of(words))
    assert time.process_time() - started < 5, "a loop or a quadratic search; it takes milliseconds"
    assert re.search(sentence, report), report[:500]


def test_a_flag_that_is_a_text_may_have_lines():
    words = [*command(), "--rollout-stop", "\n\n", "--train-env-vars", '{"A":\n\t"b"}', "--thinking-max-len", "8"]
    assert errors_of([*words, "--thinking-interruption", "\nStop.\n</think>\n"], starts=False) == []


def test_a_time_limit_of_the_largest_value_fits():
    assert (
        errors_of(
            command(distributed_timeout_minutes="16666", wait_timeout="1000000", seed=str(2**63 - 1)), starts=False
        )
        == []
    )


@pytest.mark.parametrize("cycle", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_a_file_of_flags_that_includes_itself(tmp_path, cycle):
    for name, included in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        (tmp_path / name).write_text(f"--seed 1\n@{tmp_path / included}\n")
    (line,) = errors_of([f"@{tmp_path / cycle[0]}"])
    assert "includes itself; remove the line that names it" in line


def test_files_of_flags_that_include_each_other_very_often(tmp_path):
    (tmp_path / "0").write_text("--colocate\n")
    for number in range(1, 40):
        (tmp_path / str(number)).write_text(f"@{tmp_path / str(number - 1)}\n" * 2)
    (line,) = errors_of([f"@{tmp_path / '39'}"])
    assert "is one of more than 1000" in line


def test_one_file_may_be_included_twice(tmp_path):
    (tmp_path / "common").write_text("--seed 3\n")
    (tmp_path / "run").write_text(f"@{tmp_path / 'common'}\n@{tmp_path / 'common'}\n")
    assert errors_of([*command(), f"@{tmp_path / 'run'}"], starts=False) == []


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "config.json is broken: not JSON"),
        (json.dumps(CONFIG).encode()[:-9], "config.json is broken: not JSON"),
        (b"[]", "it is not a JSON object"),
        (b"\xff\xfe", "not UTF-8"),
        (DEEP.encode(), "nested more than"),
        (b"{}", "it names no model_type"),
        (json.dumps(CONFIG | {"vocab_size": "many"}).encode(), "vocab_size is not a whole number"),
        (json.dumps(CONFIG | {"num_attention_heads": 0}).encode(), "num_attention_heads is not a whole number"),
        (json.dumps(CONFIG | {"text_config": 3}).encode(), "text_config is not an object"),
        (json.dumps({"model_type": "qwen3", "num_hidden_layers": 2}).encode(), "it has no num_attention_heads"),
        (json.dumps(CONFIG | {"layer_types": {"a": 1}}).encode(), "layer_types is not a list of names"),
        (None, "the folder has no config.json"),
    ],
)
def test_a_broken_model_folder(tmp_path, monkeypatch, content, fault):
    folder = tmp_path / "model"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    for path in ("model", str(folder)):
        (line,) = errors_of([*command(hf_checkpoint=path), "--train-backend", "megatron"])
        assert fault in line and line.startswith(f"miles train: error: --hf-checkpoint {path}: ")


def test_the_command_prints_to_a_terminal_of_ascii(capfd, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(["größe"]) == 2
    print("größe", flush=True)
    assert raw.getvalue() == rb"gr\xf6\xdfe" + b"\n"
    with pytest.raises(SystemExit, match="0"):
        main(["train", *command(), "--explain"])
    sys.stdout.flush()
    assert rb"\u03a3" in raw.getvalue()


OWN = [flag_name(field.name) for section in SECTIONS.values() for field in dataclasses.fields(section)]
OTHERS = [
    *FOREIGN_FLAGS,
    *(field.flag for field in (*MODEL_FLAGS, *megatron_fields().values())),
    *(f"--sglang-{flag[2:]}" for flag in sorted(server_flags())),
    *(f"--router-{flag[2:]}" for flag in sorted(router_flags())),
]
HOSTILE = st.one_of(
    st.integers().map(str),
    st.floats().map(repr),
    st.text(max_size=20),
    st.sampled_from(
        ["", " ", "-1", "nan", "inf", "-inf", "1e999", "0", DIGITS, DEEP, "{}", "[]", '{"a": NaN}', "\ud800"]
    ),
    st.sampled_from(
        ["true", "None", "a" * 5000, "../" * 2000, "/dev/null", "a:b:c", ":", "hf:", "reasoning_gym:", "@"]
    ),
    st.recursive(st.none() | st.text(max_size=3), lambda x: st.lists(x) | st.dictionaries(st.text(), x)).map(
        json.dumps
    ),
)
ANY_FLAG = st.sampled_from(OWN) | st.sampled_from(OTHERS)
WORDS = st.lists(
    st.tuples(ANY_FLAG, st.lists(HOSTILE, max_size=2)).map(lambda pair: [pair[0], *pair[1]]),
    max_size=6,
)


def check_any_words(extra):
    words = [*command(), *(word for group in extra for word in group if not word.startswith("@"))]
    errors_of([word for word in words if word not in ("--help", "--version", "--explain")])


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(WORDS)
def test_any_words(extra):
    check_any_words(extra)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=2_000, suppress_health_check=[HealthCheck.too_slow])
@given(WORDS)
def test_any_words_for_long(extra):
    check_any_words(extra)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CONFIG_KEYS = st.sampled_from(
    [*CONFIG, "text_config", "layer_types", "architectures", "num_key_value_heads", "head_dim"]
)


def check_any_config(tmp_path, changes, backend):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    errors_of([*command(hf_checkpoint=str(tmp_path)), "--train-backend", backend])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(CONFIG_KEYS, JSON, max_size=3), st.sampled_from(["fsdp", "megatron"]))
def test_any_configuration_of_a_model(tmp_path, changes, backend):
    check_any_config(tmp_path, changes, backend)


@pytest.mark.slow
@settings(max_examples=1_500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(CONFIG_KEYS, JSON, max_size=3), st.sampled_from(["fsdp", "megatron"]))
def test_any_configuration_of_a_model_for_long(tmp_path, changes, backend):
    check_any_config(tmp_path, changes, backend)
