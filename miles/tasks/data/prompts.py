"""A prompt set: the rows of a source, rendered and tokenized."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any

from miles.base.text import InputError
from miles.tasks.data import reasoning_gym_task, verifiers_task
from miles.tasks.data.row import Notes, Row
from miles.tasks.data.settings import DataArguments
from miles.tasks.data.sources import read_rows
from miles.tasks.data.tokenizer import PromptRenderer, RenderedPrompt
from miles.tasks.rewards.answer_text import plain_number
from miles.types.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)

_BOOLEAN_LABEL = "the label is true or false, which built-in rewards refuse"
_BLANK_LABEL = "the label is text without a character, which built-in rewards refuse"
_NO_LABEL = "there is no label, so the reward function gets None"
_NO_LABEL_KEY = "there is no label, as --label-key is not given, so the reward function gets None"


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
    labels_optional: bool = False,
    check: Callable[[Prompt], None] = lambda prompt: None,
    max_context_len: int | None = None,
) -> PromptSet:
    """Read, render and tokenize the prompts of ``source``.

    Unusual rows that are allowed are counted and logged, one line for each kind (notes.py).

    Text rendered through a chat template is tokenized without special tokens, because templates write them; other text
    with the tokenizer's default. Prompts of more than ``rollout_max_prompt_len`` tokens are dropped, and their number
    is logged; so are prompts that leave no room for a response in ``max_context_len`` tokens.

    Args:
        source: One of ``arguments.data.SOURCES``.
        data: Names of the columns, chat template and length limit.
        tokenizer: The model's tokenizer.
        input_key: Overrides ``data.input_key``. Ignored by ``reasoning_gym`` and ``verifiers``.
        label_key: Overrides ``data.label_key``, in the same way.
        labels_optional: Whether rows may lack a label: a custom reward may not need it. One at least must have it.
        check: Raises ``ValueError`` for a prompt that a reward of the run cannot score answers to.
        max_context_len: The most tokens of prompt and response together.

    Raises:
        InputError: For a malformed row, naming file and line, and for a source without prompts.
    """
    for own in (reasoning_gym_task, verifiers_task):
        if source.startswith(own.SCHEME):
            columns = _Columns(own.INPUT, own.LABEL, own.METADATA, label_may_be_null=True)
            break
    else:
        columns = _Columns(input_key or data.input_key, label_key or data.label_key, data.metadata_key)
    optional = columns.label_may_be_null or labels_optional
    columns = replace(columns, label_may_be_null=optional, check=check)
    renderer = PromptRenderer(data, tokenizer)
    rows = list(read_rows(source))
    if not rows:
        raise InputError(f"prompt source {source}: it is empty; give one with at least one row")
    if labels_optional and not any(_has_label(row, columns) for row in rows):
        columns = replace(columns, label_may_be_null=False)  # the first row is refused: the key is a wrong one
    notes = Notes()
    rendered = [renderer.render(row, row.column(columns.input, "--input-key"), notes) for row in rows]
    unread = [prompt.text for prompt in rendered if prompt.token_ids is None]
    read = iter(tokenizer(unread, add_special_tokens=not renderer.uses_template)["input_ids"] if unread else ())
    token_ids = [next(read) if prompt.token_ids is None else prompt.token_ids for prompt in rendered]
    prompts = [
        _prompt(row, prompt, ids, columns, notes) for row, prompt, ids in zip(rows, rendered, token_ids, strict=True)
    ]
    if labels_optional and columns.label is None:
        notes.add_all(_NO_LABEL_KEY, len(rows), rows[0].where)
    notes.log(source, len(rows))
    return _drop_long(prompts, data.rollout_max_prompt_len, max_context_len, source)


class RowReader:
    """Reads rows of the user's own source one by one, as ``load_prompts`` reads those of a file."""

    def __init__(
        self,
        data: DataArguments,
        tokenizer: PreTrainedTokenizerBase,
        *,
        labels_optional: bool = False,
        check: Callable[[Prompt], None] = lambda prompt: None,
        max_context_len: int | None = None,
    ) -> None:
        """See ``load_prompts``."""
        self._data = data
        self._tokenizer = tokenizer
        self._renderer = PromptRenderer(data, tokenizer)
        self._columns = _Columns(data.input_key, data.label_key, data.metadata_key, labels_optional, check)
        self._limits = (data.rollout_max_prompt_len, None if max_context_len is None else max_context_len - 1)
        self._notes = Notes()  # of all rows

    def __call__(self, columns: Mapping[str, Any], number: int) -> Prompt:
        """Return the prompt of row ``number``.

        Raises:
            InputError: The row is malformed, or longer than a limit: its source chooses what is drawn.
        """
        row, notes = Row(f"row {number} of --data-source-path", columns), Notes()
        rendered = self._renderer.render(row, row.column(self._columns.input, "--input-key"), notes)
        ids = rendered.token_ids
        if ids is None:
            ids = self._tokenizer(rendered.text, add_special_tokens=not self._renderer.uses_template)["input_ids"]
        for limit in self._limits:
            if limit is not None and len(ids) > limit:
                row.refuse(f"the prompt has {len(ids)} tokens, and at most {limit} are allowed; leave it out")
        prompt = _prompt(row, rendered, ids, self._columns, notes)
        self._notes.log_new(notes)
        return prompt


