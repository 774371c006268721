"""Answer a prompt with a checkpoint of a run, several times.

The prompt is rendered as the run renders its own: with its chat template, if it uses one. Without PROMPT it is one of
the run's data, with its label and the rewards of the answers.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from miles.base.text import InputError
from miles.commands.saved_runs.run import SavedRun
from miles.commands.saved_runs.weights import add_weights_flags, generating
from miles.config.command_parser import CommandParser
from miles.config.components import ENGINES
from miles.config.settings import Settings
from miles.tasks.rewards.scoring import RewardError
from miles.types.sample import Sample


def main(argv: Sequence[str]) -> int:
    """Print the answers and return 0.

    Raises:
        SystemExit: With status 2 for wrong arguments, and for weights that are not there.
    """
    parser = CommandParser(prog="miles sample", description=__doc__, allow_abbrev=False)
    add_weights_flags(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--row", type=int, metavar="N", help="the N-th prompt of the run's data instead (default without PROMPT: 1)"
    )
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
    options = parser.parse_intermixed_args(list(argv))  # PROMPT may follow the flags
    parser.refuse_below_one(n=options.n, max_response_len=options.max_response_len, row=options.row)
    if options.temperature is not None and not 0 <= options.temperature < float("inf"):
        parser.error(f"--temperature {options.temperature}: must be finite, and 0 (greedy) or more")
    if options.row is not None and options.prompt is not None:
        parser.error("--row: cannot be used with PROMPT; give one of the two")
    if options.prompt is None and options.image:
        parser.error("--image: needs PROMPT; give both")
    ask = (options.row or 1) if options.prompt is None else options.prompt
    try:
        samples = _answers(options, sys.stdin.read() if ask == "-" else ask)
    except (ValueError, OSError, RewardError) as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps([_as_json(sample, ask) for sample in samples], indent=1, ensure_ascii=False, default=str))
        return 0
    if isinstance(ask, int) and samples:
        prompt = samples[0].prompt
        print(f"--- {prompt.source}, label {prompt.label}\n{prompt.text}")
    for number, sample in enumerate(samples, start=1):
        reward = "" if sample.reward is None else f", reward {sample.reward:.3g}"
        print(f"--- answer {number} ({len(sample.response_ids)} tokens, {sample.status.value}{reward})")
        print(sample.response)
    return 0


def _as_json(sample: Sample, ask: str | int) -> dict[str, Any]:
    row = {"response": sample.response, "tokens": len(sample.response_ids), "status": sample.status.value}
    of_data = {"prompt": sample.prompt.text, "label": sample.prompt.label, "reward": sample.reward}
    return row | of_data if isinstance(ask, int) else row


def _answers(options: argparse.Namespace, ask: str | int) -> list[Sample]:
    if isinstance(ask, int):
        _check_row(SavedRun(options.run).settings, ask)
    with generating(options) as here:
        from miles.commands.saved_runs.generation import answer  # imports torch

        work = answer(here, ask, options.n, options.seed, options.temperature, options.max_response_len, options.image)
        return asyncio.run(work)


def _check_row(settings: Settings, number: int) -> None:
    """Refuse a number without a row before the weights are exported, which takes longer."""
    from miles.tasks.data.sources import open_rows

    sources = {} if settings.reads_conversations else settings.data.mixed_sources
    if not sources:
        raise InputError("PROMPT is required: the run reads no file of prompts")
    rows = sum(len(open_rows(source)) for source in sources.values())
    if number > rows:
        raise InputError(f"--row {number}: the run has {rows} prompts; give one of 1 to {rows}")
