"""Write a folder to start from: settings, a reward with its test, and three rows of data.

The files that it writes train unchanged. Replace the rows, change the reward, and run the three commands that it
prints. Without --model it is the model of the quickstart, which is fetched if it is not on this machine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from miles.commands.quickstart_parts import model
from miles.config.command_parser import CommandParser

_CALL = '<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


@dataclass(frozen=True)
class StarterTask:
    """The files of a task.

    Attributes:
        rows: Rows of data.jsonl.
        reward: The lines of run.yaml that name the reward, each with a comment.
        longest: Tokens of the longest answer.
    """

    rows: Sequence[dict[str, Any]]
    reward: Sequence[str]
    longest: int


_LABEL = "label_key: label                # the column of the right answer; sample.label in the reward"
_OWN = "custom_rm_path: reward:score    # module:function; python reward.py tests it"
TASKS = {
    "math": StarterTask(
        [
            {"input": f"What is {a} * {b}? Give only the final answer.", "label": str(a * b)}
            for a, b in ((3, 4), (7, 8), (9, 6))
        ],
        [_LABEL, _OWN],
        12,
    ),
    "code": StarterTask(
        [
            {
                "input": f"Write a Python function {name}(a, b) that returns {what}, in a ```python block.",
                "metadata": {"tests": [test]},
            }
            for name, what, test in (
                ("add", "their sum", "assert add(2, 3) == 5"),
                ("largest", "the larger of them", "assert largest(2, 3) == 3"),
                ("join", "them as one text", 'assert join("a", 1) == "a1"'),
            )
        ],
        [
            "rm_type: python_code:1,custom:0.2   # the tests of the row in a sandbox, and the function below",
            _OWN,
        ],
        96,
    ),
    "chat": StarterTask(
        [
            {"input": [{"role": "user", "content": question}]}
            for question in ("Why is the sky blue?", "What is a good breakfast?", "How do I learn to swim?")
        ],
        [_OWN],
        64,
    ),
    "tool": StarterTask(
        [
            {
                "input": [  # the first call shows a small model the form
                    {"role": "user", "content": f"What is {a - 3} * {b}?"},
                    {"role": "assistant", "content": _CALL.format(a=a - 3, b=b)},
                    {"role": "user", "content": f"What is {a} * {b}?"},
                ],
                "label": str(a * b),
            }
            for a, b in ((47, 86), (31, 45), (62, 78))
        ],
        [
            _LABEL,
            "environment: reward:Calculator  # the tools, and the loop over turns; python reward.py tests it",
            "rm_type: environment            # the environment's own reward",
            "rollout_max_context_len: 512    # tokens of all turns",
        ],
        64,
    ),
}


def settings(task: StarterTask, source: str) -> str:
    """Return the text of run.yaml."""
    lines = [
        "# miles train --config run.yaml starts this run. Flags and key=value after it win.",
        "# miles train --help lists all settings; --n-samples-per-prompt is n_samples_per_prompt here.",
        f"hf_checkpoint: {json.dumps(source)}  # a folder, or a name on the Hugging Face hub",
        "prompt_data: data.jsonl         # one JSON object per line; input is the prompt. Replace the rows",
        "apply_chat_template: true       # prompts as the model's chat template writes them",
        *task.reward,
        '# rollout_stop: ["\\n"]           # texts that end an answer; for plain prompts, drop apply_chat_template',
        "num_rollout: 20                 # iterations: prompts, answers, rewards, a step",
        "rollout_batch_size: 4           # prompts of an iteration; more make its step less noisy",
        "n_samples_per_prompt: 8         # answers to each, which are compared with each other",
        f"rollout_max_response_len: {task.longest:<5} # tokens of the longest answer",
        "use_dynamic_batch_size: true    # as many answers at once as fit:",
        "max_tokens_per_gpu: 4096        # less takes less memory",
        "lr: 1.0e-05                     # try 3.0e-05 if the reward stays flat; with billions of parameters 1.0e-06;",
        "                                # it falls to 0 over the run, unless lr_decay_style is constant",
        "# Add these when you have held-out rows, and to keep what was trained:",
        "# eval_prompt_data: [heldout, heldout.jsonl]",
        "# eval_interval: 10",
        "# save: outputs/checkpoints      # with the optimizer: about 13 bytes per parameter each",
        "# save_keep_last: 2",
        "# save_interval: 10              # iterations; without it, only at the end and at Ctrl-C",
        "",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Write the folder, print what to do next, and return 0; 2 if it cannot be written."""
    parser = CommandParser(prog="miles init", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--task", choices=TASKS, default="math", help="what the model learns (default: math)")
    parser.add_argument("--model", metavar="NAME", help="folder or name on the Hugging Face hub")
    options = parser.parse_args(list(argv))
    folder: Path = options.folder
    try:
        if folder.exists() and any(folder.iterdir()):
            parser.error(f"{folder}: holds files already; give a new folder")
        source = options.model or str(model.prepare(None).resolve())
        folder.mkdir(parents=True, exist_ok=True)
        task = TASKS[options.task]
        texts = {
            "run.yaml": settings(task, os.path.abspath(source) if os.path.isdir(source) else source),
            "data.jsonl": "".join(json.dumps(row) + "\n" for row in task.rows),
            "reward.py": resources.files("miles.commands.init_parts").joinpath(f"{options.task}.py").read_text("utf-8"),
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"miles init: error: {error}", file=sys.stderr)
        return 2
    print(f"{folder}: {', '.join(texts)}. Next:\n")
    print(f"cd {folder}", "python reward.py", "miles explain --config run.yaml", sep="\n")
    print("miles train --config run.yaml --debug-rollout-only num_rollout=1    # answers and rewards, no training")
    print("miles train --config run.yaml", "miles report outputs/run", sep="\n")
    return 0