@dataclass(frozen=True)
class _Columns:
    """The names of a source's columns."""

    input: str
    label: str | None
    metadata: str
    label_may_be_null: bool = False  # some tasks have no single right answer
    check: Callable[[Prompt], None] = lambda prompt: None


def _prompt(row: Row, rendered: RenderedPrompt, ids: Sequence[int], columns: _Columns, notes: Notes) -> Prompt:
    if not ids:
        row.refuse(f"the tokenizer makes no token of the prompt {rendered.text!r}; correct or remove the row")
    label, metadata = _label(row, columns, notes), _metadata(row, columns.metadata)
    given, tools = row.find(columns.input), rendered.tools
    prompt = Prompt(rendered.text, tuple(ids), label, metadata, row.where, input=given, tools=tools)
    try:
        columns.check(prompt)
    except ValueError as error:
        row.refuse(str(error).replace(f"the prompt {row.where}", "the row"))
    return prompt


def _has_label(row: Row, columns: _Columns) -> bool:
    return columns.label is None or row.find(columns.label) is not None


def _label(row: Row, columns: _Columns, notes: Notes) -> Any:
    if columns.label is None:
        return None
    if columns.label_may_be_null and not _has_label(row, columns):
        notes.add(_NO_LABEL, row.where)
        return None
    label = row.column(columns.label, "--label-key")
    if isinstance(label, list) and label:  # alternatives
        return [_value(row, part, columns) for part in label]
    label = _value(row, label, columns)
    if isinstance(label, bool) or (isinstance(label, str) and not label.strip()):
        notes.add(_BOOLEAN_LABEL if isinstance(label, bool) else _BLANK_LABEL, row.where)
    return label


def _value(row: Row, label: Any, columns: _Columns) -> str | int | float:
    if not isinstance(label, str | Real | Decimal):
        row.refuse(
            f"the label, column {columns.label!r}, is of type {type(label).__name__}; give text, a number or a list of "
            f"right answers, and put anything else into the column of --metadata-key"
        )
    if not isinstance(label, str) and not math.isfinite(label):
        row.refuse(f"the label, column {columns.label!r}, is {label}; give a finite number or text")
    if isinstance(label, str | int | float):
        return label
    text = plain_number(label)  # of a Decimal or a number of numpy
    number: int | float = float(text) if "." in text else int(text)
    return number if plain_number(number) == text else text


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


def _drop_long(prompts: list[Prompt], limit: int | None, max_context_len: int | None, source: str) -> PromptSet:
    flag = "--rollout-max-prompt-len"
    if max_context_len is not None and (limit is None or limit >= max_context_len):
        flag, limit = f"--rollout-max-context-len {max_context_len}", max_context_len - 1
    long = [p for p in prompts if limit is not None and len(p.token_ids) > limit]
    if len(long) == len(prompts):
        shortest = min(len(p.token_ids) for p in prompts)
        shown = f"{flag} {limit}" if flag == "--rollout-max-prompt-len" else flag
        raise InputError(
            f"{shown}: drops all {len(prompts)} prompts of {source}; the shortest has {shortest} tokens; raise the "
            f"limit"
        )
    if long:
        _logger.warning(
            "%s: dropped %d of %d prompts of more than %d tokens (%s); the first is %s",
            source,
            len(long),
            len(prompts),
            limit,
            flag,
            long[0].source,
        )
    kept = tuple(p for p in prompts if limit is None or len(p.token_ids) <= limit)
    _logger.info("%s: %d prompts", source, len(kept))
    return PromptSet(kept, len(long))
