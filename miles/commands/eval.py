"""Evaluate a checkpoint of a run on held-out sets: accuracy and pass@k with 95 % intervals.

The sets, the sampling and the reward are the run's, unless flags change them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.base.flags import count
from miles.base.text import InputError
from miles.commands.saved_runs.weights import add_weights_flags, generating
from miles.config.command_parser import CommandParser
from miles.config.components import ENGINES
from miles.config.evaluation import EvaluationArguments
from miles.config.rules import sequence_limit
from miles.config.settings import Settings
from miles.observe.run_files import why_not_written
from miles.tasks.data.settings import HUGGING_FACE
from miles.tasks.data.sources import load_hugging_face
from miles.tasks.rewards.settings import RewardArguments

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
    options = parser.parse_args(list(argv))
    parser.refuse_below_one(n_samples=options.n_samples, max_response_len=options.max_response_len)
    if options.sets and options.benchmarks:
        parser.error("--benchmarks: cannot be used with --sets; give one of the two")
    for name in (word.partition("=")[0] for word in options.benchmarks):
        if name not in BENCHMARKS:
            parser.error(f"--benchmarks {name}: no such benchmark; give some of {', '.join(BENCHMARKS)}")
    if len(options.sets) % 2:
        parser.error(f"--sets {' '.join(options.sets)}: must be NAME SOURCE pairs; write a name before each source")
    if options.out is not None:
        if not options.out.parent.is_dir():
            parser.error(f"--out {options.out}: must be a file in a folder that exists; give another path")
        if (fault := why_not_written(options.out)) is not None:
            parser.error(f"--out {options.out}: {fault}")
    try:
        results = _evaluate(options)
    except (InputError, ValueError, OSError) as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps({result.name: _as_json(result) for result in results}, indent=1))
    else:
        print("\n\n".join(map(_table, results)))
    if options.out is not None:
        try:
            _write(options.out, results)
        except OSError as error:
            parser.error(f"--out {options.out}: cannot be written ({error.strerror}); give another file")
    return 0


def _evaluate(options: argparse.Namespace) -> list[SetResult]:
    longest = options.max_response_len
    with generating(options) as here, tempfile.TemporaryDirectory(prefix="miles-eval-") as prompts:
        from miles.commands.saved_runs.generation import evaluate_sets  # imports torch

        if options.benchmarks:
            each = [*benchmark_settings(here, options.benchmarks, Path(prompts), longest)]
            return [result for one in each for result in asyncio.run(evaluate_sets(one, (), options.n_samples))]
        if longest is not None:
            here = replace(here, evaluation=replace(here.evaluation, eval_max_response_len=longest))
        return asyncio.run(evaluate_sets(here, options.sets, options.n_samples))


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


# Public benchmarks by name, for ``miles eval --benchmarks``: rows, prompt, scorer and sampling of each.


_BOXED = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."


@dataclass(frozen=True)
class Benchmark:
    """One public set, and how it is asked and scored.

    Attributes:
        hub: Its name on the Hugging Face hub.
        split: The split that is asked.
        prompt: The prompt, with the columns of a row in braces.
        scorer: The built-in reward (``--rm-type``).
        label: The column of the reference answer.
        metadata: Columns that the scorer reads.
        config: The part of the set on the hub, if it has parts.
        answers: Answers per prompt.
        temperature: Of the sampling; 0 is greedy.
        longest: Tokens of the longest answer.
    """

    hub: str
    split: str
    prompt: str
    scorer: str
    label: str | None = None
    metadata: tuple[str, ...] = ()
    config: str | None = None
    answers: int = 1
    temperature: float = 0.0
    longest: int = 2048

    def rows(self, name: str, source: str | None) -> Iterator[dict[str, Any]]:
        """Yield the rows as prompts, labels and metadata; of the hub, or of a local copy of the set.

        Raises:
            InputError: The set cannot be loaded, or lacks a column.
        """
        place = source or self.hub
        try:
            table = load_hugging_face(
                f"{HUGGING_FACE}{place}:{self.split}", place, self.split, None if source else self.config
            )
        except InputError as error:
            raise InputError(f"--benchmarks {name}: {error}") from error
        for row in table:
            try:
                entry = {"input": self.prompt.format_map(row)}
                if self.label is not None:
                    entry["label"] = str(row[self.label])
                yield entry | {"metadata": {key: _without_nulls(row[key]) for key in self.metadata}}
            except KeyError as error:
                there = ", ".join(table.column_names)
                raise InputError(f"--benchmarks {name}: the set has no column {error}; it has {there}") from None


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys that a table adds to every object of a column."""
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return {key: part for key, part in value.items() if part is not None} if isinstance(value, dict) else value


BENCHMARKS = {
    "aime24": Benchmark(
        "HuggingFaceH4/aime_2024", "train", _BOXED, "math", "answer", answers=16, temperature=0.6, longest=16384
    ),
    "gsm8k": Benchmark(
        "openai/gsm8k",
        "test",
        "{question}\n\nReason step by step, and end with the answer as a number.",
        "last_number",
        "answer",
        config="main",
        longest=1024,
    ),
    "ifeval": Benchmark(
        "google/IFEval", "train", "{prompt}", "ifeval", metadata=("instruction_id_list", "kwargs"), longest=1280
    ),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", _BOXED, "math", "answer", longest=4096),
}


def benchmark_settings(
    settings: Settings, words: Iterable[str], folder: Path, longest: int | None
) -> Iterator[Settings]:
    """Yield the settings that evaluate each benchmark: the run's model, engine and chat template, and no tools.

    Args:
        settings: The settings for generating here.
        words: Names of ``BENCHMARKS``, each with ``=FOLDER`` if a local folder holds the set.
        folder: Where the prompts are written.
        longest: Tokens of the longest answer; None is the benchmark's.

    Raises:
        InputError: A set cannot be loaded.
    """
    for word in words:
        name, _, source = word.partition("=")
        chosen = BENCHMARKS[name]
        rows = folder / f"{name}.jsonl"
        with rows.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in chosen.rows(name, source or None))
        data = replace(
            settings.data,
            input_key="input",
            label_key=None if chosen.label is None else "label",
            metadata_key="metadata",
        )
        evaluation = EvaluationArguments(
            eval_prompt_data=(name, str(rows)),
            n_samples_per_eval_prompt=chosen.answers,
            eval_temperature=chosen.temperature,
            eval_top_p=1.0,
            eval_top_k=-1,
            eval_min_p=0.0,
            eval_max_response_len=longest or chosen.longest,
        )
        rollout = replace(
            settings.rollout,
            custom_generate_function_path=None,
            agent_command=None,
            environment=None,
            rollout_max_context_len=sequence_limit(settings)[0],
        )
        reward = RewardArguments(rm_type=chosen.scorer)
        yield replace(settings, data=data, evaluation=evaluation, rollout=rollout, reward=reward)
