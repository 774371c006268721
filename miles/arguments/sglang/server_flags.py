"""``--sglang-*`` and ``--router-*``: flags that belong to SGLang's server and router, and are theirs to define.

They are told from flags of our own by their prefix, checked by name against the installed SGLang (read from its source,
since importing it takes seconds), and passed on. Whether a value is valid, the server says when it starts.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from miles.arguments.sglang.settings import ServerFlags

SERVER, ROUTER = "--sglang-", "--router-"
_ROUTER_ALIAS = "--sglang-router-"

# Set by the launcher; what the user would write elsewhere.
OWNED_BY_LAUNCHER = {
    "--model-path": "--hf-checkpoint",
    "--model": "--hf-checkpoint",
    "--host": "nothing: engines listen where they run",
    "--port": "nothing: a free port is taken",
    "--worker-urls": "nothing: the engines of the run are registered",
    "--skip-tokenizer-init": "nothing: engines see token ids only",
    "--weight-version": "nothing: the launcher counts the versions",
}
TENSOR_PARALLEL = ("--tp-size", "--tp", "--tensor-parallel-size")
# An engine here is one tensor-parallel group on one host: the others are of devices that nobody would count, and that
# new weights would not reach.
OTHER_PARALLEL = {
    "--pp-size": "--rollout-num-gpus-per-engine",
    "--pp": "--rollout-num-gpus-per-engine",
    "--pipeline-parallel-size": "--rollout-num-gpus-per-engine",
    "--nnodes": "--rollout-num-gpus-per-engine",
    "--dp-size": "--rollout-num-gpus",
    "--dp": "--rollout-num-gpus",
    "--data-parallel-size": "--rollout-num-gpus",
}
ATTENTION_DATA_PARALLEL = "--enable-dp-attention"  # SGLang's older way to say --attn-dp-size, within tensor parallel


def split_server_flags(words: Sequence[str], own: Collection[str]) -> tuple[list[str], ServerFlags]:
    """Part the command line into words for our own parser and those of SGLang.

    A flag takes the words up to the next one that starts with ``--`` along. ``own`` holds the flags of the launcher,
    some of which start like SGLang's. A flag that is written as one word with its value (``'--sglang-dtype float32'``)
    is cut in two, as launch scripts have it so.
    """
    ours: list[str] = []
    server: list[str] = []
    router: list[str] = []
    taker = ours
    for word in words:
        if word.startswith("--"):
            taker, flag = _taker(word, own, ours, server, router)
            taker += [flag] if taker is ours else flag.split(" ", 1)
        else:
            taker.append(word)
    return ours, ServerFlags(tuple(server), tuple(router))


def _taker(
    word: str, own: Collection[str], ours: list[str], server: list[str], router: list[str]
) -> tuple[list[str], str]:
    if word.split("=")[0] not in own:
        for prefix, taker in ((_ROUTER_ALIAS, router), (ROUTER, router), (SERVER, server)):
            if word.startswith(prefix):
                return taker, "--" + word.removeprefix(prefix)
    return ours, word


def check_server_flags(flags: ServerFlags, engine_size: int) -> None:
    """Raise ``ValueError`` for a flag that the launcher sets itself, or that the installed SGLang does not have."""
    for prefix, words, known in (
        (SERVER, flags.server, known_server_flags),
        (ROUTER, flags.router, known_router_flags),
    ):
        for flag, value in _pairs(words):
            _check_owner(prefix, flag, value, engine_size)
            _check_known(prefix, flag, known())
            if prefix == SERVER:
                _check_one_group(flag, value, has_flag(words, ATTENTION_DATA_PARALLEL))


def value_of(words: Sequence[str], *names: str) -> str | None:
    """The value of the last of the named flags in ``words``; None where none is given."""
    values = [value for flag, value in _pairs(words) if flag in names]
    return values[-1] if values else None


def has_flag(words: Sequence[str], *names: str) -> bool:
    """Whether one of the named flags is among ``words``."""
    return any(flag in names for flag, _ in _pairs(words))


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for index, word in enumerate(words):
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            following = words[index + 1] if index + 1 < len(words) else "--"
            yield flag, value if equals else ("" if following.startswith("--") else following)


def _check_owner(prefix: str, flag: str, value: str, engine_size: int) -> None:
    written = prefix + flag.removeprefix("--")
    if flag in OWNED_BY_LAUNCHER:
        raise ValueError(f"{written}: the launcher sets it; give {OWNED_BY_LAUNCHER[flag]}, and drop {written}")
    if prefix == SERVER and flag in TENSOR_PARALLEL and value != str(engine_size):
        raise ValueError(
            f"{written} {value}: contradicts --rollout-num-gpus-per-engine {engine_size}, which is the engine's "
            f"tensor-parallel size; give --rollout-num-gpus-per-engine {value}, and drop {written}"
        )


def _check_one_group(flag: str, value: str, attention_only: bool) -> None:
    """Tensor parallelism is the only one whose devices are counted."""
    counted = OTHER_PARALLEL.get(flag)
    if counted is not None and value != "1" and not (attention_only and counted == "--rollout-num-gpus"):
        means = "more engines" if counted == "--rollout-num-gpus" else "more devices an engine"
        written = SERVER + flag.removeprefix("--")
        raise ValueError(
            f"{written} {value}: an engine here is tensor parallel, on one host; for {means} give {counted}, "
            f"and drop {written}"
        )


def _check_known(prefix: str, flag: str, known: Collection[str]) -> None:
    if not known or flag in known:
        return
    nearest = difflib.get_close_matches(flag, known, n=1, cutoff=0.5)
    way_out = f"did you mean {prefix}{nearest[0].removeprefix('--')}?" if nearest else f"drop {prefix}{flag[2:]}"
    raise ValueError(f"{prefix}{flag.removeprefix('--')}: the installed SGLang has no such flag; {way_out}")


@cache
def known_server_flags() -> frozenset[str]:
    """The flags of SGLang's ``ServerArgs``; empty where SGLang is not installed here (it may be on the engines' hosts).

    Fields of ``srt/arg_groups/fields/*.py`` annotated ``A[type, Arg(...)]``, and literal ``add_argument`` calls.
    """
    root = _folder("sglang")
    if root is None:
        return frozenset()
    fields = (flag for path in sorted(root.glob("srt/arg_groups/fields/*.py")) for flag in _field_flags(path))
    return frozenset(fields) | frozenset(_literal_flags(root / "srt" / "server_args.py"))


@cache
def known_router_flags() -> frozenset[str]:
    """The flags of sglang-router's ``RouterArgs``; empty where the router is not installed."""
    root = _folder("sglang_router")
    return frozenset() if root is None else frozenset(_literal_flags(root / "router_args.py"))


def _folder(package: str) -> Path | None:
    spec = find_spec(package)  # finds, and does not import
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _field_flags(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        metadata = [call for call in ast.walk(node.annotation) if isinstance(call, ast.Call)]
        keywords = {keyword.arg: keyword.value for call in metadata for keyword in call.keywords}
        if "no_cli" not in keywords:
            own_name = keywords.get("cli_name")
            yield ast.literal_eval(own_name) if own_name is not None else "--" + node.target.id.replace("_", "-")
        if "aliases" in keywords:
            yield from ast.literal_eval(keywords["aliases"])


def _literal_flags(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for argument in node.args:
                text = _flag_text(argument)
                if text.startswith("--"):
                    yield text


def _flag_text(argument: ast.expr) -> str:
    """The flag of a literal, or of an f-string whose only hole is an empty prefix: ``f"--{prefix}policy"``."""
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value
    if isinstance(argument, ast.JoinedStr):
        return "".join(str(part.value) for part in argument.values if isinstance(part, ast.Constant))
    return ""
