"""Everything that a run reads is checked by ``miles explain`` and by every start, before Ray and torch are imported."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save

from miles.base.flags import FlagError
from miles.compat.border import read_command
from miles.config.inputs import check_inputs, explain_inputs
from miles.config.parser import judge
from miles.config.validate import Validated
from miles.run.launcher import launch
from tests.fast.config.conftest import minimal
from tests.fast.conftest import byte_tokenizer

TEMPLATE = (
    "{% if messages[0].content == 'never' %}{{ raise_exception('no such topic') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
FUNCTIONS = """
def reward(samples):
    return [1.0 for sample in samples if sample.label is not None and sample.response]

def of_trl(prompts, completions, **kwargs):
    return [1.0] * len(prompts)

async def divides(samples):
    there = len(samples)
    return [there / 0]

def sentence(samples):
    return "right"

def keep(args, samples):
    return True

def nothing(samples):
    return [None for sample in samples]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with a tokenizer, functions and rows, where commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": len(tokenizer)}
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    (tmp_path / "model" / "model.safetensors").write_bytes(save({"weight": np.ones((4, 4), np.float32)}))
    name = f"functions_{tmp_path.name.replace('-', '_')}"  # a module is imported once
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    write(tmp_path / "rows.jsonl", [{"question": f"{n} + 1", "answer": n + 1} for n in range(20)])
    return tmp_path


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def words(folder, flags="", without="", data="rows.jsonl"):
    common = f"--hf-checkpoint {folder / 'model'} --prompt-data {data} --input-key question --label-key answer"
    (functions,) = folder.glob("functions_*.py")
    return minimal(f"{common} --apply-chat-template {flags}", f"--hf-checkpoint --prompt-data {without}".strip()) + (
        ["--custom-rm-path", f"{functions.stem}:reward"] if without == "--rm-type" and "custom-rm" not in flags else []
    )


def check(folder, *arguments, starts=True, **named):
    return check_inputs(judge(read_command(words(folder, *arguments, **named))).settings, starts)


def faults(folder, *arguments, **named):
    with pytest.raises(FlagError) as caught:
        check(folder, *arguments, **named)
    return caught.value.messages


PLANTED = {
    "null label": ({"question": "a", "answer": None}, "column 'answer' is null"),
    "broken JSON": ('{"question": "a", ', "not JSON"),
    "missing column": ({"questions": "a", "answer": "1"}, "no column 'question'; did you mean questions?"),
    "missing label": ({"question": "a", "answers": "1"}, "no column 'answer'; did you mean answers?"),
    "unrenderable": ({"question": "never", "answer": "1"}, "the chat template refuses the messages"),
}


@pytest.mark.parametrize("starts", [True, False])
def test_all_faults_of_all_sets_are_told_together_with_file_and_line(folder, starts):
    write(folder / "bad.jsonl", [{"question": "b", "answer": "2"}, *(row for row, _ in PLANTED.values())])
    evaluation = "--eval-interval 1 --eval-prompt-data held bad.jsonl other rows.jsonl"
    errors = faults(folder, evaluation, data="bad.jsonl", starts=starts)
    assert len(errors) == 2 * len(PLANTED)
    for place, (_, fault) in enumerate(PLANTED.values()):
        for flag, message in (("--prompt-data", errors[place]), ("--eval-prompt-data", errors[place + len(PLANTED)])):
            assert message.startswith(f"{flag} bad.jsonl:{place + 2}: {fault}"), message


def test_each_set_of_a_mixture_is_checked_with_its_own_flags(folder):
    write(folder / "bad.jsonl", [{"question": "2", "answer": "x"}])
    (message,) = faults(folder, "--rm-type last_number --eval-interval 1 --eval-prompt-data held bad.jsonl")
    assert message.startswith("--eval-prompt-data bad.jsonl:1: ")
    assert check(folder, "--eval-interval 1 --eval-prompt-data held bad.jsonl --eval-label-key question", starts=False)


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("{}:of_trl", r"{}.py:5: its signature is of_trl(prompts, completions, **kwargs), and it is called with one "),
        ("nowhere:reward", "cannot import module nowhere"),
        ("{}:divides", "{}.py:10: called with the answer '1' to rows.jsonl:1, it raised ZeroDivisionError"),
        ("{}:sentence", "called with the answer '1' to rows.jsonl:1, it returned str 'right'; return a list"),
        (
            "{}:nothing",
            "it returned NoneType None, which is not a finite number (a float, say); it gets a list of samples",
        ),
    ],
)
def test_a_reward_function_that_cannot_work_is_told_with_its_line(folder, path, fault):
    (functions,) = folder.glob("functions_*.py")
    name = functions.stem
    (message,) = faults(folder, f"--custom-rm-path {path.format(name)}", "--rm-type")
    assert message.startswith(f"--custom-rm-path {path.format(name)}: ")
    assert fault.format(functions.with_suffix("")) in message or fault in message, message
    write(folder / "bad.jsonl", ["{"])
    both = faults(folder, f"--custom-rm-path {path.format(name)}", "--rm-type", data="bad.jsonl")
    assert both[0].startswith("--prompt-data bad.jsonl:1: not JSON") and len(both) <= 2


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (lambda whole: whole[:-4], "model.safetensors broke off: it has "),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\n", "model.safetensors is no file of safetensors"),
    ],
)
def test_weights_that_are_not_whole_are_told(folder, content, fault):
    whole = save({"weight": np.ones((4, 4), np.float32)})
    (folder / "model" / "model.safetensors").write_bytes(whole)
    check(folder)
    (folder / "model" / "model.safetensors").write_bytes(content(whole))
    (message,) = faults(folder)
    assert message.startswith(f"--hf-checkpoint {folder}/model: {fault}") and message.endswith("; fetch it again")
    assert check(folder, starts=False).warnings == [f"a start on this host would be refused: {message}"]


