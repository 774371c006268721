"""Flags of servers are separated from ours."""

from hypothesis import given
from hypothesis import strategies as st

from miles.config.parser import parse
from miles.config.servers.passed_on import PREFIXES, has_flag, split_server_flags, value_of

OWN = {"--lr", "--sglang-server-concurrency", "--save"}
VALUES = st.lists(st.sampled_from(["1", "-1", "x y", "{}", "float32", "a=b"]), max_size=3)
FLAGS = {
    "--lr": "ours",
    "--sglang-server-concurrency": "ours",
    "--sglang-dtype": "server",
    "--sglang-cuda-graph-bs": "server",
    "--router-policy": "router",
    "--sglang-router-policy": "router",
    "--vllm-max-num-seqs": "vllm",
}


@given(st.lists(st.tuples(st.sampled_from(sorted(FLAGS)), VALUES)))
def test_every_word_goes_to_one_parser_in_order(groups):
    ours, passed_on = split_server_flags([word for flag, values in groups for word in (flag, *values)], OWN)
    expected = {"ours": [], "server": [], "router": [], "vllm": []}
    for flag, values in groups:
        owner = FLAGS[flag]
        stripped = "--sglang-router-" if flag.startswith("--sglang-router-") else PREFIXES.get(owner, "--")
        named = "--" + flag.removeprefix(stripped)
        expected[owner] += [named, *values]
    assert {"ours": ours} | {name: [*words] for name, words in vars(passed_on).items()} == expected


def test_equals_signs_and_spaced_words_are_understood():
    _, passed_on = split_server_flags(["--sglang-load-format dummy", "--sglang-dtype=float32"], OWN)
    assert passed_on.server == ("--load-format", "dummy", "--dtype=float32")
    assert value_of(passed_on.server, "--dtype") == "float32"
    assert value_of(passed_on.server, "--load-format") == "dummy"
    assert has_flag(passed_on.server, "--dtype") and not has_flag(passed_on.server, "--d")


def test_flags_in_a_file_of_flags_are_passed_on(command, tmp_path):
    (tmp_path / "flags").write_text("--sglang-dtype float32  # as the trainer\n--router-policy random\n")
    settings = parse(command(f"--rollout-engine sglang @{tmp_path / 'flags'}"))
    assert settings.server_flags.server == ("--dtype", "float32")
    assert settings.server_flags.router == ("--policy", "random")
