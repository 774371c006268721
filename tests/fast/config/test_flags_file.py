"""An ``@file`` is lines of flags, or a shell script that other scripts source."""

import pytest

from miles.base.flags import FlagError
from miles.config.files import FlagsFile
from miles.config.parser import parse
from tests.fast.support.rows import rows


def words(text):
    file = FlagsFile(text)
    return [word for line in text.splitlines() for word in file.words(line)]


def test_a_sourced_array_is_a_file_of_flags(tmp_path, monkeypatch):
    file = tmp_path / "model.sh"
    file.write_text(
        "#!/bin/bash\nMODEL_ARGS=(\n   --swiglu  # gated\n   --num-layers 4 \\\n"
        '   --rotary-base "${ROTARY_BASE:-1000000}"\n   --lr ${RATE}\n)\n'
    )
    monkeypatch.setenv("RATE", "1e-5")
    settings = parse([f"@{file}"])
    assert settings.optimizer.lr == 1e-5
    assert dict(settings.megatron_overrides) == {"gated_linear_unit": True, "num_layers": 4, "rotary_base": 1e6}
    monkeypatch.delenv("RATE")
    with pytest.raises(FlagError, match="the variable RATE is not set; set it in the environment"):
        parse([f"@{file}"])


def test_variables_of_the_script_are_read(monkeypatch):
    monkeypatch.setenv("EXPERTS", "16")
    script = (
        'set -ex\nLAYERS=4\nexport FREQ="[0]*1+[1]*3" WIDTH=${WIDTH:-64}\nEXPERTS=${EXPERTS:-8}\n\n'
        "MOE_ARGS=( --num-experts $EXPERTS )  # of the layers\n"
        'MODEL_ARGS=("${MOE_ARGS[@]}" --num-layers $LAYERS\n --moe-layer-freq "$FREQ" --hidden-size ${WIDTH})\n'
    )
    model = ["--num-layers", "4", "--moe-layer-freq", "[0]*1+[1]*3", "--hidden-size", "64"]
    assert words(script) == ["--num-experts", "16", *model]


@pytest.mark.parametrize(
    ("script", "read"),
    [
        ("A=(--a 1)\n# python train.py ${A[@]}\n", "--a 1"),
        ('A=(--a 1)\nA=("${A[@]}" --b 2)\n', "--a 1 --b 2"),
        ("A=(--a 1)\nB=(--a 2)\nA+=(--b 3)\n", "--a 1 --a 2 --b 3"),
        ("A=(--a x${NONE_OF_THESE:-})\n", "--a x"),
    ],
)
def test_arrays_keep_all_their_words_in_order(script, read):
    assert words(script) == read.split()


@pytest.mark.parametrize(("script", "said"), rows(__file__, "test_what_needs_a_shell_is_refused_with_the_way_out"))
def test_what_needs_a_shell_is_refused_with_the_way_out(tmp_path, script, said):
    (tmp_path / "model.sh").write_text(script)
    with pytest.raises(FlagError) as refused:
        parse([f"@{tmp_path / 'model.sh'}"])
    (message,) = refused.value.messages
    assert message.startswith("cannot read the line") and said in message


def test_arithmetic_of_known_variables_is_evaluated():
    script = "N=2\nTOKENS=$((1024 * N))\nA=(--x $((N + 1)) --y \"$(( (TOKENS + 1) / 2 ))\" --z '$((N))')\n"
    assert words(script) == ["--x", "3", "--y", "1024", "--z", "$((N))"]


def test_an_array_without_an_end_is_refused(tmp_path):
    (tmp_path / "model.sh").write_text("A=(\n--num-layers 36\n")
    with pytest.raises(FlagError, match=r"model\.sh.*cannot be read; an array has no end; close it with \)"):
        parse([f"@{tmp_path / 'model.sh'}"])


def test_quotes_make_signs_of_the_shell_plain_text():
    read = words("A=(--a 'b c' --b '$x (c)' --c \"f(1)\" --d \\$y)")
    assert read == ["--a", "b c", "--b", "$x (c)", "--c", "f(1)", "--d", "$y"]
    assert words("A=(\n--a 'it is `so`'\n)\n--b 2") == ["--a", "it is `so`", "--b", "2"]


def test_lines_of_flags_are_no_script():
    assert words("--note 'a $b (c)'\n--key a$B)`x`\nlr=1e-6\n") == ["--note", "a $b (c)", "--key", "a$B)`x`", "lr=1e-6"]
