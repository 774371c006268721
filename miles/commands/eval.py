"""Evaluate a checkpoint of a run on held-out sets: accuracy and pass@k with 95 % intervals.

The sets, the sampling and the reward are the run's, unless flags change them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.base.flags import count
from miles.base.text import InputError
from miles.commands.saved_runs.run import SavedRun
from miles.commands.saved_runs.weights import add_weights_flags, hugging_face_folder
from miles.config.command_parser import CommandParser
from miles.config.components import ENGINES
from miles.observe.run_files import why_not_written

if TYPE_CHECKING:
    from miles.commands.saved_runs.generation import SetResult


def main(argv: Sequence[str]) -> int:
    """Print a table per set and return 0.

    Raises:
        SystemExit: With status 2 for wrong arguments, sets that cannot be read, and weights that are not there.
    """
    parser = CommandParser(prog="miles eval", description=__doc__, allow_abbrev=False)
    add_weights_flags(parser)
    parser.add_argument(
        "--sets", nargs="+", default=[], metavar="NAME SOURCE", help="sets to evaluate (default: the run's)"
    )
    parser.add_argument(
        "--benchmarks",
        nargs="+",
        default=[],
        metavar="NAME",
        help="public benchmarks instead of sets: aime24, gsm8k, ifeval, math500; NAME=FOLDER for a set on this machine",
    )
    parser.add_argument(
        "--max-response-len", type=int, metavar="N", help="tokens of the longest answer (default: the set's)"
    )
    parser.add_argument("--n-samples", type=int, metavar="N", help="answers per prompt (default: as in the run)")
    parser.add_argument("--engine", choices=tuple(ENGINES), help="generation engine (default: the run's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="also write every answer with its reward, as JSON lines"
    )
    given = parser.parse_args(list(argv))
    if given.n_samples is not None and given.n_samples < 1:
        parser.error(f"--n-samples {given.n_samples}: must be at least 1; give 1 or more")
    if given.max_response_len is not None and given.max_response_len < 1:
        parser.error(f"--max-response-len {given.max_response_len}: must be at least 1; give 1 or more")
    if given.sets and given.benchmarks:
        parser.error("--benchmarks: cannot be used with --sets; give one of the two")
    if len(given.sets) % 2:
        parser.error(f"--sets {' '.join(given.sets)}: must be NAME SOURCE pairs; write a name before each source")
    if given.out is not None:
        if not given.out.parent.is_dir():
            parser.error(f"--out {given.out}: must be a file in a folder that exists; give another path")
        if (fault := why_not_written(given.out)) is not None:
            parser.error(f"--out {given.out}: {fault}")
    try:
        results = _evaluate(given)
    except (InputError, ValueError, OSError) as error:
        parser.error(str(error))
    if given.json:
        print(json.dumps({result.name: _as_json(result) for result in results}, indent=1))
    else:
        print("\n\n".join(map(_table, results)))
    if given.out is not None:
        try:
            _write(given.out, results)
        except OSError as error:
            parser.error(f"--out {given.out}: cannot be written ({error.strerror}); give another file")
    return 0


def _evaluate(given: argparse.Namespace) -> list[SetResult]:
    run = SavedRun(given.run)
    settings = run.settings  # read before the weights are exported, which takes longer
    with (
        hugging_face_folder(run, given.step, given.weights) as model,
        tempfile.TemporaryDirectory(prefix="miles-eval-") as logs,
    ):
        from miles.commands.saved_runs.benchmarks import benchmark_settings
        from miles.commands.saved_runs.generation import evaluate_sets, settings_for  # imports torch

        here, longest = settings_for(settings, model, Path(logs), given.engine), given.max_response_len
        if given.benchmarks:
            each = [*benchmark_settings(here, given.benchmarks, Path(logs), longest)]
            return [result for one in each for result in asyncio.run(evaluate_sets(one, (), given.n_samples))]
        if longest is not None:
            here = replace(here, evaluation=replace(here.evaluation, eval_max_response_len=longest))
        return asyncio.run(evaluate_sets(here, given.sets, given.n_samples))


def _table(result: SetResult) -> str:
    answers = count(result.samples_per_prompt, "answer")
    lines = [f"{result.name}: {count(result.prompts, 'prompt')}, {answers} each"]
    for name, estimate in result.estimates.items():
        lines.append(f"  {name:20} {estimate}  ({estimate.method}, 95 %, over prompts)")
    return "\n".join([*lines, *(f"  {name:20} {value:.3f}" for name, value in result.means.items())])


def _as_json(result: SetResult) -> dict[str, Any]:
    estimates = {name: asdict(estimate) for name, estimate in result.estimates.items()}
    counts = {"prompts": result.prompts, "samples_per_prompt": result.samples_per_prompt}
    return {**counts, "estimates": estimates, "means": result.means}


def _write(path: Path, results: Sequence[SetResult]) -> None:
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for result in results:
            for sample in result.samples:
                row = {
                    "set": result.name,
                    "prompt": sample.prompt.text,
                    "response": sample.response,
                    "label": sample.prompt.label,
                    "reward": sample.reward,
                    "status": sample.status.value,
                }
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
