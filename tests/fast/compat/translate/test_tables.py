"""The tables of other trainers: every setting that changes learning has an effect on the translation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from miles.compat.translate.launchers.base import all_launchers
from miles.compat.translate.translation import Document, KnownSetting, Setting, Translation, table_of
from miles.config.parser import build_parser
from scripts.trainer_defaults import TABLES, with_defaults

TRAINERS = ("verl", "trl", "openrlhf", "nemo-rl", "prime-rl")
PACKAGES = {"verl": "verl==0.9.1", "trl": "trl==1.16.0", "openrlhf": "openrlhf==0.11.2"}
PACKAGES["openrlhf_underscores"] = "openrlhf==0.9.10"
ROWS = [(name, key) for name in TRAINERS for key, row in table_of(name).rows.items() if row.learning]


def translated(name: str, settings: dict[str, object]) -> Translation:
    launcher = all_launchers()[name]
    by_key = {key: Setting(key, value, 1) for key, value in settings.items()}
    translation = Translation(Document("file", launcher.reads[0], by_key), launcher.table())
    launcher.translate(translation)
    return translation


def other_value(row: KnownSetting) -> object:
    if isinstance(row.default, bool):
        return not row.default
    if isinstance(row.default, int | float) or row.kind in ("number", "count"):
        return 7
    return [0.5, 0.6] if row.kind == "pair" else "other"


def answer(name: str, settings: dict[str, object]) -> tuple[list[str], list[str], list[str]] | str:
    """Return the command, the notes and the keys that are not read; or the refusal."""
    try:
        result = translated(name, settings)
    except ValueError as error:
        return str(error)
    notes = [f"{entry.label}: {entry.why}" for entry in result.differences]
    return result.words, notes, [setting.key for setting in result.unread]


# The settings that give another one an effect: without them it has none there either.
BESIDE = json.loads(Path(__file__).with_name("alongside.json").read_text())


@pytest.mark.parametrize(("name", "key"), ROWS)
def test_a_setting_that_changes_learning_changes_the_command_or_a_note(name: str, key: str) -> None:
    beside = next((BESIDE[name][start] for start in sorted(BESIDE[name], reverse=True) if key.startswith(start)), {})
    beside = {other: value for other, value in beside.items() if other != key}
    assert answer(name, {**beside, key: other_value(table_of(name).rows[key])}) != answer(name, beside)


@pytest.mark.parametrize("name", [*TRAINERS, "openrlhf_underscores"])
def test_a_flag_of_a_table_exists_here(name: str) -> None:
    known = {option for action in build_parser()._actions for option in action.option_strings}
    flags = {flag for row in table_of(name).rows.values() for flag in row.flag.split()}
    assert flags - known - {"--moe-aux-loss-coeff"} == set()  # Megatron's, which is there alongside its backend


@pytest.mark.parametrize("name", TRAINERS)
def test_a_default_that_changes_learning_is_written_or_asks_for_nothing(name: str) -> None:
    """Off, empty, or idle without another setting; everything else is in the command or in a note."""
    result = translated(name, {})
    text = " ".join(entry.label for entry in result.entries)
    silent = []
    for key, row in table_of(name).rows.items():
        is_idle = row.default in (None, False, 0, -1, "", [], {})
        is_idle |= row.default in row.neutral or row.kind in ("file", "prompts") or not row.learning
        is_idle |= any(key.startswith(start) for start in BESIDE[name]) or bool(row.needs)
        is_idle |= not row.flag and key not in result._taken | result._read  # shown as soon as a file changes it
        if not is_idle and key not in text and key not in result._read:
            silent.append(key)
    assert silent == []


@pytest.mark.parametrize("name", PACKAGES)
def test_new_defaults_replace_only_the_settings(name: str) -> None:
    text = (TABLES / f"{name}.toml").read_text()
    defaults = {key: row.default for key, row in table_of(name).rows.items()}
    assert with_defaults(text, defaults) == text
    changed = with_defaults(text, {**defaults, "new": 7})
    assert set(changed.splitlines()) - set(text.splitlines()) == {'"new" = {default = 7, learning = true}'}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_the_defaults_are_those_of_the_package(name: str, tmp_path: Path) -> None:
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), PACKAGES[name]]
    if subprocess.run(download, capture_output=True).returncode:
        pytest.skip(f"{PACKAGES[name]} cannot be downloaded here")
    script = Path(__file__).parents[4] / "scripts/trainer_defaults.py"
    wheel = next(tmp_path.iterdir())
    subprocess.run([sys.executable, str(script), name, str(wheel), "--check"], check=True)
