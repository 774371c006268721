"""Every row of the tables of other trainers: what each setting alone becomes is compared with ``tables.txt``.

It notices a change, and does not prove that a value is right. After a change on purpose, write it again with
``python tests/fast/compat/translate/test_tables.py``, and read the difference.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from miles.base.text import InputError
from miles.compat.translate.launchers.base import Launcher, all_launchers
from miles.compat.translate.objective import STEPS
from miles.compat.translate.translation import Document, Setting, Translation

TABLES = Path(__file__).with_name("tables.txt")
TRAINERS = ("verl", "trl", "openrlhf", "prime-rl", "nemo-rl")
PROBES = (3, 0.25, "a/text", "other", True, False, 0, 1, -1, [0.2, 0.3])
Settings = dict[str, object]
BASES: dict[str, list[Settings]] = {"openrlhf": [{}, {"--zero_stage": 3}]}  # the second: the flags of earlier releases


class Asked(Translation):
    """Note every setting that is looked at."""

    def has(self, key: str) -> bool:
        self._taken.add(key)
        return super().has(key)


def outcome(launcher: Launcher, settings: Settings) -> tuple[list[str], set[str]]:
    """Return the report on some settings, one line each, and the settings that were looked at."""
    given = {key: Setting(key, value, 1) for key, value in settings.items()}
    translation = Asked(Document("file", launcher.reads[0], given))
    try:
        goal = launcher.translate(translation)
    except InputError as error:
        return [f"fails: {str(error).rpartition(': ')[2].partition(';')[0]}"], translation._taken
    kinds = {"=": translation.carried, "~": translation.differing, "none": translation.missing}
    lines = [f"{e.shown} {kind} {' '.join(e.words)}" for kind, entries in kinds.items() for e in entries]
    sums = " ".join(f"{goal.reduce(step):.6g}" for step in STEPS)
    lines.append(f"objective {goal.mode} {' '.join(goal.words)} L={goal.divisor} {goal.exact} {sums}")
    return lines, translation._taken


def strings(code: CodeType) -> Iterator[str]:
    """Yield the constants of a module's code: names of choices are among them."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from strings(constant)
        for part in constant if isinstance(constant, tuple | frozenset) else (constant,):
            if isinstance(part, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{1,40}", part):
                yield part


def rows(launcher: Launcher, start: Settings) -> Iterator[str]:
    """Yield what each setting becomes, beside the settings with which it is first looked at, and what pairs become."""
    file = Path(inspect.getfile(type(launcher)))
    code = [compile(path.read_text(), str(path), "exec") for path in file.parent.glob(f"{file.stem}*.py")]
    choices = sorted({part for module in code for part in strings(module)})
    base, found = outcome(launcher, start)
    yield from (f"{launcher.name}: {line}" for line in base)
    queue: list[tuple[str, Settings]] = [(key, start) for key in sorted(found)]
    chosen: list[tuple[str, object]] = []
    seen = {*found}
    for key, beside in queue:
        before, forms = outcome(launcher, beside)[0], set[str]()
        for value in (*PROBES, *choices):
            after, taken = outcome(launcher, beside | {key: value})
            lines = [f"+{line}" for line in after if line not in before]
            lines += [f"-{line}" for line in before if line not in after and not after[0].startswith("fails")]
            changed = "; ".join(lines).replace(f"{key} = {value}", "it")
            form = changed.replace(str(value), "#")
            if form not in forms:  # not as another value is
                with_others = "".join(f"{name} = {other!r}, " for name, other in beside.items())
                yield f"{launcher.name}: {with_others}{key} = {value!r}: {changed}"
                is_choice = value not in PROBES and beside == start and not after[0].startswith("fails")
                chosen += [(key, value)] if is_choice else []
            forms.add(form)
            queue += [(new, beside | {key: value}) for new in sorted(taken - seen)]
            seen |= taken
    alone = {key: outcome(launcher, start | {key: 0.25})[0] for key in sorted(seen)}
    for key, value in chosen:
        whole = outcome(launcher, start | {key: value})[0]
        for other, lines in alone.items():
            both = outcome(launcher, start | {key: value, other: 0.25})[0]
            if other != key and (new := [line for line in both if line not in whole and line not in lines]):
                yield f"{launcher.name}: {key} = {value!r}, {other} = 0.25: {'; '.join(new)}"


def tables() -> str:
    """Return the rows of all trainers."""
    known = all_launchers()
    found = (row for name in TRAINERS for base in BASES.get(name, [{}]) for row in rows(known[name], base))
    return "".join(f"{row}\n" for row in found)


def test_no_row_of_a_table_has_changed() -> None:
    now, read = (dict.fromkeys(text.splitlines()) for text in (tables(), TABLES.read_text()))
    differences = [f"now: {row}" for row in now if row not in read] + [f"was: {row}" for row in read if row not in now]
    assert not differences, "\n".join(differences[:20])


if __name__ == "__main__":
    TABLES.write_text(tables())
