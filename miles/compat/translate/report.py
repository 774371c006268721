"""Print a translation: the command, what became of every setting, and the objective in numbers."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from miles.compat.translate.launchers.base import Launcher
from miles.compat.translate.objective import Objective
from miles.compat.translate.translation import Entry, Setting, Translation

REQUIRED = {
    "--hf-checkpoint": "the model",
    "--prompt-data": "the prompts",
    "--rollout-batch-size": "prompts of an iteration",
    "--rollout-max-response-len": "tokens of a response",
}


def report(launcher: Launcher, translation: Translation, objective: Objective) -> str:
    """Return the text of ``miles translate``."""
    settings = len(translation.document.settings)
    parts = [
        ("Read", [f"{translation.document.path} as {launcher.name} ({settings} settings), by {launcher.version}"]),
        ("Command", _command(translation)),
        ("Flags of the command that are not read", _elsewhere(translation.document.elsewhere.values())),
        ("Carries over", _entries(translation.carried)),
        ("Differs in meaning", _entries(translation.differing)),
        ("Read for the flags above, or null", _settings(translation.read_along)),
        ("Has no counterpart, or no effect", _entries(translation.missing)),
        ("Computed when the file is run, not read here", _settings(translation.expressions())),
        ("Not in the table of this translation: check these by hand", _settings(translation.unknown)),
        ("Objective", _objective(objective, [setting.key for setting in translation.expressions()])),
        ("Objective in numbers", _numbers(objective)),
    ]
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in parts if lines)


def _command(translation: Translation) -> list[str]:
    lines = ["python train.py"] + [f"  {shlex.join(group)}" for group in translation.groups]
    missing = [f"{flag} ({what})" for flag, what in REQUIRED.items() if flag not in translation.words]
    if not {"--rm-type", "--custom-rm-path"} & {*translation.words}:
        missing.append("--rm-type or --custom-rm-path (the reward)")
    if not {"--num-rollout", "--num-epoch"} & {*translation.words}:
        missing.append("--num-rollout or --num-epoch (the end)")
    lines = [f"{line} \\" for line in lines[:-1]] + lines[-1:]
    return lines + ([f"still to add: {', '.join(missing)}"] if missing else [])


def _place(line: int | None) -> str:
    return "" if line is None else f" (line {line})"


def _entries(entries: Sequence[Entry]) -> list[str]:
    lines = []
    for entry in entries:
        became = f" -> {shlex.join(entry.words)}" if entry.words else ""
        lines.append(f"{entry.shown}{_place(entry.line)}{became}")
        if entry.why:
            lines.append(f"    {entry.why}")
    return lines


def _settings(settings: Iterable[Setting]) -> list[str]:
    return [f"{setting.shown}{_place(setting.line)}" for setting in settings]


def _elsewhere(settings: Iterable[Setting]) -> list[str]:
    return [f"{setting.key} {setting.value}{_place(setting.line)}" for setting in settings]


def _objective(objective: Objective, computed: Sequence[str]) -> list[str]:
    unknown = objective.setting.split()[0] in computed
    lines = ["the setting is computed when the file is run: this is its default"] if unknown else []
    lines += [
        f"there: {objective.setting}: {objective.formula}   [{objective.source}]",
        f"here:  {' '.join(objective.words)}: {objective.our_formula}",
        "the same, whatever the batch" if objective.exact else f"not the same: it depends on {objective.depends}",
    ]
    if not objective.exact:
        lines.append(f"nearest in the uneven batch, by the weights of the tokens: {objective.nearest()}")
    return [*lines, *objective.remarks]


def _numbers(objective: Objective) -> list[str]:
    rows = objective.values()
    width = max(map(len, rows))
    divisor = "1/N" if objective.divisor is None else f"{objective.divisor:g}"
    lines = [
        "Worked example: docs/loss-aggregation.md. Uneven batch: 2 prompts of 4 responses with 1, 2, 3, 0 | 8, 6, 8, 4",
        "loss tokens; rank 1 has the micro-batches (1, 8) (2, 3), rank 2 (0, 6) (8, 4); losses: docs/translate.md.",
        f"L = {divisor}.",
        f"{'':{width}}  {'worked example':>16}  {'uneven batch':>16}",
    ]
    for name, values in rows.items():
        mark = "  <- this translation" if name == objective.mode else ""
        lines.append(f"{name:{width}}  " + "  ".join(f"{value:>16.6f}" for value in values) + mark)
    return lines
