"""Train a small model on one-digit products, on two CPU cores, in about five minutes.

Get SmolLM2-135M-Instruct, write the prompts, train, and print the accuracy on held-out prompts before and after.
Further flags are flags of miles train, and win over the settings of the quickstart.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from miles.base.locks import is_held
from miles.base.secrets import hide_on_command_line
from miles.commands import train
from miles.commands.quickstart_parts import data, model
from miles.commands.quickstart_parts.summary import summarize
from miles.compat.border import parse_or_exit, refuse_wrong_flags
from miles.config.command_parser import CommandParser
from miles.observe.run_files import METRICS

MARK = ".miles-quickstart"  # in a folder that this command made, and may replace
SETTINGS = Path(data.__file__).with_name("quickstart.yaml")


def main(argv: Sequence[str]) -> int:
    """Prepare and run the quickstart; return 0.

    Raises:
        SystemExit: With status 2 for wrong arguments; with 1 if the run fails.
    """
    hide_on_command_line(argv)  # before the model is fetched, which takes long
    words = list(argv)
    folder = Path(words.pop(0)) if words and not words[0].startswith("-") else None
    options, flags = _parser().parse_known_args(words)
    out: Path = options.output_dir
    try:
        _check(out)
        source = None if folder is None else model.prepare(folder)
        _write_inputs(out)  # the same ones in every quickstart
        if source is None:  # a model takes long to fetch or convert: flags first
            refuse_wrong_flags(_command(out, model.HUB_NAME, options.seed, flags))
            source = model.prepare(None, options.model_target)
        command = _command(out, source, options.seed, flags)
        validated = parse_or_exit(command)  # exits for wrong flags and --version
        trains = not (validated.explains or validated.settings.rehearsal.rehearse)
        if trains:
            _check(out)  # another quickstart may have started meanwhile
            if validated.settings.checkpoint.load is None:  # else the run continues what is there
                shutil.rmtree(out)
            _write_inputs(out)
    except (ValueError, OSError) as error:
        print(f"miles quickstart: error: {error}", file=sys.stderr)
        return 2
    status = train.main(command, is_alone=False)
    if not trains:
        return status
    try:
        print(f"quickstart: {summarize(out / METRICS, 'heldout')}")
    except (ValueError, OSError) as error:  # flags changed the evaluation, or nothing was trained
        print(f"quickstart: no summary: {error}", file=sys.stderr)
    return status


def _command(out: Path, source: str | Path, seed: int, flags: Sequence[str]) -> list[str]:
    """Return the words of the run: the file of settings, the quickstart's ``key=value`` additions, and the flags."""
    settings = [
        f"hf_checkpoint={source}",
        f"prompt_data={out / 'data' / 'train.jsonl'}",
        f"eval_prompt_data={json.dumps(['heldout', str(out / 'data' / 'heldout.jsonl')])}",
        f"save={out / 'checkpoints'}",
        f"save_hf={out / 'hf'}",
        f"output_dir={out}",
        f"seed={seed}",
        f"rollout_seed={seed}",
    ]
    return ["--config", str(SETTINGS), *settings, *flags]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="miles quickstart",
        usage="miles quickstart [MODEL_FOLDER] [--seed N] [--output-dir DIR] [flags of miles train]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of all random draws (default: 1)")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("outputs/quickstart"),
        metavar="DIR",
        help="folder of the run; one of an earlier quickstart is replaced, unless --load continues it "
        "(default: outputs/quickstart)",
    )
    parser.add_argument(
        "--model-target",
        type=Path,
        default=model.TARGET,
        metavar="DIR",
        help=f"folder for the model if no MODEL_FOLDER is given (default: {model.TARGET})",
    )
    return parser


def _check(folder: Path) -> None:
    """Check that the folder of the run may be written: it is new, or of an earlier quickstart that has ended.

    Raises:
        ValueError: The folder holds something else, or a run is writing to it.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / MARK).is_file():
        raise ValueError(
            f"--output-dir {folder}: holds files that are not of an earlier quickstart; remove them, or give "
            "another folder"
        )
    if is_held(folder):
        raise ValueError(
            f"--output-dir {folder}: another run is writing to this folder; wait for it to end, stop it, or give "
            "another folder"
        )


def _write_inputs(folder: Path) -> None:
    """Make the folder of the run, with its mark and the prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    data.write_sets(folder / "data", data.SEED)
