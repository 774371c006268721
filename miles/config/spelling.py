"""Bring the words of a command into the spelling that the parser reads, and find flags that are written twice."""

import argparse
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from miles.base.flags import LONGEST_VALUE
from miles.base.secrets import public_words
from miles.base.text import one_line
from miles.config.command_parser import SWITCH
from miles.config.notes import READ_AS, Note, written
from miles.config.servers.passed_on import ROUTER, ROUTER_ALIAS
from miles.config.suggest import whole_numbers

Group: TypeAlias = tuple[str, tuple[str, ...]]  # a flag, and the words after it


def cut_spaced_words(words: Sequence[str], known: Collection[str]) -> list[str]:
    """Cut words that hold a flag and its value (``'--lr 1e-6'``) in two, as launch scripts contain such words."""
    cut = list[str]()
    for word in words:
        flag, space, value = word.partition(" ")
        cut += [flag, value.strip()] if space and flag in known else [word]
    return cut


def group_words(words: Iterable[str]) -> list[Group]:
    """Collect each flag with its words; words before the first flag belong to the flag ``""``."""
    groups = list[tuple[str, list[str]]]()
    for word in words:
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word.partition("=")
            groups.append((flag, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            groups.append(("", [word]))
    return [(flag, tuple(values)) for flag, values in groups]


def without_flags(words: Iterable[str], flags: Collection[str]) -> list[str]:
    """Return the words without the words of ``flags``: each flag, and its values."""
    rest = list[str]()
    is_copied = True
    for word in words:
        if word.startswith("--") and len(word) > 2:
            is_copied = word.partition("=")[0] not in flags
        if is_copied:
            rest.append(word)
    return rest


def with_written_flags(messages: Iterable[str], words: Iterable[str]) -> list[str]:
    """Return messages that name a flag of the router as ``words`` do: ``--sglang-router-NAME``."""
    written = [flag for flag in flags_in(words) if flag.startswith(ROUTER_ALIAS)]
    result = list(messages)
    for flag in written:
        name = ROUTER + flag.removeprefix(ROUTER_ALIAS)
        result = [re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", flag, message) for message in result]
    return result


def flags_in(words: Iterable[str]) -> list[str]:
    """Return the flags among ``words``, without values, in order."""
    return [flag for flag, _ in group_words(words) if flag]


def cut_lists(words: Sequence[str], actions: Mapping[str, argparse.Action]) -> list[str]:
    """Write lists of whole numbers (``[1,2]``, ``1,2``) as separate words, for flags that take several numbers."""
    cut = list[str]()
    taker: argparse.Action | None = None
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            taker = actions.get(flag)
            if not (equals and _takes_numbers(taker)):
                cut.append(word)
                continue
            cut.append(flag)
            word = value
        cut += _numbers(word) if _takes_numbers(taker) else [word]
    return cut


def _takes_numbers(action: argparse.Action | None) -> bool:
    return action is not None and action.nargs == "+" and action.type is int


def _numbers(word: str) -> list[str]:
    if not any(mark in word for mark in ",[("):
        return [word]
    try:
        return [str(number) for number in whole_numbers(word)]
    except ValueError:
        return [word]  # the parser reports it


def stray_words(words: Sequence[str], actions: Mapping[str, argparse.Action]) -> list[str]:
    """Return errors about the words beyond the values that each flag takes. A flag that does not exist takes all."""
    stray, messages = list[tuple[str, str]](), list[str]()
    for flag, values in group_words(words):
        if flag and flag not in actions:
            continue
        most = most_values(actions.get(flag))
        extra = [word for word in values[most:] if not word.startswith("-")]
        if flag == _ONE_SOURCE and extra:
            has_names = len(values) % 2 == 0 and all(name.isidentifier() for name in values[::2])
            pairs = values if has_names else [word for source in values for word in ("NAME", source)]
            messages.append(
                f"{written(flag, values)}: takes one source; for several give --prompt-mix {' '.join(pairs)}"
            )
        elif flag and most == 0 and len(extra) == 1 and not _SETTING.match(extra[0]):
            messages.append(f"{written(flag, extra)}: {SWITCH}")
        else:
            stray += [(word, flag) for word in extra]
    settings = [(word, flag) for word, flag in stray if _SETTING.match(word)]
    others = [pair for pair in stray if pair not in settings]
    if settings:
        alone = len(settings) == 1
        rule = "belongs to no flag, and looks like a setting" if alone else "belong to no flag, and look like settings"
        what_to_do = "write the command to a file, and miles translate FILE prints the flags to give instead"
        messages.append(f"{_quoted(settings)} {rule} of another trainer; {what_to_do}")
    if others:
        belong = "belongs" if len(others) == 1 else "belong"
        messages.append(f"{_quoted(others)} {belong} to no flag; every setting is written --flag value")
    return messages


_ONE_SOURCE = "--prompt-data"
_SETTING = re.compile(r"[+~]{0,2}[A-Za-z_][\w/]*(\.\w+)+=")  # of Hydra: data.train_batch_size=8


def most_values(action: argparse.Action | None) -> int:
    """Return how many values a flag takes at most."""
    if action is None:
        return 0
    match action.nargs:
        case None | "?":
            return 1
        case int(number):
            return number
        case _:
            return sys.maxsize


def _quoted(stray: Sequence[tuple[str, str]]) -> str:
    quotes = [
        repr(one_line(word, LONGEST_VALUE)) + (f" after {flag}" if flag else "")
        for word, (_, flag) in zip(public_words([word for word, _ in stray]), stray, strict=True)
    ]
    return f"the word{'s' if len(stray) > 1 else ''} {', '.join(quotes)}"


def repeated_flags(words: Sequence[str]) -> list[Note]:
    """Return a note for each flag that is given several times with different values; the last one counts."""
    by_flag = dict[str, list[tuple[str, ...]]]()
    for flag, values in group_words(words):
        if flag:
            by_flag.setdefault(flag, []).append(values)
    return [
        Note(READ_AS, written(flag, earlier), f"{written(flag, several[-1])}: given twice, and the last value counts")
        for flag, several in by_flag.items()
        if len(set(several)) > 1
        for earlier in dict.fromkeys(several[:-1])
    ]
