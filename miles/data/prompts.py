"""A prompt set: the rows of a source, rendered and tokenized."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles.arguments.data import DataArguments
from miles.data import reasoning_gym_task
from miles.data.row import Row
from miles.data.sources import read_rows
from miles.data.tokenizer import PromptRenderer
from miles.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one source, in its order, and how many were dropped for their length."""

    prompts: tuple[Prompt, ...]
    dropped: int


def load_prompts(
    source: str,
    data: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    input_key: str | None = None,
    label_key: str | None = None,
) -> PromptSet:
    """Read, render and tokenize the prompts of ``source``.

    Text rendered through a chat template is tokenized without special tokens, because templates write them; other text
    with the tokenizer's default. Prompts of more than ``rollout_max_prompt_len`` tokens are dropped, and their number
    is logged.

    Args:
        source: One of ``sources.FORMS``.
        data: Names of the columns, chat template and length limit.
        tokenizer: The model's tokenizer.
        input_key: Overrides ``data.input_key``. Ignored by ``reasoning_gym``, which has its own columns.
        label_key: Overrides ``data.label_key``, in the same way.

    Raises:
        ValueError: For a malformed row, naming file and line, and for a source without prompts.
    """
    if source.startswith(reasoning_gym_task.SCHEME):
        columns = _Columns(
            reasoning_gym_task.INPUT, reasoning_gym_task.LABEL, reasoning_gym_task.METADATA, label_may_be_null=True
        )
    else:
        columns = _Columns(input_key or data.input_key, label_key or data.label_key, data.metadata_key)
    renderer = PromptRenderer(data, tokenizer)
    rows = list(read_rows(source))
    if not rows:
        raise ValueError(f"prompt source {source}: it is empty; give one with at least one row")
    texts = [renderer.render(row, row.column(columns.input, "--input-key")) for row in rows]
    token_ids = tokenizer(texts, add_special_tokens=not renderer.uses_template)["input_ids"]
    prompts = [_prompt(row, text, ids, columns) for row, text, ids in zip(rows, texts, token_ids, strict=True)]
    return _drop_long(prompts, data.rollout_max_prompt_len, source)


@dataclass(frozen=True)
class _Columns:
    """The names of a source's columns."""

    input: str
    label: str | None
    metadata: str
    label_may_be_null: bool = False  # some tasks have no single right answer


def _prompt(row: Row, text: str, token_ids: Sequence[int], columns: _Columns) -> Prompt:
    if not token_ids:
        row.refuse(f"the tokenizer makes no token of the prompt {text!r}; correct or remove the row")
    return Prompt(text, tuple(token_ids), _label(row, columns), _metadata(row, columns.metadata), row.where)


def _label(row: Row, columns: _Columns) -> Any:
    if columns.label is None:
        return None
    if columns.label_may_be_null:
        return row.columns[columns.label]
    return row.column(columns.label, "--label-key")


def _metadata(row: Row, key: str) -> dict[str, Any]:
    metadata = row.columns.get(key)
    if metadata is None:  # Parquet stores null if a row has no value
        return {}
    if not isinstance(metadata, dict):
        row.refuse(
            f"column {key!r} is of type {type(metadata).__name__}; it must be an object: correct it, or choose another "
            f"column with --metadata-key"
        )
    return metadata


def _drop_long(prompts: list[Prompt], limit: int | None, source: str) -> PromptSet:
    kept = tuple(p for p in prompts if limit is None or len(p.token_ids) <= limit)
    dropped = len(prompts) - len(kept)
    if not kept:
        shortest = min(len(p.token_ids) for p in prompts)
        raise ValueError(
            f"--rollout-max-prompt-len {limit}: drops all {len(prompts)} prompts of {source}; the shortest has "
            f"{shortest} tokens; raise the limit"
        )
    if dropped:
        _logger.warning(
            "%s: dropped %d of %d prompts of more than %d tokens (--rollout-max-prompt-len)",
            source,
            dropped,
            len(prompts),
            limit,
        )
    _logger.info("%s: %d prompts", source, len(kept))
    return PromptSet(kept, dropped)
