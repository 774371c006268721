"""Translate the configuration of another trainer into flags, and show what its objective computes.

Read a file of TRL, verl, slime, miles, OpenRLHF, prime-rl or NeMo-RL. Nothing in the file is run.
"""

import shlex
import sys
from collections.abc import Iterable, Sequence

from miles.base.text import InputError
from miles.compat.translate.launchers.base import all_launchers, launcher_of
from miles.compat.translate.reading import read_document
from miles.compat.translate.translation import (
    UNEVEN,
    Entry,
    Expression,
    ForeignObjective,
    Setting,
    Translation,
    distance,
    token_weights,
)
from miles.config.command_parser import CommandParser


def main(argv: Sequence[str]) -> int:
    """Print the translation of a file and return 0; 2 if the file cannot be read."""
    parser = CommandParser(prog="miles translate", description=__doc__, allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="a .json, .yaml, .toml, .py or .sh file of another trainer")
    parser.add_argument(
        "--from", dest="source", choices=tuple(all_launchers()), help="the trainer; default: the one that fits the file"
    )
    arguments = parser.parse_args(list(argv))
    try:
        document = read_document(arguments.file)
        launcher = launcher_of(document, arguments.source)
        translation = Translation(document, launcher.table())
        objective = launcher.translate(translation)
        settings = list(document.settings.values())
        known = translation.document.settings.keys() & translation.table.rows.keys()
        if settings and translation.table.rows and not known:
            raise InputError(
                f"{arguments.file}: none of its {len(settings)} settings, such as {settings[0].label}, is one of "
                f"{translation.table.version}: another release may name them otherwise; give --from if it is "
                "the file of another trainer"
            )
        print(report(launcher.name, translation, objective))
    except InputError as error:
        print(f"miles translate: {error}", file=sys.stderr)
        return 2
    return 0


# Print a translation: the command, what differs from the original, and what was not read.


REQUIRED = {
    "--hf-checkpoint": "the model",
    "--prompt-data": "the prompts",
    "--rollout-batch-size": "prompts of an iteration",
    "--rollout-max-response-len": "tokens of a response",
}


def report(name: str, translation: Translation, objective: ForeignObjective | None) -> str:
    """Return the text of ``miles translate`` for a file of the trainer called ``name``."""
    settings = len(translation.document.settings)
    version = translation.table.version
    differs = [*_objective(objective), *_entries(translation.differences)]
    unread = [*_settings(translation.unread), *_elsewhere(translation.document.elsewhere.values())]
    parts = [
        ("Command", _command(translation)),
        ("Differs from the original", differs or ["nothing that was read"]),
        ("Not read, and could change learning", unread or ["nothing"]),
    ]
    text = [f"{translation.document.path}: {name}, {settings} settings, with the defaults of {version}"]
    if objective is not None and objective.exact and translation.is_proven:
        text[0] += "\nThe gradient of a step's loss is the same: docs/conformance.md"
    text += ["\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in parts]
    if translation.quiet:
        plural = "s" * (translation.quiet != 1)
        text.append(f"{translation.quiet} setting{plural} without effect on learning left out")
    return "\n\n".join(text)


def _command(translation: Translation) -> list[str]:
    lines = ["python train.py"] + [f"  {_joined(group)}" for group in translation.groups]
    missing = [f"{flag} ({what})" for flag, what in REQUIRED.items() if flag not in translation.words]
    if "--prompt-mix" in translation.words:
        missing.remove("--prompt-data (the prompts)")
    if not {"--rm-type", "--custom-rm-path"} & {*translation.words}:
        missing.append("--rm-type or --custom-rm-path (the reward)")
    if not {"--num-rollout", "--num-epoch"} & {*translation.words}:
        missing.append("--num-rollout or --num-epoch (the end)")
    lines = [f"{line} \\" for line in lines[:-1]] + lines[-1:]
    return lines + ([f"still to add: {', '.join(missing)}"] if missing else [])


def _joined(words: Iterable[str]) -> str:
    """Return words for a shell, which may expand ``~``."""
    return " ".join(f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word) for word in words)


def _place(line: int | None) -> str:
    return "" if line is None else f" (line {line})"


def _entries(entries: Sequence[Entry]) -> list[str]:
    lines = []
    for entry in entries:
        became = f" -> {shlex.join(entry.words)}" if entry.words else ""
        lines.append(f"{entry.label}{_place(entry.line)}{became}: {entry.why}")
    return lines


def _settings(settings: Iterable[Setting]) -> list[str]:
    computed = ": computed when the file is run; what follows from it is left out"
    return [
        f"{setting.label}{_place(setting.line)}{computed if isinstance(setting.value, Expression) else ''}"
        for setting in settings
    ]


def _elsewhere(settings: Iterable[Setting]) -> list[str]:
    return [f"{setting.key} {setting.value}{_place(setting.line)}" for setting in settings]


def _objective(objective: ForeignObjective | None) -> list[str]:
    """Return how far the weights of the tokens are from the original's in an uneven batch."""
    if objective is None or objective.exact:
        return []
    our_mode = objective.ours(objective.mode)
    weights = token_weights(objective.reduce, UNEVEN)
    pairs = zip(UNEVEN.responses, weights, strict=True)
    total = sum(response.tokens * abs(weight) for response, weight in pairs)
    share = distance(objective.reduce, our_mode, UNEVEN) / total
    sentence = (
        f"{objective.setting} -> {' '.join(objective.words)}: {objective.formula} there, {objective.our_formula} "
        f"here; it depends on {objective.depends}. In the uneven batch of docs/translate.md the weights of the tokens "
        f"differ by {100 * share:.0f} %"
    )
    nearest = objective.nearest()
    return [sentence + (f"; {nearest} is nearer there" if nearest != objective.mode else "")]
