"""Launch scripts in the shape of slime's: arrays of flags, some from a file that the script sources."""

import pytest

from miles import cli
from miles.compat.translate.launchers.base import launcher_of
from miles.compat.translate.reading import read_document
from miles.compat.translate.translation import Expression, Translation

SCRIPT = """#!/bin/bash
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/small.sh"
EXTRA=""
OPTIMIZER_ARGS=(
   --lr 1e-6
   --adam-beta2 0.98
)
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="${RUNTIME_ENV}" \\
   -- python3 slime/train.py \\
   --actor-num-nodes 1 ${NODE_ARGS[@]} \\
   --hf-checkpoint $MODEL \\
   --colocate \\
   ${MODEL_ARGS[@]} $EXTRA \\
   "${OPTIMIZER_ARGS[@]}" \\
   --eval-prompt-data small $DATA/rows.jsonl ${EVAL_ARGS[@]} \\
   --calculate-per-token-loss "$@" 2>&1 | tee log
"""


def translated(folder, text=SCRIPT):
    path = folder / "run.sh"
    path.write_text(text)
    document = read_document(str(path))
    launcher = launcher_of(document, None)
    translation = Translation(document, launcher.table())
    launcher.translate(translation)
    return translation


def test_flags_that_are_set_elsewhere_are_no_values(tmp_path, capsys):
    translation = translated(tmp_path)
    assert ("--colocate",) in translation.groups and ("--calculate-per-token-loss",) in translation.groups
    assert ("--actor-num-nodes", "1") in translation.groups and ("--adam-beta2", "0.98") in translation.groups
    assert not any("$" in word for word in translation.words)
    assert [f"{s.key} = {s.value}" for s in translation.unread if isinstance(s.value, Expression)] == [
        "--hf-checkpoint = $MODEL",
        "--eval-prompt-data = small $DATA/rows.jsonl",
    ]
    assert cli.main(["translate", str(tmp_path / "run.sh")]) == 0
    output = capsys.readouterr().out
    for name in ("NODE_ARGS", "MODEL_ARGS", "EVAL_ARGS"):
        sentence = f"${{{name}[@]}} is set elsewhere (source models/small.sh): give that file's flags too"
        assert output.count(sentence) == 1 and output.count(name) == 1
    assert output.count("$@ is what the script is called with") == 1 and "Expression(" not in output


def test_a_sourced_file_beside_the_script_is_read(tmp_path):
    (tmp_path / "models").mkdir()
    model = "LAYERS=4\nMODEL_ARGS=(\n --swiglu # gated\n --num-layers $LAYERS\n --rotary-base ${BASE:-1000000}\n)\n"
    (tmp_path / "models" / "small.sh").write_text(model)
    translation = translated(tmp_path)
    for group in (("--swiglu",), ("--num-layers", "4"), ("--rotary-base", "1000000"), ("--colocate",)):
        assert group in translation.groups
    assert [*translation.document.elsewhere] == ["${NODE_ARGS[@]}", "${EVAL_ARGS[@]}", "$@"]
    assert "is not set in this file" in translation.document.elsewhere["${NODE_ARGS[@]}"].value


@pytest.mark.parametrize("text", ["echo 'open\n", "source models/small.sh\n"])
def test_a_sourced_file_that_cannot_be_read_or_sources_itself_ends_nothing(tmp_path, text):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text(text)
    assert "${MODEL_ARGS[@]}" in translated(tmp_path).document.elsewhere


@pytest.mark.parametrize(
    ("words", "group", "elsewhere"),
    [
        ("--colocate $EXTRA_ARGS", ("--colocate",), ["$EXTRA_ARGS"]),
        ("--colocate ${MORE:-}", ("--colocate",), ["${MORE:-}"]),
        ("--lr 1e-6 $MORE", ("--lr", "1e-6"), ["$MORE"]),
        ("$MORE --lr 1e-6", ("--lr", "1e-6"), ["$MORE"]),
        ("--lr 1e-6 > log", ("--lr", "1e-6"), []),
        ("--lr 1e-6 $MORE $MORE", ("--lr", "1e-6"), ["$MORE"]),
    ],
)
def test_an_expansion_is_a_value_only_where_one_fits(tmp_path, words, group, elsewhere):
    translation = translated(tmp_path, f"python3 slime/train.py {words}\n")
    assert group in translation.groups and [*translation.document.elsewhere] == elsewhere


