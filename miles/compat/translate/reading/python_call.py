"""Read the keyword arguments of a configuration's call, and of its trainer's, in Python source, which is never run."""

from __future__ import annotations

import ast
from typing import Any

from miles.compat.translate.settings import Document, Expression, Setting, by_key, fail

CALLS = ("GRPOConfig",)
TRAINERS = ("GRPOTrainer",)
OF_THE_TRAINER = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")  # in its order


def read_python(path: str, text: str) -> Document:
    """Read the arguments of the one call of ``GRPOConfig`` in the source, and the model and data of ``GRPOTrainer``.

    Constants that are assigned once, at the top level of the file, are followed. Other expressions are not evaluated.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        fail(path, error.lineno, f"not Python ({error.msg}); correct it")
    except (ValueError, RecursionError, MemoryError) as error:
        fail(path, None, f"not Python ({error or 'nested too deep'}); correct it")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) in CALLS]
    if len(calls) != 1:
        lines = ", ".join(str(call.lineno) for call in calls)
        where = f"{len(calls)} calls of {CALLS[0]} (lines {lines})" if calls else f"no call of {CALLS[0]}(…)"
        fail(path, calls[1].lineno if calls else 1, f"{where}; give a file with one")
    constants = _constants(tree)
    call = calls[0]
    settings = [Setting(f"argument {n}", Expression(ast.unparse(a)), a.lineno) for n, a in enumerate(call.args, 1)]
    for keyword in call.keywords:
        name = keyword.arg or f"**{ast.unparse(keyword.value)}"
        settings.append(Setting(name, _value(keyword.value, constants), keyword.value.lineno))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in TRAINERS:
            given = [*zip(OF_THE_TRAINER, node.args, strict=False), *((each.arg, each.value) for each in node.keywords)]
            for argument, value in given:
                if argument in OF_THE_TRAINER and argument != "args":  # those are the configuration
                    settings.append(Setting(argument, _value(value, constants), value.lineno))
    return Document(path, "python", by_key(settings))


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    assigned = dict[str, list[ast.expr]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assigned.setdefault(node.id, [])
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    assigned[target.id].append(statement.value)
    stored = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    stored += [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]  # of a function, which may hide it
    return {name: values[0] for name, values in assigned.items() if len(values) == 1 and stored.count(name) == 1}


def _value(node: ast.expr, constants: dict[str, ast.expr]) -> Any:
    if isinstance(node, ast.Name) and node.id in constants:
        node = constants[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Expression(ast.unparse(node))