def test_weights_or_a_tokenizer_that_are_absent_are_told_together(folder):
    for file in (folder / "model").iterdir():
        if file.name != "config.json":
            file.unlink()
    write(folder / "bad.jsonl", ["{"])
    tokenizer, row, weights = faults(folder, data="bad.jsonl")
    assert "the folder has no tokenizer; copy tokenizer.json" in tokenizer
    assert row.startswith("--prompt-data bad.jsonl:1: not JSON")
    assert weights.endswith("it lacks model.safetensors, its weights; fetch the model again")
    shards = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "it lacks model-1-of-2.safetensors (and 1 more), its weights" in faults(folder)[-1]


def test_a_tokenizer_without_a_chat_template_is_one_error_about_the_flag(folder):
    (folder / "model" / "chat_template.jinja").unlink()
    (message,) = faults(folder, "--eval-interval 1 --eval-prompt-data held rows.jsonl")
    assert message.startswith("--apply-chat-template: the tokenizer has no chat template; drop the flag")


def test_a_disk_without_room_for_a_checkpoint_is_told(folder, monkeypatch):
    header = json.dumps({"a": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(1024)
    (folder / "model" / "model.safetensors").write_bytes(weights)
    free = {"bytes": len(weights)}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free["bytes"]))
    assert not check(folder, "--save checkpoints").faults
    free["bytes"] -= 1
    (message,) = faults(folder, "--save checkpoints")
    assert message.startswith("--save checkpoints: its disk has 0.000 GiB free, and the weights alone take 0.000 GiB;")


def test_the_function_within_a_sum_is_called_too(folder):
    (functions,) = folder.glob("functions_*.py")
    flags = f"--custom-rm-path {functions.stem}:nothing --rm-type last_number:1,custom:0.5"
    (message,) = faults(folder, flags, "--rm-type")
    assert "it returned NoneType None" in message


def test_a_reward_that_fails_on_a_stand_in_is_a_warning_where_the_run_would_go_on(folder):
    (functions,) = folder.glob("functions_*.py")
    flags = f"--custom-rm-path {functions.stem}:divides"
    for report in (
        check(folder, f"{flags} --reward-error drop", "--rm-type"),
        check(folder, flags, "--rm-type", starts=False),
    ):
        (warning,) = report.warnings
        assert "it raised ZeroDivisionError" in warning
    assert not check(folder, "", "--rm-type").warnings


def test_other_functions_are_imported_and_their_signatures_read(folder):
    (functions,) = folder.glob("functions_*.py")
    flags = f"--dynamic-sampling-filter-path {functions.stem}:keep --curriculum-path nowhere:choose"
    messages = faults(folder, flags)
    assert messages[0].startswith(
        f"--dynamic-sampling-filter-path {functions.stem}:keep: {functions}:15: its signature "
    )
    assert messages[1].startswith("--curriculum-path nowhere:choose: cannot import module nowhere")


def test_many_long_prompts_are_a_warning_and_all_of_them_an_error(folder):
    rows = [{"question": "a" * (60 if n % 12 else 5), "answer": "1"} for n in range(1000)]
    write(folder / "long.jsonl", rows)
    report = check(folder, "--rollout-max-prompt-len 50", data="long.jsonl")
    assert report.warnings == [
        "prompts long.jsonl: 92% of 1,000 rows are longer than a limit (--rollout-max-prompt-len 50), and are left out"
    ]
    (message,) = faults(folder, "--rollout-max-prompt-len 3", data="long.jsonl")
    assert message.startswith("--rollout-max-prompt-len 3: drops all 1000 prompts of long.jsonl; the shortest has 5 ")


def test_a_prompt_without_room_in_the_model_is_told(folder):
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    write(folder / "long.jsonl", [{"question": "a" * 200, "answer": "1"}, {"question": "a", "answer": "1"}])
    (message,) = faults(folder, data="long.jsonl")
    assert message.startswith("--prompt-data long.jsonl: it has a prompt of 2") and "model's max_pos" in message
    assert message.endswith("; leave such prompts out with --rollout-max-prompt-len 36"), message
    assert not check(folder, "--rollout-max-prompt-len 36", data="long.jsonl").faults


