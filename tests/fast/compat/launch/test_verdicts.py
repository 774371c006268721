"""Every verdict of the page of launch scripts on a flag of the ecosystem is the one that the command line gives.

``ecosystem_flags.txt`` has a flag per line with a value that scripts give it, and after ``|`` the flags that it needs
to have an effect. ``{NAME}`` is the folder of a model of launch_lines.yaml, or one of the files that are written here.
"""

import json
import re
import shlex
from pathlib import Path

import pytest

from miles.base.flags import FlagError
from miles.compat.border import read_command
from miles.config.megatron.fields import MODEL_FLAGS, megatron_fields
from miles.config.megatron.rules import OF_OTHER_MODELS, SHAPE_FIELDS
from miles.config.notes import READ_AS
from miles.config.parser import judge
from miles.models.registry import CONVERTED, megatron_shape, vocabulary_shape
from scripts.pages.launch_scripts import launch_page
from tests.fast.compat.launch.launch_corpus import write_files
from tests.fast.config.conftest import MINIMAL

LINES = Path(__file__).with_name("ecosystem_flags.txt").read_text(encoding="utf-8").splitlines()
PAGE = launch_page()
VERDICTS = dict(re.findall(r"^\| `(--[\w-]+)` \| (obeyed|noted|refused|\w+ or \w+) \|", PAGE, flags=re.M))
FIELDS = {field.flag: field for field in (*megatron_fields().values(), *MODEL_FLAGS)}
OF_MODEL = [
    line.split()[0]
    for line in LINES
    if line.split()[0] in FIELDS and FIELDS[line.split()[0]].name in SHAPE_FIELDS - OF_OTHER_MODELS
]
UNREAD_IF_LATENT = re.findall(r"^\| `(--[\w-]+)` \| .*Noted for a model with latent attention \|$", PAGE, flags=re.M)
NEMOTRON = "--apply-layernorm-1p"  # of a family that Megatron-Bridge reads, whose shape no config here has


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_files(folder)
    (folder / "CONFIG").write_text("value_of_mine: 3\n")
    (folder / "EVAL").write_text("eval: {datasets: [{name: a, path: 'reasoning_gym:sums'}]}\n")
    (folder / "DATA.jsonl").write_text('{"input": "1 + 1 =", "prompt": "1 + 1 =", "label": "2", "messages": []}\n')
    return folder


def verdict(words: list[str], needs: list[str], folder: Path) -> str:
    """Return what becomes of the flag in ``words``: obeyed, noted or refused."""
    flag = words[0]
    base = MINIMAL | {"--hf-checkpoint": "{qwen3-4b}", "--device": "cuda", "--actor-num-gpus-per-node": "8"}
    left_out, needs = (needs[1], needs[2:]) if needs[:1] == ["without"] else ("", needs)
    defaults = [word for name, value in base.items() if name not in (flag, left_out, *needs) for word in (name, value)]
    command = [*defaults, *needs, *words]
    for path in folder.iterdir():
        command = [word.replace(f"{{{path.name}}}", str(path)) for word in command]
    try:
        validated = judge(read_command(command))
    except FlagError as error:
        about = [message for message in error.messages if re.match(rf"{flag}(?![\w-])", message)]
        assert about, f"{words} is not what stops it: {error.messages}"
        return "refused"
    notes = [note for note in validated.accepted if note.written.split()[0] == flag]
    return "noted" if any(note.heading != READ_AS for note in notes) else "obeyed"


@pytest.mark.parametrize("line", [line for line in LINES if line.split()[0] not in OF_MODEL])
def test_the_verdict_is_the_one_that_is_given(line, folder):
    words, _, needs = line.partition(" | ")
    words = words.split()
    listed = VERDICTS.get(words[0], "obeyed")  # miles' flags, and SGLang's flags of the same name
    assert verdict(words, shlex.split(needs), folder) in listed.split(" or ")


def neutral_values(flag: str) -> list[str]:
    """Return the values that the table lists as noted for a flag; none if it states something else."""
    row = re.search(rf"^\| `{flag}` \| noted or refused \| .*Noted with ((?:`[^`]+`(?: or )?)+) \|$", PAGE, re.M)
    return re.findall("`([^`]+)`", row[1]) if row else []


@pytest.mark.parametrize("flag", sorted(flag for flag in VERDICTS if neutral_values(flag)))
def test_the_value_that_asks_for_nothing_is_noted_and_another_one_refused(flag, folder):
    values, needs = neutral_values(flag), ["--train-backend", "megatron"]
    assert {verdict([flag, value], needs, folder) for value in values} == {"noted"}
    assert verdict([flag, another(flag, values)], needs, folder) == "refused"


def another(flag: str, values: list[str]) -> str:
    """Return a value of the flag's type that is none of ``values``."""
    field = FIELDS.get(flag)
    if field is None or field.kind == "str":
        choices = field.choices if field is not None else ()
        return next((choice for choice in choices if choice not in values), "another")
    return "77" if field.kind == "int" else "0.77"


def words_of(flag: str, value: object) -> list[str]:
    return [flag] if isinstance(value, bool) else [flag, *map(str, value if isinstance(value, list) else [value])]


@pytest.mark.parametrize("flag", [flag for flag in OF_MODEL if flag != NEMOTRON])
def test_what_the_model_determines_is_checked(flag, folder):
    """In a model of every family here that has it; a switch can only say that the model has it."""
    field, outcomes = FIELDS[flag], set()
    configs = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*/config.json"))}
    families = {values["model_type"]: path for path, values in configs.items() if "quantization_config" not in values}
    for config in families.values():
        values = configs[config]
        if values["model_type"] not in CONVERTED:
            continue
        shape = {**megatron_shape(values), **vocabulary_shape(values)}
        if field.name not in shape:
            continue
        needs = ["--train-backend", "megatron", "--hf-checkpoint", str(config.parent)]
        has_it = field.kind != "bool" or shape[field.name] == field.switch_to
        outcome = verdict(words_of(flag, shape[field.name]), needs, folder)
        if flag in UNREAD_IF_LATENT and shape.get("multi_latent_attention"):
            assert outcome == "noted"
            continue
        assert outcome == ("obeyed" if has_it else "refused")
        outcomes.add(outcome)
        if field.kind in ("int", "float"):
            assert verdict([flag, "77"], needs, folder) == "refused"
    assert "obeyed" in outcomes


def test_each_line_is_a_flag_once():
    flags = [line.split()[0] for line in LINES]
    assert len(flags) == len(set(flags)) == 303
