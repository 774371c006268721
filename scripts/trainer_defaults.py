"""Write the defaults of another trainer into its table in miles/compat/translate/launchers, or compare them.

    pip download --no-deps --dest WHEELS verl==0.9.1
    python scripts/trainer_defaults.py verl WHEELS/verl-0.9.1-py3-none-any.whl [--check]

A name that the table lacks is added as a setting that changes learning: describe it in the table. Names with
``other = true`` belong to other releases, and the package does not have them. NeMo-RL and prime-rl are no packages of
an index: their tables were written from the sources that they name.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import fnmatch
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

TABLES = Path(__file__).parents[1] / "miles/compat/translate/launchers"
SETTINGS = "\n[settings]\n"  # the last part of a table, one line for each setting
INTERPOLATED = "${"


def of_verl(package: zipfile.ZipFile) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of the whole configuration, as verl writes it."""
    yield from _leaves(yaml.safe_load(_text(package, "verl/trainer/config/_generated_ppo_trainer.yaml")), "")


def of_trl(package: zipfile.ZipFile) -> Iterator[tuple[str, Any]]:
    """Yield the fields of ``GRPOConfig`` and of the bases that are in transformers, each with its last default."""
    import transformers

    sources = [
        Path(str(transformers.__file__)).with_name("training_args.py").read_text(encoding="utf-8"),
        _text(package, "trl/trainer/base_config.py"),
        _text(package, "trl/trainer/grpo_config.py"),
    ]
    found: dict[str, Any] = {}
    for source, name in zip(sources, ("TrainingArguments", "_BaseConfig", "GRPOConfig"), strict=True):
        found |= _fields(source, name)
    yield from found.items()


def of_openrlhf(package: zipfile.ZipFile) -> Iterator[tuple[str, Any]]:
    """Yield the flags of ``train_ppo_ray``; a flag in an f-string exists for the actor and for the critic."""
    tree = ast.parse(_text(package, "openrlhf/cli/train_ppo_ray.py"))
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"):
            continue
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        default = keywords.get("default", ast.Constant(None))
        for prefix in ("actor", "critic") if isinstance(call.args[0], ast.JoinedStr) else ("",):
            flag = eval(compile(ast.Expression(call.args[0]), "flag", "eval"), {"prefix": prefix})  # noqa: S307
            yield flag, _constant(default, prefix)


READERS = {"verl": of_verl, "trl": of_trl, "openrlhf": of_openrlhf, "openrlhf_underscores": of_openrlhf}


def _text(package: zipfile.ZipFile, path: str) -> str:
    name = next(name for name in package.namelist() if name == path or name.endswith(f"/{path}"))
    return package.read(name).decode("utf-8")


def _leaves(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", None if INTERPOLATED in str(value) or value == "???" else value


def _fields(source: str, name: str) -> dict[str, Any]:
    """Return the fields of a dataclass in ``source`` with their defaults; ``None`` for one that a function makes."""
    tree = ast.parse(source)
    body = next(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    found = {}
    for statement in body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = statement.value
            if isinstance(value, ast.Call):
                value = next((each.value for each in value.keywords if each.arg == "default"), None)
            found[statement.target.id] = None if value is None else _constant(value, "")
    return found


def _constant(node: ast.expr, prefix: str) -> Any:
    if isinstance(node, ast.IfExp):  # 1e-6 if prefix == "actor" else 9e-6
        test = ast.unparse(node.test)
        return _constant(node.body if repr(prefix) in test else node.orelse, prefix)
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return list(value) if isinstance(value, tuple) else value


def with_defaults(text: str, defaults: Mapping[str, Any]) -> str:
    """Return the table with the defaults of the package: names that it lacks are gone, and new ones added."""
    table = tomllib.loads(text)
    old, settings = table["settings"], {}
    for name, default in defaults.items():
        if name in old or not any(fnmatch.fnmatchcase(name, pattern) for pattern in table["quiet"]):
            row = {key: value for key, value in old.get(name, {"learning": True}).items() if key != "default"}
            settings[name] = row if default is None else {"default": default, **row}
    settings |= {name: row for name, row in old.items() if row.get("other")}
    written_by_hand = text[: text.index(SETTINGS)]
    return written_by_hand + SETTINGS + "".join(f"{_toml(name)} = {_toml(row)}\n" for name, row in settings.items())


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return (
        "{"
        + ", ".join(f"{key if key.isidentifier() else _toml(key)} = {_toml(part)}" for key, part in value.items())
        + "}"
    )


def main(argv: list[str]) -> int:
    """Rewrite a table, or compare it, and return 1 if it differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=tuple(READERS))
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    path = TABLES / f"{arguments.trainer}.toml"
    before = path.read_text(encoding="utf-8")
    with zipfile.ZipFile(arguments.wheel) as package:
        after = with_defaults(before, dict(READERS[arguments.trainer](package)))
    if arguments.check:
        sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), after.splitlines(True), n=0))
        return int(before != after)
    path.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
