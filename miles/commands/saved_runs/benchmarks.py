"""Public benchmarks by name, for ``miles eval --benchmarks``: rows, prompt, scorer and sampling of each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles.base.text import InputError
from miles.config.evaluation import EvaluationArguments
from miles.config.rules import sequence_limit
from miles.config.settings import Settings
from miles.tasks.data.settings import HUGGING_FACE
from miles.tasks.data.sources import load_hugging_face
from miles.tasks.rewards.settings import RewardArguments

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
                found = {"input": self.prompt.format_map(row)}
                found |= {"label": str(row[self.label])} if self.label is not None else {}
                yield found | {"metadata": {key: _without_nulls(row[key]) for key in self.metadata}}
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
        words: Names, each with ``=FOLDER`` if a local folder holds the set.
        folder: Where the prompts are written.
        longest: Tokens of the longest answer; None is the benchmark's.

    Raises:
        InputError: There is no benchmark of a name, or its set cannot be loaded.
    """
    for word in words:
        name, _, source = word.partition("=")
        if name not in BENCHMARKS:
            raise InputError(f"--benchmarks {name}: no such benchmark; give some of {', '.join(BENCHMARKS)}")
        chosen, rows = BENCHMARKS[name], folder / f"{name}.jsonl"
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
