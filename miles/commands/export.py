"""Export a checkpoint of a run as a Hugging Face folder, which transformers and engines load.

Of a run with --lora-rank, that is the weights with the adapter added to them; --to peft writes the adapter alone.
"""

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import miles
from miles.base.flags import flag_name
from miles.base.secrets import hide_in_text, public_words
from miles.base.text import InputError, one_line
from miles.commands.saved_runs.run import SavedCheckpoint, SavedRun, add_run, on_this_machine
from miles.commands.saved_runs.weights import add_step_flag, export, export_adapter
from miles.config.command_parser import CommandParser
from miles.config.servers.passed_on import PREFIXES
from miles.observe.metrics_file import MetricsFile
from miles.observe.run_files import METRICS
from miles.tasks.data.settings import HUGGING_FACE

# --to: the function that writes the folder, and its contents
WRITERS = {"hf": (export, "weights, configuration and tokenizer of"), "peft": (export_adapter, "the adapter of")}


def main(argv: Sequence[str]) -> int:
    """Write the folder and return 0.

    Raises:
        SystemExit: With status 2 for wrong arguments, and for a checkpoint that cannot be exported.
    """
    parser = CommandParser(prog="miles export", description=__doc__, allow_abbrev=False)
    add_run(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write, which must not exist yet")
    add_step_flag(parser)
    parser.add_argument(
        "--to",
        choices=tuple(WRITERS),
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
    options = parser.parse_args(list(argv))
    if options.out.exists():
        parser.error(f"{options.out}: is there already; give a new folder, or remove it")
    try:
        run = SavedRun(options.run)
        checkpoint = run.checkpoint(options.step)
        write, what = WRITERS[options.to]
        repository = None if options.push_to_hub is None else open_repository(options.push_to_hub, options.private)
        with on_this_machine(run.settings.checkpoint, checkpoint.folder) as whole:
            write(run, whole, options.out)
        print(f"{options.out}: {what} {checkpoint.folder} (step {checkpoint.steps})")
        if repository is not None:
            print(push(repository, options.out, model_card(run, checkpoint, repository, options.to == "peft")))
    except (InputError, ValueError, OSError) as error:
        parser.error(str(error))
    return 0


# Push an exported folder to the Hugging Face hub, with a card that has the command, the data and the curve.


LONGEST_CAUSE = 300
MOST_ROWS = 12  # of the curve
_CURVES = ("rollout/reward", "train/loss")  # the first that the run has, and the held-out ones


def open_repository(name: str, is_private: bool) -> str:
    """Create a repository unless it is there, and check that the token may write; return ``USER/NAME``.

    Raises:
        InputError: There is no token, it may not write there, or the hub does not answer.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    with _refused_in_one_sentence(name):
        user = hub.whoami()["name"]
        repository = name if "/" in name else f"{user}/{name}"
        hub.create_repo(repository, private=is_private or None, exist_ok=True)
        hub.auth_check(repository, write=True)
    return repository


def push(repository: str, folder: Path, card: str) -> str:
    """Upload a folder with its card in one commit; return the address of the repository.

    Raises:
        InputError: The hub refuses it, or does not answer.
    """
    from huggingface_hub import HfApi

    (folder / "README.md").write_text(card, encoding="utf-8")
    with _refused_in_one_sentence(repository):
        commit = HfApi().upload_folder(
            repo_id=repository, folder_path=folder, commit_message=f"Upload by miles {miles.__version__}"
        )
    return str(commit.repo_url)


@contextmanager
def _refused_in_one_sentence(name: str) -> Iterator[None]:
    import httpx
    from huggingface_hub import get_token

    try:
        yield
    except (OSError, ValueError, httpx.HTTPError) as error:
        token = get_token()
        cause = one_line(hide_in_text(str(error), [token] if token else []), LONGEST_CAUSE).strip()
        raise InputError(
            f"--push-to-hub {name}: the hub refuses it, or cannot be reached ({cause}); "
            "give a token that may write there (HF_TOKEN, or hf auth login), and check the name and the network"
        ) from error


def model_card(run: SavedRun, checkpoint: SavedCheckpoint, repository: str, is_adapter: bool) -> str:
    """Return the text of the repository's README.md."""
    base = str(run.settings.model.hf_checkpoint)
    data = run.header.provenance.get("data", [])
    on_hub = [
        row["source"].removeprefix(HUGGING_FACE).partition(":")[0]
        for row in data
        if row["source"].startswith(HUGGING_FACE)
    ]
    about: list[tuple[str, Sequence[str]]] = [
        ("base_model", [] if os.path.isabs(base) or os.path.exists(base) else [base]),
        ("datasets", on_hub),
        ("tags", ["miles", "reinforcement-learning"] if run.header.objective_words else ["miles"]),
    ]
    lines = ["---", f"library_name: {'peft' if is_adapter else 'transformers'}"]
    lines += [*(f"{key}: [{', '.join(values)}]" for key, values in about if values), "---", ""]
    steps = f"{checkpoint.steps} of {run.header.total_steps} optimizer steps"
    lines += [f"# {repository.rpartition('/')[2]}", "", f"`{base}` after {steps} with miles {miles.__version__}.", ""]
    lines += [*run.header.objective_words.splitlines(), "", "## Curve", "", *_curve(run, checkpoint.steps), ""]
    lines += ["## Data", "", *map(_data_line, data), "", "## Command", "", "```", _command(run), "```", ""]
    return "\n".join(lines)


def _data_line(row: dict[str, Any]) -> str:
    known = f" ({row['bytes']} bytes, SHA-256 `{row['sha256']}`)" if "sha256" in row else ""
    return f"- `{row['source']}`{known}"


def _curve(run: SavedRun, last: int) -> list[str]:
    """Return a table of the reward, or the loss of a run without rewards, and of the held-out sets.

    Every row has the means of the steps since the row before it.
    """
    metrics = MetricsFile(run.folder / METRICS)
    metrics.refresh()
    steps = [step for step in metrics.steps if step <= last]
    names = [name for name in _CURVES if name in metrics.names][:1]
    names += [name for name in metrics.names if name.startswith("eval/") and name.endswith(("/reward", "/loss"))]
    lines = [f"| step | {' | '.join(names)} |", f"|{'---|' * (len(names) + 1)}"]
    rows = min(MOST_ROWS, len(steps))
    begin = 0
    for row in range(rows):
        end = (row + 1) * len(steps) // rows
        values = ([v for v in metrics.column(name)[begin:end] if math.isfinite(v)] for name in names)
        cells = (f"{sum(column) / len(column):.3f}" if column else "" for column in values)
        lines.append(f"| {steps[end - 1]} | {' | '.join(cells)} |")
        begin = end
    return lines


def _command(run: SavedRun) -> str:
    """Return the command of the run: every setting that is not the default, without secrets."""
    words = [["miles", "train"]]
    for section, values in run.header.settings.items():
        for name, value in values.items():
            if section == "server_flags":
                words.append([PREFIXES[name] + word[2:] if word.startswith("--") else word for word in value])
            elif not run.header.is_default(section, name):
                several = value if isinstance(value, list) else [value]
                if isinstance(value, bool):  # a switch
                    several = []
                words.append([flag_name(name), *map(str, several)])
    return " \\\n    ".join(shlex.join(public_words(flag)) for flag in words if flag)
