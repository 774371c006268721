"""The weights of a saved run as a Hugging Face folder: a checkpoint that is exported, or a folder that is one already.

``miles export``, ``miles eval`` and ``miles sample`` all start here. An engine then loads the folder as it would load
any model, so every engine can generate with every checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from miles.base.processes import pool_of
from miles.base.text import InputError
from miles.commands.saved_runs.run import SavedRun, Step, add_run, on_this_machine
from miles.config.settings import Settings
from miles.training.checkpoint_files import DamagedFile, appearing_whole, check_against_manifest


def add_step_flag(parser: argparse._ActionsContainer) -> None:
    """Add ``--step`` to a command."""
    parser.add_argument(
        "--step",
        type=_step,
        metavar="N",
        help="the checkpoint after N optimizer steps, or best, kept by --save-best (default: the newest complete one)",
    )


def _step(text: str) -> Step:
    try:
        return "best" if text == "best" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of optimizer steps nor best") from None


def add_weights_flags(parser: argparse.ArgumentParser) -> None:
    """Add RUN, ``--step`` and ``--weights`` to a command."""
    add_run(parser)
    which = parser.add_mutually_exclusive_group()
    add_step_flag(which)
    which.add_argument(
        "--weights", type=Path, metavar="FOLDER", help="an exported Hugging Face folder instead of a checkpoint"
    )


@contextmanager
def hugging_face_folder(run: SavedRun, step: Step, weights: Path | None) -> Iterator[Path]:
    """Have the weights as a Hugging Face folder with a tokenizer, for the length of the block.

    Args:
        run: The run.
        step: The optimizer steps of the checkpoint, or ``best``; None is the newest complete one, or the export of
            ``--save-hf`` in a run without ``--save``.
        weights: An exported folder to use instead.

    Raises:
        InputError: There are no such weights.
    """
    folder = weights or _own_export(run, step)
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise InputError(f"--weights {folder}: no config.json there; give an exported Hugging Face folder")
        _announce(str(folder))
        yield folder
        return
    checkpoint = run.checkpoint(step)
    _announce(f"{checkpoint.folder} (step {checkpoint.steps})")
    with tempfile.TemporaryDirectory(prefix="miles-export-") as temporary:
        with on_this_machine(run.settings.checkpoint, checkpoint.folder) as whole:
            export(run, whole, Path(temporary) / "model")
        yield Path(temporary) / "model"


@contextmanager
def generating(options: argparse.Namespace) -> Iterator[Settings]:
    """Yield the run's settings for generating here with the weights that the flags name.

    Raises:
        InputError: There are no such weights.
    """
    run = SavedRun(options.run)
    settings = run.settings  # read before the weights are exported, which takes longer
    with (
        hugging_face_folder(run, options.step, options.weights) as model,
        tempfile.TemporaryDirectory(prefix="miles-logs-") as logs,
    ):
        from miles.commands.saved_runs.generation import settings_for  # imports torch

        yield settings_for(settings, model, Path(logs), options.engine)


def _announce(weights: str) -> None:
    print(f"loading {weights} …", file=sys.stderr, flush=True)


def _own_export(run: SavedRun, step: Step) -> Path | None:
    """Return the export of ``--save-hf`` of a run without ``--save``: the only copy of its weights."""
    save_hf = run.settings.checkpoint.save_hf
    if step is not None or save_hf is None or run.settings.checkpoint.save is not None:
        return None
    folder = run.inside(save_hf)
    return folder if (folder / "config.json").is_file() else None


def export(run: SavedRun, checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint as a Hugging Face folder with a tokenizer; ``folder`` appears whole or not at all.

    On CPU. A separate process does it for Megatron, which needs torch changed: no engine should meet that.

    Raises:
        InputError: The checkpoint is damaged, or the run's settings do not describe it.
        OSError: ``folder`` cannot be written.
    """
    if run.settings.backend.trains_without_ray:
        _export(run.settings, checkpoint.absolute(), folder.absolute())
        return
    with pool_of(1, "spawn") as pool:
        try:
            pool.submit(_export, run.settings, checkpoint.absolute(), folder.absolute()).result()
        except BrokenProcessPool:
            raise InputError(
                f"{checkpoint}: the process that exported it was killed; it needs memory for the whole model"
            ) from None


def export_adapter(run: SavedRun, checkpoint: Path, folder: Path) -> None:
    """Write the adapter of a checkpoint as peft reads it; ``folder`` appears whole or not at all.

    Raises:
        InputError: The checkpoint has no adapter, or is damaged.
        OSError: ``folder`` cannot be written.
    """
    from miles.training.adapter_folder import adapter_folder, holds_adapter  # imports torch

    if not holds_adapter(checkpoint):
        raise InputError(f"--to peft: {checkpoint} holds all weights and no adapter; use --to hf")
    try:
        check_against_manifest(checkpoint)
    except DamagedFile as fault:
        raise InputError(f"the checkpoint {checkpoint} is damaged: {fault}; give another one") from None
    with appearing_whole(folder) as staged:
        for path in adapter_folder(checkpoint).iterdir():
            shutil.copyfile(path, staged / path.name)


def _export(settings: Settings, checkpoint: Path, folder: Path) -> None:
    from transformers.utils.logging import disable_progress_bar

    from miles.base.tokenizer import load_tokenizer
    from miles.models.tokenizer_files import save_tokenizer
    from miles.training.one_process import export_checkpoint

    assert settings.model.hf_checkpoint is not None
    disable_progress_bar()
    with appearing_whole(folder) as staged:
        export_checkpoint(settings, checkpoint, staged)
        save_tokenizer(load_tokenizer(settings.model.hf_checkpoint), staged)
