"""Flags that a run passes on to servers, which define them: known by their prefix, and kept as words.

A program that takes such flags is a field of ``ServerFlags``.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

SERVER, ROUTER, VLLM = "--sglang-", "--router-", "--vllm-"
ROUTER_ALIAS = "--sglang-router-"
SERVER_KEY, ADMIN_KEY = "--api-key", "--admin-api-key"  # SGLang's flags; the router calls its own key --api-key too


def _words_of(prefix: str) -> Any:
    return field(default=(), metadata={"prefix": prefix})


@dataclass(frozen=True)
class ServerFlags:
    """Hold the words for the command lines of SGLang, its router and vLLM, with the prefixes removed."""

    server: tuple[str, ...] = _words_of(SERVER)
    router: tuple[str, ...] = _words_of(ROUTER)
    vllm: tuple[str, ...] = _words_of(VLLM)

    def by_prefix(self) -> dict[str, tuple[str, ...]]:
        """Return the words of each program, by the prefix that its flags have here."""
        return {prefix: getattr(self, name) for name, prefix in PREFIXES.items()}

    def written(self, prefixes: Collection[str]) -> list[str]:
        """Return the flags that have one of ``prefixes`` as the user has written them, without values."""
        words = {prefix: words for prefix, words in self.by_prefix().items() if prefix in prefixes}
        return [spelled(prefix, flag) for prefix in words for flag, _ in pairs(words[prefix])]


PREFIXES: dict[str, str] = {each.name: each.metadata["prefix"] for each in fields(ServerFlags)}


def spelled(prefix: str, flag: str) -> str:
    """Spell a flag of servers as it is given here: ``--tp`` of SGLang is ``--sglang-tp``."""
    return prefix + flag.removeprefix("--")


def is_passed_on(word: str) -> bool:
    """Return whether a word of the command line is a flag that is passed on."""
    return word.startswith(tuple(PREFIXES.values()))


def split_server_flags(words: Sequence[str], our_flags: Collection[str]) -> tuple[list[str], ServerFlags]:
    """Divide the command line into the words of our own parser and the words of servers.

    A flag takes the words up to the next one that starts with ``--``. A flag that is written as one word with its value
    (``'--sglang-dtype float32'``) is cut in two, because launch scripts contain such words.

    Args:
        words: The command line.
        our_flags: The flags of the launcher; some start like SGLang's.

    Returns:
        Our words, and the servers' words.
    """
    our_words: list[str] = []
    passed_on: dict[str, list[str]] = {name: [] for name in PREFIXES}
    takers = [(ROUTER_ALIAS, passed_on["router"]), *((PREFIXES[name], taken) for name, taken in passed_on.items())]
    taker = our_words
    for word in words:
        if not word.startswith("--"):
            taker.append(word)
            continue
        prefix, taker = "", our_words
        if word.split("=")[0] not in our_flags:
            prefix, taker = next((pair for pair in takers if word.startswith(pair[0])), ("", our_words))
        taker += f"--{word.removeprefix(prefix)}".split(" ", 1) if prefix else [word]
    return our_words, ServerFlags(**{name: tuple(taken) for name, taken in passed_on.items()})


def value_of(words: Sequence[str], *names: str) -> str | None:
    """Return the value of the last of the named flags in ``words``, or None."""
    values = [value for flag, value in pairs(words) if flag in names]
    return values[-1] if values else None


def has_flag(words: Sequence[str], *names: str) -> bool:
    """Return whether one of the named flags is among ``words``."""
    return any(flag in names for flag, _ in pairs(words))


def pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each flag among ``words`` with the word that is its value, empty if it has none."""
    for index, word in enumerate(words):
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            if not equals and index + 1 < len(words) and not words[index + 1].startswith("--"):
                value = words[index + 1]
            yield flag, value
