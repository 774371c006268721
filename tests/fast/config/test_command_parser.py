"""A small command refuses an impossible name or number in one short sentence."""

import pytest

from miles import cli

LONG = "a" * 300
NAME = f"{'a' * 59}…: has a name of 300 bytes, and a name in a path has at most 255; give a shorter one"
BREAK = "a b [2J: has a line break or another control character; correct the path"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs", LONG], f"FOLDER {NAME}"),
        (["runs", "a/" * 2500], f"has {5000} bytes, and a path has at most 4095; give a shorter one"),
        (["runs", "a\nb\x1b[2J"], f"FOLDER {BREAK}"),
        (["compare", "outputs/run", LONG], f"RUN {NAME}"),
        (["compare", "a\nb\x1b[2J"], f"RUN {BREAK}"),
        (["compare", "outputs/run", "--page", LONG], f"--page {NAME}"),
        (["report", LONG], f"RUN {NAME}"),
        (["export", "outputs/run", LONG], f"OUT {NAME}"),
        (["eval", "outputs/run", "--weights", LONG], f"--weights {NAME}"),
        (["sweep", LONG], f"FILE {NAME}"),
        (["sweep", "a\nb\x1b[2J"], f"FILE {BREAK}"),
        (["translate", LONG], f"FILE {NAME}"),
        (["check-reward", "math", "--cases", LONG], f"--cases {NAME}"),
        (["smoke", "--junit", LONG, "--", "--lr", "1"], f"--junit {NAME}"),
        (["quickstart", "--output-dir", LONG], f"--output-dir {NAME}"),
        (
            ["report", "outputs/run", "--samples", str(2**63)],
            f"--samples {2**63}: must be at most 2147483647; give a numb",
        ),
        (
            ["sample", "outputs/run", "x", "--n", "-9999999999"],
            "--n -9999999999: must be at least -2147483647; give a numb",
        ),
        (["sample", "outputs/run", "x", "--seed", str(2**63)], f"--seed {2**63}: must be at most {2**63 - 1}; give a"),
        (
            ["sample", "outputs/run", "x", "--temperature", "1e300"],
            "--temperature 1e+300: must be at most 3.4e+38; give",
        ),
        (["runs", "outputs", "stray\x1b[2J"], "error: stray [2J: is a word too many; put a value that has"),
        (["doctor", "--quik"], "error: --quik: no such flag; did you mean --quick?"),
        (["report", "run", "--port", "x"], "error: --port x: must be a whole number; correct the value"),
        (["init", "mine", "--task", "maths"], "error: --task maths: no such choice; give one of 'math', "),
        (["compare", "run", ""], "error: RUN: the value is empty; give one"),
        (["report", "run", "--static", ""], "error: --static: the value is empty; give one, or drop --static"),
        (["conformance", "--cache="], "error: --cache: the value is empty; give one, or drop --cache"),
        (["runs", "outputs", "a" * 5000], f"error: {'a' * 199}…: is a word too many"),
    ],
)
def test_a_value_that_nothing_can_have(capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    told = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert message in told[-1] and told[-1].startswith(f"miles {words[0]}: error: ")
    assert len(told[-1]) < 1600 and all(line.isprintable() for line in told)


@pytest.mark.parametrize(
    "words",
    [
        ["sample", "x", "--n", "0", "--max-response-len", "-1"],
        ["eval", "x", "--weights", LONG, "--max-response-len", str(2**63)],
    ],
    ids=["below one", "impossible"],
)
def test_all_wrong_values_are_reported_at_once(capsys, words):
    with pytest.raises(SystemExit):
        cli.main(words)
    told = capsys.readouterr().err.splitlines()
    assert words[2] in told[-2] and words[4] in told[-1]
