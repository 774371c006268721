"""Write a folder to start from: settings, a reward with its test, and three rows of data.

The files that it writes train unchanged. Replace the rows, change the reward, and run the commands that it prints.
Without --model the model is the quickstart's, which is fetched if it is not on this machine.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template

from miles.base.flags import collect_errors
from miles.commands.quickstart_parts import model
from miles.config.command_parser import CommandParser

_PARTS = resources.files("miles.commands.init_parts")
_LABEL = "label_key: label                # the column of the right answer; sample.label in the reward"
_OWN = "custom_rm_path: reward:score    # module:function; python reward.py tests it"
# The lines of run.yaml that name the reward of each task, and the tokens of its longest answer. The task's reward.py
# and data.jsonl are in init_parts.
TASKS: dict[str, tuple[Sequence[str], int]] = {
    "math": ([_LABEL, _OWN], 12),
    "code": (
        ["rm_type: python_code:1,custom:0.2   # the tests of the row in a sandbox, and the function below", _OWN],
        96,
    ),
    "chat": ([_OWN], 64),
    "tool": (
        [
            _LABEL,
            "environment: reward:Calculator  # the tools, and the loop over turns; python reward.py tests it",
            "rm_type: environment            # the environment's own reward",
            "rollout_max_context_len: 512    # tokens of all turns",
        ],
        64,
    ),
}


def settings(task: str, source: str) -> str:
    """Return the text of run.yaml."""
    reward, longest = TASKS[task]
    template = Template(_PARTS.joinpath("run.yaml").read_text("utf-8"))
    return template.substitute(model=json.dumps(source), reward="\n".join(reward), longest=f"{longest:<5}")


def main(argv: Sequence[str]) -> int:
    """Write the folder, print what to do next, and return 0; 2 if it cannot be written."""
    parser = CommandParser(prog="miles init", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--task", choices=TASKS, default="math", help="what the model learns (default: math)")
    parser.add_argument("--model", metavar="NAME", help="folder or name on the Hugging Face hub")
    options = parser.parse_args(list(argv))
    folder: Path = options.folder
    try:
        with collect_errors() as errors:
            if options.model is not None:
                errors.existing_folder("model", options.model)
        if folder.exists() and any(folder.iterdir()):
            parser.error(f"{folder}: holds files already; give a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        source = options.model or str(model.prepare(None).resolve())
        texts = {
            "run.yaml": settings(options.task, os.path.abspath(source) if os.path.isdir(source) else source),
            "data.jsonl": _PARTS.joinpath(f"{options.task}.jsonl").read_text("utf-8"),
            "reward.py": _PARTS.joinpath(f"{options.task}.py").read_text("utf-8"),
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except NotADirectoryError:
        parser.error(f"{folder}: is a file, or is below one; give a new folder")
    except OSError as error:
        parser.error(f"{error.filename or folder}: cannot be written ({error.strerror or error}); give another folder")
    except ValueError as error:
        print(f"miles init: error: {error}", file=sys.stderr)
        return 2
    print(f"{folder}: {', '.join(texts)}. Next:\n")
    print(f"cd {shlex.quote(str(folder))}", "python reward.py", "miles explain --config run.yaml", sep="\n")
    print("miles train --config run.yaml --debug-rollout-only num_rollout=1    # answers and rewards, no training")
    print("miles train --config run.yaml", "miles report outputs/run", sep="\n")
    return 0
