"""Flags that belong to SGLang: how they are told from ours, and which are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.arguments.parser import parse
from miles.arguments.sglang.server_flags import (
    has_flag,
    known_router_flags,
    known_server_flags,
    split_server_flags,
    value_of,
)

OWN = {"--lr", "--sglang-server-concurrency", "--save"}
VALUES = st.lists(st.sampled_from(["1", "-1", "x y", "{}", "float32", "a=b"]), max_size=3)
FLAGS = {
    "--lr": "ours",
    "--sglang-server-concurrency": "ours",
    "--sglang-dtype": "server",
    "--sglang-cuda-graph-bs": "server",
    "--router-policy": "router",
    "--sglang-router-policy": "router",
}


@given(st.lists(st.tuples(st.sampled_from(sorted(FLAGS)), VALUES)))
def test_every_word_goes_to_one_parser_in_order(groups):
    ours, passed_on = split_server_flags([word for flag, values in groups for word in (flag, *values)], OWN)
    expected = {"ours": [], "server": [], "router": []}
    for flag, values in groups:
        owner = FLAGS[flag]
        stripped = {"server": "--sglang-", "router": "--sglang-router-" if "sglang" in flag else "--router-"}
        named = flag if owner == "ours" else "--" + flag.removeprefix(stripped[owner])
        expected[owner] += [named, *values]
    assert {"ours": ours, "server": [*passed_on.server], "router": [*passed_on.router]} == expected


def test_equals_signs_and_spaced_words_are_understood():
    _, passed_on = split_server_flags(["--sglang-load-format dummy", "--sglang-dtype=float32"], OWN)
    assert passed_on.server == ("--load-format", "dummy", "--dtype=float32")
    assert value_of(passed_on.server, "--dtype") == "float32"
    assert value_of(passed_on.server, "--load-format") == "dummy"
    assert has_flag(passed_on.server, "--dtype") and not has_flag(passed_on.server, "--d")


def test_installed_sglang_is_read_without_importing_it():
    assert {"--tp-size", "--model", "--mem-fraction-static", "--disable-cuda-graph"} <= known_server_flags()
    assert {"--policy", "--health-check-interval-secs"} <= known_router_flags()


def test_flags_in_a_file_of_flags_are_passed_on(command, tmp_path):
    (tmp_path / "flags").write_text("--sglang-dtype float32  # as the trainer\n--router-policy random\n")
    settings = parse(command(f"--rollout-engine sglang @{tmp_path / 'flags'}"))
    assert settings.server_flags.server == ("--dtype", "float32")
    assert settings.server_flags.router == ("--policy", "random")


SGLANG = "--rollout-engine sglang --actor-num-gpus-per-node 2 "


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--sglang-dtype float32", "--sglang-dtype: would be ignored by --rollout-engine torch"),
        ("--router-policy random", "--router-policy: would be ignored by --rollout-engine torch"),
        ("--check-weight-update-equal", "--check-weight-update-equal: would be ignored by --rollout-engine torch"),
        ("--rollout-num-gpus 2", "--rollout-num-gpus 2: the embedded torch engine runs on one device"),
        (SGLANG + "--sglang-max-total-token 3", "did you mean --sglang-max-total-tokens"),
        (SGLANG + "--router-polcy random", "did you mean --router-policy"),
        (SGLANG + "--sglang-port 1", "--sglang-port: the launcher sets it"),
        (SGLANG + "--sglang-tp-size 4", "give --rollout-num-gpus-per-engine 4"),
        (SGLANG + "--torch-engine-max-batch-size 3", "would be ignored with --rollout-engine sglang"),
        (SGLANG + "--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "give a divisor of 3"),
        (SGLANG + "--colocate --rollout-num-gpus-per-engine 3", "give a divisor of 2"),
        (SGLANG + "--rollout-external", "needs --rollout-external-engine-addrs"),
        (SGLANG + "--rollout-external-engine-addrs h:1", "without --rollout-external"),
        (SGLANG + "--rollout-external --rollout-external-engine-addrs h:1 host", "is not HOST:PORT"),
        (SGLANG + "--rollout-external --rollout-external-engine-addrs h:1 --sglang-dtype x", "whose engines run"),
        (SGLANG + "--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "or --rollout-num-gpus 4"),
        (SGLANG + "--sglang-pp-size 2", "--sglang-pp-size 2: an engine here is tensor parallel"),
        (SGLANG + "--sglang-data-parallel-size=2", "for more engines give --rollout-num-gpus,"),
        (SGLANG + "--sglang-nnodes 2", "for more devices an engine give --rollout-num-gpus-per-engine,"),
        (SGLANG + "--sglang-pp-size 2 --sglang-enable-dp-attention", "--sglang-pp-size 2"),
        (SGLANG + "--rollout-health-check-interval 0", "above 0"),
        (SGLANG + "--worker-timeout 0", "--worker-timeout 0.0: must be a finite number above 0"),
        (SGLANG + "--use-fault-tolerance --rollout-health-check-timeout 0", "above 0"),
        (SGLANG + "--update-weight-disk-dir d", "with --update-weight-transfer-mode broadcast"),
    ],
)
def test_refused(validated, flags, told):
    with pytest.raises(ValueError) as refusal:
        validated(flags)
    assert told in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "engines"),
    [
        ("", 0),
        ("--rollout-engine sglang", 1),
        ("--rollout-engine sglang --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2 --sglang-tp-size 2", 2),
        ("--rollout-engine sglang --rollout-num-gpus-per-engine 2", 1),
        ("--rollout-engine sglang --sglang-pp-size 1 --sglang-dp-size 1", 1),
        (SGLANG + "--sglang-dp-size 2 --sglang-enable-dp-attention --sglang-attn-dp-size 2", 1),
        (SGLANG + "--colocate", 2),
        (SGLANG + "--rollout-external --rollout-external-engine-addrs h:1 h:2", 0),
    ],
)
def test_number_of_engines(validated, flags, engines):
    assert validated(flags).settings.num_engines == engines


def test_own_flags_that_start_like_sglangs_stay_ours(validated):
    sglang = validated(SGLANG + "--sglang-server-concurrency 7").settings.sglang
    assert sglang.sglang_server_concurrency == 7
