"""Train a language model by reinforcement learning (the same as ``python train.py``).

Parse and validate the flags, start Ray, place the actors, and run the loop (miles/run/launcher.py). Wrong flags are
reported before torch or Ray are imported.
"""

from collections.abc import Sequence
from dataclasses import replace

from miles.base.secrets import hide_on_command_line
from miles.base.text import tell
from miles.compat.border import parse_or_exit
from miles.config.explain import explain
from miles.config.notes import start_refused
from miles.config.rules import check_one_process
from miles.config.validate import Validated


def main(argv: Sequence[str], is_alone: bool = True) -> int:
    """Run the training command and return 0.

    Args:
        argv: Its words.
        is_alone: Whether this process does nothing else afterwards.

    Raises:
        SystemExit: With status 2 for wrong flags, before anything starts; with 1 if the run fails; with 0 after
            ``--explain``.
    """
    hide_on_command_line(argv)
    validated = parse_or_exit(argv)
    if validated.explains:
        print(explain(_with_folders(validated)))
        raise SystemExit(0)
    if validated.settings.rehearsal.rehearse:
        from miles.commands.rehearsal.command import rehearse  # imports torch

        return rehearse(validated)
    from miles.run.launcher import launch  # imports Ray

    launch(validated, is_alone=is_alone)
    return 0


def _with_folders(validated: Validated) -> Validated:
    """Return ``validated`` with what a start would object to in its folders, such as another run's checkpoints."""
    checkpoint = validated.settings.checkpoint
    if checkpoint.save is None:
        return validated
    from miles.run.resume import own_save_folder

    try:
        own_save_folder(checkpoint)
    except ValueError as error:
        return replace(validated, surprises=(*validated.surprises, start_refused(str(error))))
    return validated


def in_one_process(argv: Sequence[str]) -> None:
    """Run the training command in this process alone, without Ray; as ``main``.

    Raises:
        SystemExit: As ``main``, also if the run needs more processes.
    """
    from miles.run.launcher import launch, train_in_one_process  # imports Ray

    validated = parse_or_exit(argv)
    try:
        check_one_process(validated.settings)
    except ValueError as error:
        tell(f"error: {error}")
        raise SystemExit(2) from None
    launch(validated, runner=train_in_one_process)
