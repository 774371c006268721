"""Answer a prompt with a checkpoint of a run, several times.

The prompt is rendered as the run renders its own: with its chat template, if it uses one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from miles.base.text import InputError
from miles.commands.saved_runs.run import SavedRun
from miles.commands.saved_runs.weights import add_weights_flags, hugging_face_folder
from miles.config.command_parser import CommandParser
from miles.config.components import ENGINES

if TYPE_CHECKING:
    from miles.types.sample import Sample


def main(argv: Sequence[str]) -> int:
    """Print the answers and return 0.

    Raises:
        SystemExit: With status 2 for wrong arguments, and for weights that are not there.
    """
    parser = CommandParser(prog="miles sample", description=__doc__, allow_abbrev=False)
    add_weights_flags(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="an image; the next <image> of the prompt stands for it (default: at its beginning); may be given again",
    )
    parser.add_argument("--n", type=int, default=4, metavar="N", help="how many answers (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: as in the run)")
    parser.add_argument("--max-response-len", type=int, metavar="N", help="tokens of an answer (default: the run's)")
    parser.add_argument("--engine", choices=tuple(ENGINES), help="generation engine (default: the run's)")
    parser.add_argument("--json", action="store_true", help="print one JSON array instead of text")
    options = parser.parse_args(list(argv))
    if options.n < 1:
        parser.error(f"--n {options.n}: must be at least 1; give 1 or more")
    if options.temperature is not None and not 0 <= options.temperature < float("inf"):
        parser.error(f"--temperature {options.temperature}: must be finite, and 0 (greedy) or more")
    if options.max_response_len is not None and options.max_response_len < 1:
        parser.error(f"--max-response-len {options.max_response_len}: must be at least 1; give 1 or more")
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    try:
        samples = _answers(options, text)
    except (InputError, ValueError, OSError) as error:
        parser.error(str(error))
    if options.json:
        rows = [{"response": s.response, "tokens": len(s.response_ids), "status": s.status.value} for s in samples]
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return 0
    for number, sample in enumerate(samples, start=1):
        print(f"--- answer {number} ({len(sample.response_ids)} tokens, {sample.status.value})")
        print(sample.response)
    return 0


def _answers(options: argparse.Namespace, text: str) -> list[Sample]:
    run = SavedRun(options.run)
    settings = run.settings
    with (
        hugging_face_folder(run, options.step, options.weights) as model,
        tempfile.TemporaryDirectory(prefix="miles-sample-") as logs,
    ):
        from miles.commands.saved_runs.generation import answer, settings_for  # imports torch

        here = settings_for(settings, model, Path(logs), options.engine)
        work = answer(here, text, options.n, options.seed, options.temperature, options.max_response_len, options.image)
        return asyncio.run(work)