def test_held_out_prompts_that_are_trained_on_are_a_warning(folder):
    trained = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    write(folder / "held.jsonl", [trained[0] | {"answer": "7"}, {"question": "never seen", "answer": "1"}])
    write(folder / "apart.jsonl", [{"question": "never seen", "answer": "1"}])
    report = check(folder, "--eval-interval 1 --eval-prompt-data held held.jsonl apart apart.jsonl")
    (warning,) = report.warnings
    assert warning.startswith("held-out held held.jsonl: 1 of its 2 prompts are training prompts too, ")


def test_a_plan_lists_what_is_not_here_and_checks_the_rest(folder):
    settings = judge(read_command(words(folder, data="absent.jsonl"))).settings
    report = check_inputs(settings, starts=False)
    assert report.unchecked == [
        "--prompt-data absent.jsonl: no such file; check the path, which is relative to the folder the run starts in"
    ]
    assert explain_inputs(settings, report)[-1].startswith(
        "not checked, because it is not on this machine: --prompt-data "
    )
    with pytest.raises(FlagError, match="--prompt-data absent.jsonl: no such file"):
        check_inputs(settings, starts=True)
    absent = "--hf-checkpoint some/model"
    assert check(folder, absent, starts=False).unchecked == [
        "the tokenizer of some/model, so chat template and lengths of prompts"
    ]
    write(folder / "bad.jsonl", [{"question": "a", "answer": None}])
    assert faults(folder, absent, data="bad.jsonl", starts=False)[0].startswith("--prompt-data bad.jsonl:1: column")


def test_what_was_checked_is_explained(folder):
    settings = judge(read_command(words(folder, "--eval-interval 1 --eval-prompt-data held rows.jsonl"))).settings
    lines = explain_inputs(settings, check_inputs(settings, starts=False))
    assert lines == [
        "prompts rows.jsonl: 20 rows, of 3 to 4 tokens",
        "held-out held rows.jsonl: 20 rows, of 3 to 4 tokens",
        "WARNING: held-out held rows.jsonl: 20 of its 20 prompts are training prompts too, so what a run learns by "
        "heart counts as learned; hold other rows out",
        "epoch: 20 prompts, 3 iterations, 3 optimizer steps",
        "trained: 16 parameters",
    ]


def test_a_run_from_python_is_checked_too(folder):
    write(folder / "bad.jsonl", [{"question": "a", "answer": None}])
    settings = judge(read_command(words(folder, data="bad.jsonl"))).settings
    raised = []

    class Handling:
        def __init__(self, *arguments): ...
        def __enter__(self): ...
        def __exit__(self, kind, error, trace):
            raised.append(error)
            return True

    launch(Validated(settings), Handling)
    assert "bad.jsonl:1: column 'answer' is null" in str(raised[0])


START = """
import sys
from miles.commands import explain, train
try:
    {}.main(sys.argv[1:])
finally:
    print([name for name in ("ray", "torch", "transformers") if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize("command", ["train", "explain"])
def test_a_start_and_a_plan_refuse_before_torch_and_ray_are_imported(folder, command):
    rows = {"train": "bad.jsonl", "explain": "set"}[command]  # a folder is read by datasets, which looks for torch
    (folder / "set").mkdir()
    for file in ("bad.jsonl", "set/bad.jsonl"):
        write(folder / file, [{"question": "a", "answer": "1"}, {"question": "", "answer": "1"}])
    flags = words(folder, "--custom-rm-path nowhere:reward", "--rm-type", data=rows)
    ended = subprocess.run([sys.executable, "-c", START.format(command), *flags], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "--custom-rm-path nowhere:reward: cannot import module nowhere" in ended.stderr
    assert f"{rows}:2: " in ended.stderr
    assert ended.stderr.endswith("[]\n"), ended.stderr


def test_a_malformed_file_of_sets_is_told_in_a_fresh_process(folder):
    (folder / "sets.yaml").write_text("- {name: held, source: rows.jsonl, temprature: 1}\n")
    flags = words(folder, "--eval-interval 1 --eval-config sets.yaml")
    ended = subprocess.run([sys.executable, "-c", START.format("explain"), *flags], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "unknown key temprature; did you mean temperature?" in ended.stderr


def test_functions_whose_import_ends_the_process_are_an_error(folder):
    (folder / "ending.py").write_text(FUNCTIONS + "import os\nos._exit(3)\n")
    flags = words(folder, "--dynamic-sampling-filter-path ending:keep")
    ended = subprocess.run([sys.executable, "-c", START.format("explain"), *flags], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "the process that imports your functions was killed or crashed" in ended.stderr


@pytest.mark.slow
def test_a_start_reads_images_though_it_reads_text_without_torch(folder):
    """In a fresh interpreter: where torch is imported already, rows are not read in a process without it."""
    from examples.small_task import write_small_vision_model

    write_small_vision_model(folder / "model", seed=1, hidden=32)
    Image.new("RGB", (8, 8)).save(folder / "square.png")
    write(folder / "images.jsonl", [{"question": "<image>?", "images": ["square.png"], "answer": 1}])
    flags = [*words(folder, data="images.jsonl"), "--multimodal-keys", '{"image": "images"}', "--explain"]
    ended = subprocess.run([sys.executable, "-c", START.format("train"), *flags], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.endswith("[]\n"), ended.stderr
