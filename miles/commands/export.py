"""Export a checkpoint of a run as a Hugging Face folder, which transformers and engines load.

Of a run with --lora-rank, that is the weights with the adapter added to them; --to peft writes the adapter alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles.base.text import InputError
from miles.commands.saved_runs.hub import model_card, open_repository, push
from miles.commands.saved_runs.run import SavedRun, on_this_machine, run_folder
from miles.commands.saved_runs.weights import add_step_flag, export, export_adapter
from miles.config.command_parser import CommandParser

# --to: the function that writes the folder, and its contents
WRITERS = {
    "hf": (export, "weights, configuration and tokenizer of"),
    "peft": (export_adapter, "the adapter of"),
}


def main(argv: Sequence[str]) -> int:
    """Write the folder and return 0.

    Raises:
        SystemExit: With status 2 for wrong arguments, and for a checkpoint that cannot be exported.
    """
    parser = CommandParser(prog="miles export", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "run", type=run_folder, metavar="RUN", help="the --output-dir of a run, or the URL of its --save"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write, which must not exist yet")
    add_step_flag(parser)
    parser.add_argument(
        "--to",
        choices=("hf", "peft"),
        default="hf",
        help="the format: a Hugging Face folder, or the adapter of a run with --lora-rank as peft reads it",
    )
    parser.add_argument(
        "--push-to-hub",
        metavar="NAME",
        help="also upload the folder, with a model card, to this repository of the Hugging Face hub (HF_TOKEN, "
        "HF_ENDPOINT); it is made if need be, and checked before the export",
    )
    parser.add_argument("--private", action="store_true", help="make the repository of --push-to-hub private")
    given = parser.parse_args(list(argv))
    if given.out.exists():
        parser.error(f"{given.out}: is there already; give a new folder, or remove it")
    try:
        run = SavedRun(given.run)
        checkpoint = run.checkpoint(given.step)
        write, what = WRITERS[given.to]
        repository = None if given.push_to_hub is None else open_repository(given.push_to_hub, given.private)
        with on_this_machine(run.settings.checkpoint, checkpoint.folder) as whole:
            write(run, whole, given.out)
        print(f"{given.out}: {what} {checkpoint.folder} (step {checkpoint.steps})")
        if repository is not None:
            print(push(repository, given.out, model_card(run, checkpoint, repository, given.to == "peft")))
    except (InputError, ValueError, OSError) as error:
        parser.error(str(error))
    return 0