COMMAND = "python3 slime/train.py"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{COMMAND} \\\n --wandb-group ${{MODEL##*/}} \\\n --lr 1e-6\n", "--lr 1e-6"),
        (f"{COMMAND} --input-key text#1 --lr 1e-6 # --seed 3\n", "--input-key text#1 --lr 1e-6"),
        (f"{COMMAND} --wandb-group run-$(date +%s) --lr 1e-6\n", "--lr 1e-6"),
        (f"{COMMAND} --num-rollout $((3 * 4)) --lr 1e-6\n", "--num-rollout 12 --lr 1e-6"),
        (f"{COMMAND} --save `date +%s` --lr 1e-6\n", "--lr 1e-6"),
        (f"A=(\n --lr 1e-6\n # it's --clip-grad 1 \\\n --seed 3\n)\n{COMMAND} ${{A[@]}}\n", "--lr 1e-6 --seed 3"),
        (f'A="--lr 1e-6"\nA+=" --seed 3"\n{COMMAND} $A --bf16\n', "--lr 1e-6 --seed 3 --bf16"),
        (f"{COMMAND} --rollout-stop '<|im_end|>' \"</s>\" --lr 1 2>&1\n", "--rollout-stop <|im_end|> </s> --lr 1"),
        (f"A=(--rollout-stop '<eos>')\n{COMMAND} ${{A[@]}} &>log\n", "--rollout-stop <eos>"),
        (f"{COMMAND} --rollout-stop ';' --lr 1e-6\n", "--rollout-stop ; --lr 1e-6"),
        (f'{COMMAND} --train-env-vars "{{\\"A\\": \\\n2}}" --lr 1\\\ne-6\n', '--train-env-vars {"A": 2} --lr 1e-6'),
        (f"LR=1e-6\nif [ $SMALL ]; then\n LR=1e-5\nfi\n{COMMAND} --lr $LR --seed 3\n", "--seed 3"),
        (f"LR=1e-6\n[ $SMALL ] && LR=1e-5\n{COMMAND} --lr $LR --seed 3\n", "--seed 3"),
        (f"cat >a.py <<'E F'\nfor x in y: print('it\\'s')\nE F\nLR=1e-6\n{COMMAND} --lr $LR\n", "--lr 1e-6"),
        (f"cat << EOF >run.sh\n{COMMAND} --lr 1e-6\nEOF\nbash run.sh\n", "--lr 1e-6"),
        (f"if a; then LR=1e-5; fi\nLR=1e-6\n{COMMAND} --lr $LR\n", "--lr 1e-6"),
        (f"{COMMAND} --lr 1e-6 `# the peak` \\\n --seed `#` 3 \\\n --bf16\n", "--lr 1e-6 --seed 3 --bf16"),
        ("python3 train_async.py --lr 1e-6\n", "--async-steps 1 --lr 1e-6"),
        ("python3 slime/train_async.py --lr 1e-6 --async-steps 2\n", "--lr 1e-6 --async-steps 2"),
    ],
)
def test_no_word_of_the_command_is_lost(tmp_path, text, words):
    assert " ".join(translated(tmp_path, text).words) == words


def test_flags_of_a_branch_are_listed(tmp_path):
    text = f"A=(--lr 1e-6)\nif [ $SMALL ]; then\n A+=(--colocate)\nfi\n{COMMAND} ${{A[@]}} --seed 3\n"
    translation = translated(tmp_path, text)
    assert translation.words[:4] == ["--lr", "1e-6", "--seed", "3"]
    assert "is set in a branch" in translation.document.elsewhere["${A[@]}"].value


@pytest.mark.parametrize("text", ["echo $(date\n", 'echo "${A\n', "echo `date\n"])
def test_a_bracket_that_is_not_closed_has_its_line(tmp_path, capsys, text):
    (tmp_path / "run.sh").write_text(f"echo\n{text}")
    assert cli.main(["translate", str(tmp_path / "run.sh")]) == 2
    assert "run.sh, line 2: not a shell script" in capsys.readouterr().err


def test_quotes_without_end_are_one_sentence(tmp_path, capsys):
    (tmp_path / "run.sh").write_text('"$(' * 2000)
    assert cli.main(["translate", str(tmp_path / "run.sh")]) == 2
    assert "run.sh, line 1: not a shell script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("run() { local lr=${1:-1e-6}; TRAIN --lr $lr --seed ${2:-3}; }\nrun 5e-7\n", "--lr 5e-7 --seed 3"),
        ("run() { TRAIN --lr ${1:-1e-6}; }\nrun 1e-7\nrun 2e-7\n", "--lr 2e-7"),
        ("run() { TRAIN --lr ${LR:-1e-6}; }\nLR=2e-7 run\n", "--lr 2e-7"),
        ("run() { TRAIN --lr ${LR:-1e-6}; }\nLR=2e-7 run\nrun\n", "--lr 1e-6"),
        ("LR=1e-6\nlarge() { LR=2e-6; }\nTRAIN --lr $LR\n", "--lr 1e-6"),
        ("LR=1e-6\nlarge() { LR=2e-6; }\nlarge\nTRAIN --lr $LR\n", "--lr 2e-6"),
        ("run() { run; TRAIN --lr ${1:-1e-6}; }\nrun 2e-6\n", "--lr 2e-6"),
        ("run() { TRAIN --lr ${1:-1e-6} --seed 4; }\ntime run 2e-6\n", "--seed 4"),
        ("run() { shift; TRAIN --lr ${1:-1e-6} --seed 4; }\nrun 1 2e-6\n", "--seed 4"),
        ('run() { echo "+ $*"; "$@"; }\nrun TRAIN --lr 2e-6 --seed 4\n', "--lr 2e-6 --seed 4"),
        ("run() { TRAIN $*; }\nrun --lr 2e-6\n", "--lr 2e-6"),
        ("TRAIN --lr 1e-6\nlarge() { TRAIN --lr 2e-6; }\n", "--lr 1e-6"),
        ("source large.sh\nTRAIN --lr 1e-6\n", "--lr 1e-6"),
    ],
)
def test_a_function_has_the_arguments_of_its_call(tmp_path, script, flags):
    (tmp_path / "large.sh").write_text("large() { python3 slime/train.py --lr 2e-6; }\n")
    translation = translated(tmp_path, script.replace("TRAIN", "python3 slime/train.py --colocate"))
    assert " ".join(translation.words) == f"--colocate {flags}"


def test_an_expansion_of_no_name_is_listed(tmp_path):
    assert [*translated(tmp_path, "python3 slime/train.py --lr 1e-6 ${}\n").document.elsewhere] == ["${}"]


def test_an_argument_of_the_script_is_named_as_one(tmp_path):
    elsewhere = translated(tmp_path, "python3 slime/train.py --lr 1e-6 $1\n").document.elsewhere
    assert "what the script is called with" in elsewhere["$1"].value
